"""An external meter's program: its lines, its ends, and the rails beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from device_agent.errors import SensorError
from device_agent.power.meter import MeterRail, add_meter, compare_meter
from device_agent.power.sensors import PowerSensors
from device_agent.protocol import PowerWindow, RailPower

_STAYS = "; exec sleep 60'"


@contextlib.contextmanager
def opened(command: str) -> Iterator[tuple[MeterRail, list[float]]]:
    """A meter whose program has printed its first lines, and a clock to set."""
    clock = [100.0]
    meter = MeterRail(command, lambda: clock[0])
    meter.open()
    try:
        yield meter, clock
    finally:
        meter.close()


def test_a_value_is_the_mean_of_the_lines_since_the_last() -> None:
    """Several lines between two reads are averaged, the last value stays, and `close` ends the program."""
    before = psutil.Process().children()
    with opened('sh -c \'printf "1 2.0\\n2 4.0\\n"' + _STAYS) as (meter, _):
        assert (meter.read(), meter.read()) == (3.0, 3.0)
        [program] = [each for each in psutil.Process().children() if each not in before]
    assert not program.is_running()


@pytest.mark.parametrize(
    ("command", "waits_s", "said"),
    [
        ("printf 'hello\\n'", 0, "the meter printed 'hello', not `SECONDS WATTS`"),
        ("printf '2 1\\ninf 1\\n'", 0, "the meter's time went from 2 to inf s"),
        ("printf '2 1\\n1 1\\n'", 0, "the meter's time went from 2 to 1 s"),
        ("printf '1 nan\\n'", 0, "the meter cannot be nan W"),
        ("printf '1 5000\\n'", 0, "the meter cannot be 5000 W"),
        ("true", 0, "the meter's program has ended"),
        ("/no/such/meter", 0, "the meter /no/such/meter cannot be started: No such file or directory"),
        ('sh -c \'printf "1 2\\n"' + _STAYS, 3.0, "the meter has printed nothing for 3.0 s"),
    ],
)
def test_a_broken_meter_is_one_sentence(command: str, waits_s: float, said: str) -> None:
    """Garbage, a program that ends and one that stops are errors of the meter, and stay so until it is opened anew."""
    with opened(command) as (meter, clock):
        if waits_s:
            assert meter.read() == 2.0
            clock[0] += waits_s
        for _ in range(2):
            with pytest.raises(SensorError) as caught:
                meter.read()
            assert str(caught.value) == said


def test_a_meter_stands_in_for_missing_rails() -> None:
    """It is the total of a board without one, and no part of the total of others."""
    meter = MeterRail("meter")
    alone = add_meter(PowerSensors(), meter)
    assert (alone.rails, alone.total_rails, alone.total_scope) == (("meter",), ("meter",), "external meter")
    with pytest.raises(SensorError, match="empty"):
        MeterRail(" ")


def test_the_meter_over_the_rails() -> None:
    """The ratio of both powers has the interval that both intervals allow."""
    total, meter = (
        RailPower(name, watts, (0.9 * watts, 1.1 * watts), watts, (0.9 * watts, 1.1 * watts), 9, 9, 0, 0)
        for name, watts in (("POM_5V_IN", 4.0), ("meter", 5.0))
    )
    window = PowerWindow(0.0, 1.0, (total, meter), total, "board")
    assert compare_meter(window) == pytest.approx((1.25, 4.5 / 4.4, 5.5 / 3.6))
    assert compare_meter(PowerWindow(0.0, 1.0, (total,), total, "board")) is None
