// SPDX-License-Identifier: GPL-2.0
/*
 * The clocks, rails, zones and fan of a Jetson board inside a virtual machine, behind the kernel's own interfaces.
 *
 * cpufreq, devfreq, thermal, I2C and debugfs are the kernel's; what answers behind them is a model. Rails follow the
 * real load of the guest's processors at the clocks that are set. Which board it is says the device tree. Faults are
 * module parameters, writable while it runs. Kernels 6.1 and later.
 *
 * Tables: the same facts as `inventory/`; register map and conversion times of the sensor: TI's INA3221 data sheet.
 */
#include <linux/cpufreq.h>
#include <linux/debugfs.h>
#include <linux/devfreq.h>
#include <linux/i2c.h>
#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/of.h>
#include <linux/platform_device.h>
#include <linux/pm_opp.h>
#include <linux/seq_file.h>
#include <linux/thermal.h>
#include <linux/tick.h>
#include <linux/version.h>

#define RAILS 6
#define CHANNELS 3
#define CLUSTERS 2
#define ZONES 4

static int rail_mw[RAILS];
module_param_array(rail_mw, int, NULL, 0644);
MODULE_PARM_DESC(rail_mw, "power of each rail, chip by chip; 0: as the model has it");
static int swing_mw;
module_param(swing_mw, int, 0644);
MODULE_PARM_DESC(swing_mw, "added to every rail of rail_mw during the first half of each swing_ms");
static unsigned int swing_ms = 100;
module_param(swing_ms, uint, 0644);
static int temp_mc[ZONES] = { 38500, 41000, 40000, 39000 };
module_param_array(temp_mc, int, NULL, 0644);
MODULE_PARM_DESC(temp_mc, "temperature of each zone, in the device tree's order");
static unsigned int cap_khz;
module_param(cap_khz, uint, 0644);
MODULE_PARM_DESC(cap_khz, "firmware holds CPU clocks down to this and cpufreq is not told; 0: it does not");
static unsigned int dead_chips;
module_param(dead_chips, uint, 0644);
MODULE_PARM_DESC(dead_chips, "bit N: the sensor N does not answer");

/* ---- what a board is */

struct cluster {
	unsigned long cpus;
	const struct cpufreq_frequency_table *table;
	unsigned int max_khz;
	int full_mw;		/* of one core, busy at max_khz */
};
enum rail { RAIL_NONE, RAIL_IN, RAIL_CPU, RAIL_GPU, RAIL_DDR, RAIL_SOC };
struct model {
	struct cluster clusters[CLUSTERS];
	const unsigned long *gpu_hz;
	const u64 *emc_hz;
	int gpus, emcs, bus, chips;
	enum rail rails[RAILS];
	int rail_mv;
	bool bpmp;		/* the memory clock's files are those of the BPMP firmware */
	int base_mw, idle_core_mw, ddr_full_mw;
};

#define POINT(khz) { .frequency = khz }
static const struct cpufreq_frequency_table nano_cpu[] = {
	POINT(102000), POINT(204000), POINT(307200), POINT(403200), POINT(518400), POINT(614400), POINT(710400),
	POINT(825600), POINT(921600), POINT(1036800), POINT(1132800), POINT(1224000), POINT(1326000), POINT(1428000),
	POINT(1479000), POINT(CPUFREQ_TABLE_END),
};
static const struct cpufreq_frequency_table tx2_cpu[] = {
	POINT(345600), POINT(499200), POINT(652800), POINT(806400), POINT(960000), POINT(1113600), POINT(1267200),
	POINT(1420800), POINT(1574400), POINT(1728000), POINT(1881600), POINT(2035200), POINT(CPUFREQ_TABLE_END),
};
static const unsigned long nano_gpu[] = {
	76800000, 153600000, 230400000, 307200000, 384000000, 460800000, 537600000, 614400000, 691200000, 768000000,
	844800000, 921600000,
};
static const unsigned long tx2_gpu[] = {
	114750000, 216750000, 318750000, 420750000, 522750000, 624750000, 726750000, 828750000, 930750000, 1032750000,
	1134750000, 1236750000, 1300500000,
};
static const u64 nano_emc[] = { 204000000, 408000000, 665600000, 800000000, 1065600000, 1331200000, 1600000000 };
static const u64 tx2_emc[] = {
	40800000, 68000000, 102000000, 204000000, 408000000, 665600000, 800000000, 1062400000, 1331200000, 1600000000,
	1866000000,
};
static const struct model nano = {
	.clusters = { { .cpus = 0x0f, .table = nano_cpu, .max_khz = 1479000, .full_mw = 750 } },
	.gpu_hz = nano_gpu, .gpus = ARRAY_SIZE(nano_gpu), .emc_hz = nano_emc, .emcs = ARRAY_SIZE(nano_emc),
	.bus = 6, .chips = 1, .rails = { RAIL_IN, RAIL_GPU, RAIL_CPU }, .rail_mv = 5088,
	.base_mw = 850, .idle_core_mw = 90, .ddr_full_mw = 400,
};
static const struct model tx2 = {
	.clusters = { { .cpus = 0x39, .table = tx2_cpu, .max_khz = 2035200, .full_mw = 600 },
		      { .cpus = 0x06, .table = tx2_cpu, .max_khz = 2035200, .full_mw = 900 } },
	.gpu_hz = tx2_gpu, .gpus = ARRAY_SIZE(tx2_gpu), .emc_hz = tx2_emc, .emcs = ARRAY_SIZE(tx2_emc),
	.bus = 0, .chips = 2, .rail_mv = 19040,
	.rails = { RAIL_GPU, RAIL_SOC, RAIL_NONE, RAIL_IN, RAIL_CPU, RAIL_DDR },
	.base_mw = 900, .idle_core_mw = 70, .ddr_full_mw = 1300, .bpmp = true,
};
static const struct model *board;

/* ---- power: energy_nj of every rail up to advanced_us */

static DEFINE_SPINLOCK(power_lock);
static u64 energy_nj[RAILS], advanced_us;
static u64 idle_us[NR_CPUS], wall_us[NR_CPUS];
static unsigned int set_khz[CLUSTERS];
static unsigned long gpu_now_hz;
static u64 emc_override_hz, emc_cap_hz;
static u64 emc_held;

static unsigned int real_khz(int cluster)
{
	return cap_khz ? min(cap_khz, set_khz[cluster]) : set_khz[cluster];
}

/* Unless a client holds it, the memory's clock is as high as the CPU's asks for: a Nano's floors, stretched for others. */
static u64 emc_now_hz(void)
{
	u64 highest = board->emc_hz[board->emcs - 1], wanted = emc_override_hz;
	int i;

	if (!emc_held)
		wanted = div_u64(highest * set_khz[0], board->clusters[0].max_khz * 7 / 10);
	if (emc_cap_hz && wanted > emc_cap_hz)
		wanted = emc_cap_hz;
	for (i = 0; i < board->emcs - 1 && board->emc_hz[i] < wanted; i++)
		;
	return board->emc_hz[i];
}

/* Of the clocks and of what the processors did since it was last asked; `dt_us` is that long. */
static void model_power(int mw[], u64 dt_us)
{
	int cpu_mw = 0, gpu_mw = 60, ddr_mw, soc_mw = 300, cluster, cpu, rail;

	for (cluster = 0; cluster < CLUSTERS; cluster++) {
		const struct cluster *c = &board->clusters[cluster];

		for_each_online_cpu(cpu) {
			u64 wall, idle, busy = 0;

			if (!(c->cpus & BIT(cpu)))
				continue;
			idle = get_cpu_idle_time(cpu, &wall, 0);
			if (wall > wall_us[cpu] && idle >= idle_us[cpu]) {
				u64 span = wall - wall_us[cpu];

				busy = 1000 - min_t(u64, 1000, div64_u64((idle - idle_us[cpu]) * 1000, span));
			}
			idle_us[cpu] = idle;
			wall_us[cpu] = wall;
			cpu_mw += board->idle_core_mw + (int)div_u64(busy * c->full_mw / 1000 * real_khz(cluster), c->max_khz);
		}
	}
	ddr_mw = (int)div64_u64(board->ddr_full_mw * emc_now_hz(), board->emc_hz[board->emcs - 1]);
	gpu_mw += (int)(gpu_now_hz / 20000000);
	for (rail = 0; rail < RAILS; rail++) {
		switch (board->rails[rail]) {
		case RAIL_CPU: mw[rail] = cpu_mw; break;
		case RAIL_GPU: mw[rail] = gpu_mw; break;
		case RAIL_DDR: mw[rail] = ddr_mw; break;
		case RAIL_SOC: mw[rail] = soc_mw; break;
		case RAIL_IN: mw[rail] = board->base_mw + cpu_mw + gpu_mw + ddr_mw; break;
		default: mw[rail] = 0;
		}
	}
}

/* For how long until `us` the swing was up. */
static u64 high_us(u64 us)
{
	u64 period = max(swing_ms, 1U) * 1000ULL, rest;
	u64 whole = div64_u64_rem(us, period, &rest);

	return whole * (period / 2) + min(rest, period / 2);
}

static u64 told_nj(int rail, u64 from_us, u64 to_us)
{
	s64 nj = (s64)rail_mw[rail] * (s64)(to_us - from_us) + (s64)swing_mw * (s64)(high_us(to_us) - high_us(from_us));

	return nj > 0 ? nj : 0;
}

static u64 advance(void)
{
	u64 now = ktime_to_us(ktime_get());
	int mw[RAILS], rail;

	lockdep_assert_held(&power_lock);
	if (now - advanced_us < 500)
		return now;
	model_power(mw, now - advanced_us);
	for (rail = 0; rail < RAILS; rail++)
		energy_nj[rail] += rail_mw[rail] ? told_nj(rail, advanced_us, now) : (u64)max(mw[rail], 0) * (now - advanced_us);
	advanced_us = now;
	return now;
}

/* What the rails have used up to now, as the sensor never knows it. */
static int energy_show(struct seq_file *file, void *unused)
{
	u64 now;
	int rail;

	spin_lock(&power_lock);
	now = advance();
	seq_printf(file, "time_us %llu\n", now);
	for (rail = 0; rail < board->chips * CHANNELS; rail++)
		seq_printf(file, "rail%d_uj %llu\n", rail, div_u64(energy_nj[rail], 1000));
	spin_unlock(&power_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(energy);

/* ---- CPU clocks */

static int find_cluster(unsigned int cpu)
{
	return board->clusters[1].cpus & BIT(cpu) ? 1 : 0;
}

static int policy_init(struct cpufreq_policy *policy)
{
	int cluster = find_cluster(policy->cpu), cpu;

	for_each_possible_cpu(cpu)
		if (board->clusters[cluster].cpus & BIT(cpu))
			cpumask_set_cpu(cpu, policy->cpus);
	policy->freq_table = (struct cpufreq_frequency_table *)board->clusters[cluster].table;
	policy->cpuinfo.transition_latency = 300 * NSEC_PER_USEC;
	policy->dvfs_possible_from_any_cpu = true;
	return 0;
}

static int policy_target(struct cpufreq_policy *policy, unsigned int index)
{
	spin_lock(&power_lock);
	advance();
	set_khz[find_cluster(policy->cpu)] = policy->freq_table[index].frequency;
	spin_unlock(&power_lock);
	return 0;
}

static unsigned int read_khz(unsigned int cpu)
{
	return real_khz(find_cluster(cpu));
}

static struct cpufreq_driver cpu_driver = {
	.name = "farm-board",
	.flags = CPUFREQ_NEED_INITIAL_FREQ_CHECK,
	.init = policy_init,
	.verify = cpufreq_generic_frequency_table_verify,
	.target_index = policy_target,
	.get = read_khz,
	.attr = cpufreq_generic_attr,
};

/* ---- GPU clock */

static int gpu_target(struct device *dev, unsigned long *hz, u32 flags)
{
	struct dev_pm_opp *opp = devfreq_recommended_opp(dev, hz, flags);

	if (IS_ERR(opp))
		return PTR_ERR(opp);
	dev_pm_opp_put(opp);
	spin_lock(&power_lock);
	advance();
	gpu_now_hz = *hz;
	spin_unlock(&power_lock);
	return 0;
}

static int gpu_status(struct device *dev, struct devfreq_dev_status *status)
{
	*status = (struct devfreq_dev_status){ .total_time = 100, .current_frequency = gpu_now_hz };
	return 0;
}

static int gpu_current(struct device *dev, unsigned long *hz)
{
	*hz = gpu_now_hz;
	return 0;
}

static struct devfreq_dev_profile gpu_profile = {
	.polling_ms = 1000, .target = gpu_target, .get_dev_status = gpu_status, .get_cur_freq = gpu_current,
};
static unsigned int railgate_enable = 1;
static int load;
static ssize_t railgate_enable_show(struct device *dev, struct device_attribute *attr, char *text)
{
	return sysfs_emit(text, "%u\n", railgate_enable);
}
static ssize_t railgate_enable_store(struct device *dev, struct device_attribute *attr, const char *text, size_t n)
{
	return kstrtouint(text, 0, &railgate_enable) ?: n;
}
static DEVICE_ATTR_RW(railgate_enable);
static DEVICE_INT_ATTR(load, 0444, load);
static struct attribute *gpu_attrs[] = { &dev_attr_railgate_enable.attr, &dev_attr_load.attr.attr, NULL };
ATTRIBUTE_GROUPS(gpu);

static int gpu_probe(struct platform_device *pdev)
{
	int i, ret;

	if (!board)
		return -EPROBE_DEFER;
	for (i = 0; i < board->gpus; i++) {
		ret = dev_pm_opp_add(&pdev->dev, board->gpu_hz[i], 900000);
		if (ret)
			return ret;
	}
	gpu_now_hz = gpu_profile.initial_freq = board->gpu_hz[0];
	return PTR_ERR_OR_ZERO(devm_devfreq_add_device(&pdev->dev, &gpu_profile, "simple_ondemand", NULL));
}

static const struct of_device_id gpu_match[] = { { .compatible = "tvm-farm,gpu" }, {} };
static struct platform_driver gpu_driver = {
	.probe = gpu_probe,
	.driver = { .name = "farm-gpu", .of_match_table = gpu_match, .dev_groups = gpu_groups },
};

/* ---- memory clock: override.emc and tegra_bwmgr of T210, or the BPMP's files */

static int rate_get(void *unused, u64 *hz)
{
	*hz = emc_now_hz();
	return 0;
}

/* A rate that is not in the BPMP's table is dropped without a word; T210's driver rounds up. */
static int rate_set(void *unused, u64 hz)
{
	int i;

	for (i = 0; i < board->emcs - 1 && board->emc_hz[i] < hz; i++)
		;
	if (board->emc_hz[i] == hz || !board->bpmp)
		emc_override_hz = board->emc_hz[i];
	return 0;
}

static int held_get(void *unused, u64 *held)
{
	*held = emc_held;
	return 0;
}

static int held_set(void *unused, u64 held)
{
	emc_held = !!held;
	return 0;
}

static int bound_get(void *last, u64 *hz)
{
	*hz = board->emc_hz[last ? board->emcs - 1 : 0];
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(rate_files, rate_get, rate_set, "%llu\n");
DEFINE_DEBUGFS_ATTRIBUTE(held_files, held_get, held_set, "%llu\n");
DEFINE_DEBUGFS_ATTRIBUTE(bound_files, bound_get, NULL, "%llu\n");

static int possible_rates_show(struct seq_file *file, void *unused)
{
	int i;

	for (i = 0; i < board->emcs; i++)
		seq_printf(file, "%llu ", div_u64(board->emc_hz[i], 1000));
	seq_putc(file, '\n');
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(possible_rates);

static struct dentry *made[5];
static u64 bpmp_state;

static void make_debug_files(void)
{
	void *last = &bpmp_state;	/* anything that is not NULL */
	struct dentry *clk = debugfs_lookup("clk", NULL) ?: debugfs_create_dir("clk", NULL), *dir;

	made[0] = debugfs_create_dir("farm-board", NULL);
	debugfs_create_file("energy", 0444, made[0], NULL, &energy_fops);
	if (board->bpmp) {
		made[1] = debugfs_create_dir("bpmp", NULL);
		dir = debugfs_create_dir("debug", made[1]);
		debugfs_create_file("possible_rates", 0400, debugfs_create_dir("emc", dir), NULL, &possible_rates_fops);
		dir = debugfs_create_dir("emc", debugfs_create_dir("clk", dir));
		debugfs_create_file("rate", 0600, dir, NULL, &rate_files);
		debugfs_create_file("mrq_rate_locked", 0600, dir, NULL, &held_files);
		debugfs_create_file("min_rate", 0400, dir, NULL, &bound_files);
		debugfs_create_file("max_rate", 0400, dir, last, &bound_files);
		debugfs_create_u64("state", 0600, dir, &bpmp_state);
		made[2] = debugfs_create_dir("emc", clk);
		debugfs_create_file("clk_rate", 0400, made[2], NULL, &rate_files);
		return;
	}
	made[1] = debugfs_create_dir("override.emc", clk);
	debugfs_create_file("clk_state", 0600, made[1], NULL, &held_files);
	debugfs_create_file("clk_update_rate", 0600, made[1], NULL, &rate_files);
	debugfs_create_file("clk_rate", 0400, made[1], NULL, &rate_files);
	made[2] = debugfs_create_dir("tegra_bwmgr", NULL);
	debugfs_create_file("emc_rate", 0400, made[2], NULL, &rate_files);
	debugfs_create_file("emc_min_rate", 0400, made[2], NULL, &bound_files);
	debugfs_create_file("emc_max_rate", 0400, made[2], last, &bound_files);
}

static ssize_t emc_iso_cap_show(struct kobject *kobj, struct kobj_attribute *attr, char *text)
{
	return sysfs_emit(text, "%llu\n", emc_cap_hz);
}
static ssize_t emc_iso_cap_store(struct kobject *kobj, struct kobj_attribute *attr, const char *text, size_t n)
{
	return kstrtou64(text, 0, &emc_cap_hz) ?: n;
}
static struct kobj_attribute emc_iso_cap = __ATTR_RW_MODE(emc_iso_cap, 0600);
static struct kobject *cap_folder;

/* ---- INA3221: one to three of them on an I2C bus */

#define INA_CONFIG 0x00
#define INA_MASK 0x0f
#define INA_MAKER 0xfe
#define INA_DIE 0xff
#define INA_FIRST 0x40
#define INA_DEFAULT 0x7127
#define INA_READY BIT(0)

struct chip {
	u16 regs[256];
	u64 cycle, seen, from_us, from_nj[CHANNELS];
};
static struct chip chips[RAILS / CHANNELS];
static DEFINE_MUTEX(chip_lock);
static int shunt_uohm[RAILS];

static void chip_reset(struct chip *chip)
{
	int reg;

	memset(chip->regs, 0, sizeof(chip->regs));
	chip->regs[INA_CONFIG] = INA_DEFAULT;
	for (reg = 7; reg <= 12; reg++)
		chip->regs[reg] = 0x7ff8;	/* limits that no current reaches */
	chip->regs[INA_MAKER] = 0x5449;
	chip->regs[INA_DIE] = 0x3220;
}

static u64 chip_cycle_us(const struct chip *chip)
{
	static const u16 time_us[] = { 140, 204, 332, 588, 1100, 2116, 4156, 8244 };
	static const u16 samples[] = { 1, 4, 16, 64, 128, 256, 512, 1024 };
	u16 config = chip->regs[INA_CONFIG];

	return (u64)samples[(config >> 9) & 7] * (time_us[(config >> 6) & 7] + time_us[(config >> 3) & 7]) *
	       max_t(int, hweight16(config & 0x7000), 1);
}

/* What a whole cycle has averaged: told power exactly over that cycle, the model's over the time since the last one. */
static void chip_convert(int number, u64 cycle, u64 cycle_us)
{
	struct chip *chip = &chips[number];
	int channel;
	u64 now;

	spin_lock(&power_lock);
	now = advance();
	for (channel = 0; channel < CHANNELS; channel++) {
		int rail = number * CHANNELS + channel, mw = 0, ua, mv = board->rail_mv;
		u64 nj = energy_nj[rail];

		if (rail_mw[rail])
			mw = (int)div64_u64(told_nj(rail, (cycle - 1) * cycle_us, cycle * cycle_us), cycle_us);
		else if (now > chip->from_us)
			mw = (int)div64_u64(nj - chip->from_nj[channel], now - chip->from_us);
		ua = (int)div_u64((u64)mw * 1000000, mv);
		chip->regs[1 + 2 * channel] = (u16)DIV_ROUND_CLOSEST_ULL((u64)ua * shunt_uohm[rail], 40 * 1000000ULL) << 3;
		chip->regs[2 + 2 * channel] = (u16)DIV_ROUND_CLOSEST(mv, 8) << 3;
		chip->from_nj[channel] = nj;
	}
	chip->from_us = now;
	spin_unlock(&power_lock);
	chip->cycle = cycle;
}

static int chip_transfer(struct i2c_adapter *bus, u16 address, unsigned short flags, char direction, u8 reg, int size,
			 union i2c_smbus_data *data)
{
	int number = address - INA_FIRST, ret = 0;
	struct chip *chip = &chips[number];
	u64 cycle, cycle_us;

	if (number < 0 || number >= board->chips || dead_chips & BIT(number))
		return -ENXIO;
	if (size == I2C_SMBUS_QUICK)
		return 0;
	if (size != I2C_SMBUS_WORD_DATA)
		return -EOPNOTSUPP;
	mutex_lock(&chip_lock);
	cycle_us = chip_cycle_us(chip);
	cycle = div64_u64(ktime_to_us(ktime_get()), cycle_us);
	if (cycle != chip->cycle)
		chip_convert(number, cycle, cycle_us);
	if (direction == I2C_SMBUS_WRITE) {
		u16 value = swab16(data->word);

		if (reg == INA_CONFIG && value & 0x8000)
			chip_reset(chip);
		else if (reg < INA_MAKER)
			chip->regs[reg] = value;
	} else if (reg == INA_MASK) {
		data->word = swab16((chip->regs[reg] & ~INA_READY) | (chip->seen != cycle ? INA_READY : 0));
		chip->seen = cycle;
	} else {
		data->word = swab16(chip->regs[reg]);
	}
	mutex_unlock(&chip_lock);
	return ret;
}

static u32 chip_functions(struct i2c_adapter *bus)
{
	return I2C_FUNC_SMBUS_QUICK | I2C_FUNC_SMBUS_WORD_DATA;
}
static const struct i2c_algorithm chip_algorithm = { .smbus_xfer = chip_transfer, .functionality = chip_functions };
static struct i2c_adapter chip_bus = { .owner = THIS_MODULE, .name = "farm-board", .algo = &chip_algorithm };

static void read_shunts(struct device_node *bus)
{
	struct device_node *chip, *input;
	u32 address, channel, ohm;

	for_each_available_child_of_node(bus, chip) {
		if (of_property_read_u32(chip, "reg", &address) || address - INA_FIRST >= RAILS / CHANNELS)
			continue;
		for_each_child_of_node(chip, input)
			if (!of_property_read_u32(input, "reg", &channel) && channel < CHANNELS) {
				int *uohm = &shunt_uohm[(address - INA_FIRST) * CHANNELS + channel];

				if (!of_property_read_u32(input, "shunt-resistor-micro-ohms", &ohm))
					*uohm = ohm;
				else if (!of_property_read_u32(input, "ti,shunt-resistor-mohm", &ohm))
					*uohm = ohm * 1000;	/* as L4T has it */
			}
	}
}

/* ---- zones and fan */

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
#define thermal_zone_device_priv(zone) ((zone)->devdata)
#endif
static int zone_temp(struct thermal_zone_device *zone, int *mc)
{
	*mc = *(int *)thermal_zone_device_priv(zone);
	return 0;
}
static const struct thermal_zone_device_ops zone_ops = { .get_temp = zone_temp };

static unsigned int target_pwm, temp_control = 1;
#define FAN_FILE(name) \
	static ssize_t name##_show(struct device *dev, struct device_attribute *attr, char *text) \
	{ \
		return sysfs_emit(text, "%u\n", name); \
	} \
	static ssize_t name##_store(struct device *dev, struct device_attribute *attr, const char *text, size_t n) \
	{ \
		return kstrtouint(text, 0, &name) ?: n; \
	} \
	static DEVICE_ATTR_RW(name)
FAN_FILE(target_pwm);
FAN_FILE(temp_control);
static ssize_t rpm_measured_show(struct device *dev, struct device_attribute *attr, char *text)
{
	return sysfs_emit(text, "%u\n", target_pwm * 20);
}
static DEVICE_ATTR_RO(rpm_measured);
static struct device *fan;

/* ---- the board itself */

static int board_probe(struct platform_device *pdev)
{
	struct device *dev = &pdev->dev;
	struct device_node *bus = of_get_child_by_name(dev->of_node, "i2c");
	int i, ret;

	board = of_device_get_match_data(dev);
	if (!bus)
		return -ENODEV;
	for (i = 0; i < CLUSTERS; i++)
		set_khz[i] = board->clusters[i].max_khz;
	emc_override_hz = board->emc_hz[board->emcs - 1];
	advanced_us = ktime_to_us(ktime_get());
	for (i = 0; i < board->chips; i++)
		chip_reset(&chips[i]);
	read_shunts(bus);
	chip_bus.nr = board->bus;
	chip_bus.dev.parent = dev;
	chip_bus.dev.of_node = bus;	/* the I2C core makes its children */
	ret = i2c_add_numbered_adapter(&chip_bus);
	if (ret)
		return dev_err_probe(dev, ret, "no I2C bus\n");
	ret = cpufreq_register_driver(&cpu_driver);
	if (ret)
		return dev_err_probe(dev, ret, "no cpufreq\n");
	for (i = 0; i < ZONES; i++)
		devm_thermal_of_zone_register(dev, i, &temp_mc[i], &zone_ops);	/* a board may have fewer */
	make_debug_files();
	cap_folder = kobject_create_and_add("nvpmodel_emc_cap", kernel_kobj);
	fan = root_device_register("pwm-fan");
	if (!cap_folder || IS_ERR(fan))
		return -ENOMEM;
	return sysfs_create_file(cap_folder, &emc_iso_cap.attr) ?: device_create_file(fan, &dev_attr_target_pwm) ?:
	       device_create_file(fan, &dev_attr_temp_control) ?: device_create_file(fan, &dev_attr_rpm_measured);
}

static const struct of_device_id board_match[] = {
	{ .compatible = "tvm-farm,jetson-nano", .data = &nano },
	{ .compatible = "tvm-farm,jetson-tx2", .data = &tx2 },
	{},
};
MODULE_DEVICE_TABLE(of, board_match);
static struct platform_driver board_driver = {
	.probe = board_probe,
	.driver = { .name = "farm-board", .of_match_table = board_match, .suppress_bind_attrs = true },
};

static int __init farm_board_init(void)
{
	int ret = platform_driver_register(&board_driver);

	return ret ?: platform_driver_register(&gpu_driver);
}
/* It is a board: it stays as long as the machine runs, so there is no exit. */
module_init(farm_board_init);
MODULE_DESCRIPTION("A Jetson board's clocks, rails, zones and fan for a virtual machine");
MODULE_LICENSE("GPL");
