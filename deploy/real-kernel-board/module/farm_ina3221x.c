// SPDX-License-Identifier: GPL-2.0
/*
 * The files that L4T R32's driver of the INA3221 has, on the kernel's own IIO core: names, power, voltage and current of
 * three channels, limits, and the two ways in which the chip is run. What it has to look like: 150balbes/Jetson-Nano,
 * nvidia/drivers/staging/iio/meter/ina3221.c.
 */
#include <linux/i2c.h>
#include <linux/iio/iio.h>
#include <linux/iio/sysfs.h>
#include <linux/module.h>
#include <linux/of.h>
#include <linux/version.h>

#define CHANNELS 3
#define CONTINUOUS 0x7727	/* 64 averages of 1.1 ms and 1.1 ms on three channels: a value every 422 ms */
#define TRIGGERED 0x7003	/* no averages, 140 us: the chip converts for each reader */
#define INA_CONFIG 0x00

struct sensor {
	struct i2c_client *client;
	const char *names[CHANNELS];
	u32 shunt_mohm[CHANNELS];
	int mode;
};
enum { NAME, POWER, VOLTAGE, CURRENT, WARN, CRIT, DELAY };
#define ADDRESS(kind, channel) ((kind) << 4 | (channel))

static int read_step(struct sensor *sensor, int reg)
{
	int word = i2c_smbus_read_word_swapped(sensor->client, reg);

	return word < 0 ? word : (s16)word >> 3;
}

static int read_mv(struct sensor *sensor, int channel)
{
	int steps = read_step(sensor, 2 + 2 * channel);

	return steps < 0 ? steps : steps * 8;
}

static int read_ma(struct sensor *sensor, int channel)
{
	int steps = read_step(sensor, 1 + 2 * channel);

	return steps < 0 ? steps : steps * 40 / (int)sensor->shunt_mohm[channel];
}

static ssize_t channel_show(struct device *dev, struct device_attribute *attr, char *text)
{
	struct sensor *sensor = iio_priv(dev_to_iio_dev(dev));
	int address = to_iio_dev_attr(attr)->address, channel = address & 0xf, mv, value = 0;

	switch (address >> 4) {
	case NAME:
		return sysfs_emit(text, "%s\n", sensor->names[channel]);
	case WARN:
	case CRIT:
		return sysfs_emit(text, "%d ma\n", 163800 / (int)sensor->shunt_mohm[channel]);
	case VOLTAGE:
		value = read_mv(sensor, channel);
		break;
	case CURRENT:
		value = read_ma(sensor, channel);
		break;
	case POWER:
		mv = read_mv(sensor, channel);
		value = mv < 0 ? mv : read_ma(sensor, channel);
		if (value >= 0)
			value = mv * value / 1000;
	}
	return value < 0 ? value : sysfs_emit(text, "%d\n", value);
}

static ssize_t running_mode_show(struct device *dev, struct device_attribute *attr, char *text)
{
	struct sensor *sensor = iio_priv(dev_to_iio_dev(dev));

	return sysfs_emit(text, "%d\n", sensor->mode);
}

static ssize_t running_mode_store(struct device *dev, struct device_attribute *attr, const char *text, size_t n)
{
	struct sensor *sensor = iio_priv(dev_to_iio_dev(dev));
	int mode, ret = kstrtoint(text, 0, &mode);

	if (ret || mode < -1 || mode > 1)
		return -EINVAL;
	ret = i2c_smbus_write_word_swapped(sensor->client, INA_CONFIG, mode == 0 ? TRIGGERED : CONTINUOUS);
	sensor->mode = mode;
	return ret ?: n;
}

#define CHANNEL_FILES(n) \
	static IIO_DEVICE_ATTR_NAMED(name_##n, rail_name_##n, 0600, channel_show, NULL, ADDRESS(NAME, n)); \
	static IIO_DEVICE_ATTR_NAMED(power_##n, in_power##n##_input, 0444, channel_show, NULL, ADDRESS(POWER, n)); \
	static IIO_DEVICE_ATTR_NAMED(voltage_##n, in_voltage##n##_input, 0444, channel_show, NULL, ADDRESS(VOLTAGE, n)); \
	static IIO_DEVICE_ATTR_NAMED(current_##n, in_current##n##_input, 0444, channel_show, NULL, ADDRESS(CURRENT, n)); \
	static IIO_DEVICE_ATTR_NAMED(warn_##n, warn_current_limit_##n, 0600, channel_show, NULL, ADDRESS(WARN, n)); \
	static IIO_DEVICE_ATTR_NAMED(crit_##n, crit_current_limit_##n, 0600, channel_show, NULL, ADDRESS(CRIT, n)); \
	static IIO_DEVICE_ATTR_NAMED(delay_##n, polling_delay_##n, 0600, channel_show, NULL, ADDRESS(DELAY, n))
#define CHANNEL_ENTRIES(n) \
	&iio_dev_attr_name_##n.dev_attr.attr, &iio_dev_attr_power_##n.dev_attr.attr, \
	&iio_dev_attr_voltage_##n.dev_attr.attr, &iio_dev_attr_current_##n.dev_attr.attr, \
	&iio_dev_attr_warn_##n.dev_attr.attr, &iio_dev_attr_crit_##n.dev_attr.attr, \
	&iio_dev_attr_delay_##n.dev_attr.attr
CHANNEL_FILES(0);
CHANNEL_FILES(1);
CHANNEL_FILES(2);
static IIO_DEVICE_ATTR_RW(running_mode, 0);
static struct attribute *sensor_attrs[] = {
	CHANNEL_ENTRIES(0), CHANNEL_ENTRIES(1), CHANNEL_ENTRIES(2), &iio_dev_attr_running_mode.dev_attr.attr, NULL,
};
static const struct attribute_group sensor_group = { .attrs = sensor_attrs };
static const struct iio_info sensor_info = { .attrs = &sensor_group };

static int sensor_probe(struct i2c_client *client)
{
	struct device *dev = &client->dev;
	struct iio_dev *iio = devm_iio_device_alloc(dev, sizeof(struct sensor));
	struct device_node *node;
	struct sensor *sensor;
	u32 channel;
	int ret;

	if (!iio)
		return -ENOMEM;
	sensor = iio_priv(iio);
	sensor->client = client;
	sensor->mode = 1;
	for (channel = 0; channel < CHANNELS; channel++) {
		sensor->names[channel] = "NC";
		sensor->shunt_mohm[channel] = 10;
	}
	for_each_child_of_node(dev->of_node, node) {
		if (of_property_read_u32(node, "reg", &channel) || channel >= CHANNELS)
			continue;
		of_property_read_string(node, "ti,rail-name", &sensor->names[channel]);
		of_property_read_u32(node, "ti,shunt-resistor-mohm", &sensor->shunt_mohm[channel]);
	}
	ret = i2c_smbus_write_word_swapped(client, INA_CONFIG, CONTINUOUS);
	if (ret)
		return ret;
	iio->name = "ina3221x";
	iio->info = &sensor_info;
	iio->modes = INDIO_DIRECT_MODE;
	return devm_iio_device_register(dev, iio);
}

static const struct of_device_id sensor_match[] = { { .compatible = "ti,ina3221x" }, {} };
MODULE_DEVICE_TABLE(of, sensor_match);
static const struct i2c_device_id sensor_ids[] = { { "ina3221x" }, {} };
MODULE_DEVICE_TABLE(i2c, sensor_ids);
static struct i2c_driver sensor_driver = {
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	.probe_new = sensor_probe,
#else
	.probe = sensor_probe,
#endif
	.id_table = sensor_ids,
	.driver = { .name = "ina3221x", .of_match_table = sensor_match },
};
module_i2c_driver(sensor_driver);
MODULE_DESCRIPTION("The files of L4T's INA3221 driver");
MODULE_LICENSE("GPL");
