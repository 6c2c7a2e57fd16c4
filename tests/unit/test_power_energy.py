"""Energy and its intervals against signals whose integral is known: the truth must lie inside, and near."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from device_agent.board_types import BoardType
from device_agent.power import calibrate, energy, sampler
from device_agent.power.sampler import Recorder, Trace
from device_agent.power.sensors import find_sensors
from device_agent.protocol import EnergySpec, PowerWindow, RailPower, SensorInfo
from device_agent.protocol.hardware import Power, PowerChip
from tests.clocks import Clock

_CHIP = "/sys/bus/i2c/devices/6-0040"
_TYPE = BoardType(
    "made-up", power=Power((PowerChip("6-0040", ("IN", "GPU", ""), 0.005),), total=("IN",), total_scope="board")
)
_CONSTANT_FILES = {
    "rail_name_0": "IN",
    "rail_name_1": "GPU",
    "in_power1_input": "0",
    "in_voltage0_input": "5096",
    "in_voltage1_input": "5096",
    "in1_label": "IN",
    "in1_input": "5096",
}
_CHANGING_FILES = ("in_power0_input", "in_current0_input", "curr1_input")
WINDOWS = 30
KINDS = ("constant", "kernel", "steps", "ramp", "bursts", "slow")


@dataclasses.dataclass(frozen=True)
class Signal:
    """A power in W: a level, steps (when, by how much), a slope, a square wave (amplitude, period, share, phase)."""

    level_w: float = 3.0
    steps: tuple[tuple[float, float], ...] = ()
    ramps: tuple[tuple[float, float, float], ...] = ()  # from, to, W/s
    wave: tuple[float, float, float, float] = (0.0, 1.0, 0.5, 0.0)

    def power_w(self, t: float) -> float:
        amplitude, period, share, phase = self.wave
        power = self.level_w + sum(by for when, by in self.steps if t >= when)
        power += sum(rate * (min(max(t, first), last) - first) for first, last, rate in self.ramps)
        return power + (amplitude if ((t + phase) / period) % 1.0 < share else 0.0)

    def energy_j(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, t: float) -> float:
        amplitude, period, share, phase = self.wave
        energy_j = self.level_w * t + sum(by * max(0.0, t - when) for when, by in self.steps)
        for first, last, rate in self.ramps:
            inside = min(max(t, first), last) - first
            energy_j += rate * inside**2 / 2 + rate * (last - first) * max(0.0, t - last)
        whole, part = divmod((t + phase) / period, 1.0)
        return energy_j + amplitude * period * (whole * share + min(part, share))


class SignalTree:
    """An INA3221 whose first rail follows a signal as a real one would: quantised, refreshed now and then.

    `averaging` sensors give the mean of the last update period, others a sample from a random moment of it.
    """

    simulated = True

    def __init__(
        self, signal: Signal, clock: Clock, period_s: float, averaging: bool, noise_w: float, driver: str, seed: int
    ) -> None:
        self._signal, self._clock, self._period_s = signal, clock, period_s
        self._noise_w = noise_w
        self._averaging, self._driver = averaging, driver
        self._random = random.Random(seed)
        self._phase_s = self._random.uniform(0, period_s)
        self._refresh, self._power_w = -1, 0.0

    def read(self, path: str) -> str:
        self._clock.sleep(20e-6)
        folder, _, name = path.rpartition("/")
        if path == f"{_CHIP}/name":
            return "ina3221x" if self._driver == "iio" else "ina3221"
        if folder not in (f"{_CHIP}/iio:device0", f"{_CHIP}/hwmon/hwmon3"):
            raise FileNotFoundError(2, "no such file", path)
        voltage_v = 5.096
        known = _CONSTANT_FILES if name in _CONSTANT_FILES else _CHANGING_FILES
        if name not in known or (self._driver == "iio") != ("iio:device" in folder):
            raise FileNotFoundError(2, "no such file", path)
        if known is _CONSTANT_FILES:
            return _CONSTANT_FILES[name]
        current_a = round(self._value_w() / voltage_v / 0.008) * 0.008
        return str(int(current_a * voltage_v * 1000) if name == "in_power0_input" else round(current_a * 1000))

    def _value_w(self) -> float:
        refresh = int((self._clock() + self._phase_s) / self._period_s)
        if refresh != self._refresh:
            end_s = refresh * self._period_s - self._phase_s
            if self._averaging:
                self._power_w = self._signal.energy_j(end_s - self._period_s, end_s) / self._period_s
            else:
                self._power_w = self._signal.power_w(end_s - self._random.uniform(0, self._period_s))
            self._power_w += self._random.gauss(0, self._noise_w)
            self._refresh = refresh
        return self._power_w

    def write(self, path: str, text: str) -> None:
        raise PermissionError(13, "read only", path)

    def names(self, folder: str) -> list[str]:
        child = {"iio": ["iio:device0", "name"], "hwmon": ["hwmon", "name"]}[self._driver]
        found = {"/sys/bus/i2c/devices": ["6-0040"], _CHIP: child}
        if self._driver == "hwmon":
            found[f"{_CHIP}/hwmon"] = ["hwmon3"]
        if folder not in found:
            raise FileNotFoundError(2, "no such folder", folder)
        return found[folder]

    def exists(self, path: str) -> bool:
        try:
            self.read(path)
        except OSError:
            return False
        return True

    def run(self, command: list[str]) -> str:
        raise FileNotFoundError(2, "no tools", command[0])


def measure(
    signal: Signal, period_s: float, averaging: bool, noise_w: float, driver: str, seconds: float, seed: int
) -> tuple[PowerWindow, float]:
    """Calibrate, sample around a window, integrate; the window and the truth in J."""
    clock = Clock()
    sensors = find_sensors(SignalTree(signal, clock, period_s, averaging, noise_w, driver, seed), _TYPE, clock=clock)
    calibrate.measure_sensors(sensors, 2.0, clock, clock.sleep)
    clock.now_s = 1010.0 - 1.0
    trace = sampler.collect(sensors, seconds + 2.0, 100.0, clock, clock.sleep)
    window = energy.integrate(trace, 1010.0, 1010.0 + seconds, sensors, min_updates=3)
    assert window is not None
    return window, signal.energy_j(1010.0, 1010.0 + seconds)


def draw(kind: str, draws: random.Random, seconds: float) -> Signal:
    """A random signal of one kind around the window that begins at 1010 s."""
    start, end, level = 1010.0, 1010.0 + seconds, draws.uniform(1.5, 6.0)
    # The sensor always has a value before: that is when agents start.
    wake = tuple((1000.0 + draws.uniform(0, 0.3) + 0.45 * i, (-1.0) ** i * draws.uniform(0.5, 1)) for i in range(6))
    match kind:
        case "constant":
            return Signal(level, wake)
        case "kernel":  # starts and ends with the window
            by = draws.uniform(0.5, 4)
            return Signal(level, (*wake, (start, by), (end, -by)))
        case "steps":
            inner = tuple((draws.uniform(start, end), draws.uniform(-0.4, 2)) for _ in range(3))
            return Signal(level, (*wake, *inner))
        case "ramp":
            return Signal(level, wake, ((start + draws.uniform(-1, 1), end, draws.uniform(0.1, 1)),))
        case "bursts":  # shorter than the period of the slow sensors
            wave = (draws.uniform(0.5, 4), draws.uniform(0.003, 0.08), draws.random(), draws.random())
            return Signal(level, wake, wave=wave)
        case _:  # slow: as long as the update period of the slow sensors
            return Signal(level, wake, wave=(draws.uniform(0.5, 3), draws.uniform(0.3, 0.9), 0.5, draws.random()))


@pytest.mark.parametrize(
    ("period_s", "averaging", "driver", "widest"),
    [
        (0.422, True, "iio", 0.10),
        (0.0066, False, "hwmon", 0.03),
        (0.0066, True, "hwmon", 0.03),
        (0.001, False, "iio", 0.03),
    ],
    ids=["nano", "orin", "orin averaging", "triggered"],
)
def test_truth_lies_in_the_interval(period_s: float, averaging: bool, driver: str, widest: float) -> None:
    """Of 30 windows over constant, stepping, rising and bursting power at least 95 % cover the exact integral, and the
    intervals are narrow enough to be of use.
    """
    draws = random.Random(7)
    widths, missed = [], []
    for index in range(WINDOWS):
        signal = draw(KINDS[index % len(KINDS)], draws, 4.0)
        window, truth_j = measure(signal, period_s, averaging, 0.03, driver, 4.0, index)
        assert window.enough
        low_j, high_j = window.total.energy_ci_j
        if not low_j <= truth_j <= high_j:
            missed.append((signal, truth_j, window.total))
        widths.append((high_j - low_j) / 2 / window.total.energy_j)
    assert len(missed) <= 0.05 * WINDOWS, missed
    assert statistics.median(widths) < widest


def test_a_rail_without_change_or_load_has_an_interval() -> None:
    """A value that never changes may be stale: it is reported with a wide interval, as not enough, and says why. A rail
    that draws nothing, on a chip whose other rail moves, has as many updates and half a step each way.
    """
    window, truth_j = measure(Signal(3.0), 0.422, True, 0.0, "iio", 4.0, 1)
    assert not window.enough
    assert "IN: its value never changed: constant, or stale" in window.note
    assert window.total.updates == 1
    assert window.total.energy_ci_j[1] - window.total.energy_ci_j[0] > 0.9 * truth_j
    window, _ = measure(Signal(3.0), 0.422, True, 0.03, "iio", 4.0, 1)
    gpu = next(rail for rail in window.rails if rail.rail == "GPU")
    assert gpu.energy_j == 0
    assert gpu.updates >= 8
    assert 0 < gpu.power_ci_w[1] < 0.03


def test_what_is_short_or_missed_is_less_certain() -> None:
    """Two updates tell nothing of what lies between them. A sensor that is read less often than it is refreshed has
    gaps. A window ends after it began.
    """
    window, truth_j = measure(Signal(3.0, steps=((1010.0, 2.0),)), 0.422, True, 0.03, "iio", 0.9, 1)
    assert not window.enough
    assert "1 updates where 3 are needed" in window.note
    assert window.total.energy_ci_j[0] <= truth_j <= window.total.energy_ci_j[1]
    assert window.total.energy_ci_j[1] > 1.4 * window.total.energy_j
    window, _ = measure(Signal(3.0), 0.0066, True, 0.03, "hwmon", 4.0, 1)
    assert window.total.updates == pytest.approx(400, abs=2)
    assert window.total.gaps == pytest.approx(4 / 0.0066 - 400, abs=20)
    clock = Clock()
    sensors = find_sensors(SignalTree(Signal(), clock, 0.1, True, 0.0, "iio", 0), _TYPE, clock=clock)
    trace = sampler.collect(sensors, 1.0, 10.0, clock, clock.sleep)
    with pytest.raises(ValueError, match="empty"):
        energy.integrate(trace, 5.0, 5.0, sensors)


def test_one_value_between_failures_is_no_energy() -> None:
    """A rail that answered once, in the middle of a window of errors, is null, with what was wrong."""
    clock = Clock()
    sensors = find_sensors(SignalTree(Signal(), clock, 0.1, True, 0.0, "iio", 0), _TYPE, clock=clock)
    recorder = Recorder(0.025)
    for turn in range(200):
        if turn == 100:
            recorder.add(1000 + turn * 0.01, 3.0)
        else:
            recorder.add_bad(1000 + turn * 0.01, "Input/output error")
    window = energy.integrate(Trace((recorder.finish(sensors.rail("IN")),)), 1000.0, 1002.0, sensors)
    assert (window.rails, window.total, window.enough) == ((), None, False)
    assert "IN: Input/output error" in window.note


def power(power_w: float, half_w: float, seconds: float, updates: int = 10) -> RailPower:
    ci_w = (power_w - half_w, power_w + half_w)
    ci_j = (ci_w[0] * seconds, ci_w[1] * seconds)
    return RailPower("IN", power_w, ci_w, power_w * seconds, ci_j, reads=100, updates=updates)


def test_energy_per_call_takes_idle_off_and_adds_errors() -> None:
    """5 W for 4 s in 100 calls, of which 2 W are there anyway."""
    busy = PowerWindow(0.0, 4.0, (), power(5.0, 0.1, 4.0), "board")
    idle = PowerWindow(0.0, 2.0, (), power(2.0, 0.05, 2.0), "board")
    found = energy.energy_per_call(busy, idle, 100)
    assert found.per_call_j == pytest.approx(0.2)
    assert found.per_call_ci_j == pytest.approx((0.196, 0.204))
    assert found.above_idle_j == pytest.approx(0.12)
    assert found.above_idle_ci_j == pytest.approx((0.114, 0.126))


def test_windows_of_one_program_are_joined() -> None:
    """Energies, lengths, updates and intervals add; the power is that of all the time."""
    parts = [
        PowerWindow(start_s, seconds, (rail,), rail, "board")
        for start_s, seconds, rail in ((0.0, 1.0, power(2.0, 0.1, 1.0)), (5.0, 3.0, power(4.0, 0.2, 3.0)))
    ]
    joined = energy.join(parts, calls=2, min_updates=15)
    assert joined.total is not None
    assert (joined.window_s, joined.calls, joined.total.updates, joined.enough) == (4.0, 2, 20, True)
    assert joined.total.energy_j == pytest.approx(14.0)
    assert joined.total.power_w == pytest.approx(3.5)
    assert joined.total.energy_ci_j == pytest.approx((13.3, 14.7))
    assert not energy.join(parts, calls=2, min_updates=25).enough


@pytest.mark.parametrize("missing", ["total", "calls", "idle", "idle total", "other scope"])
def test_energy_that_cannot_be_told_is_null(missing: str) -> None:
    """Never 0, and never the difference of unlike things."""
    total = power(5.0, 0.1, 4.0)
    busy = PowerWindow(0.0, 4.0, (), None if missing == "total" else total, "board")
    idle = PowerWindow(
        0.0, 4.0, (), None if missing == "idle total" else total, "module" if "scope" in missing else "board"
    )
    found = energy.energy_per_call(busy, None if missing == "idle" else idle, 0 if missing == "calls" else 10)
    assert (found.per_call_j is None) == (missing in ("total", "calls"))
    assert found.above_idle_j is None
    assert found.above_idle_ci_j is None


def test_windows_are_planned_for_the_slowest_rail() -> None:
    """As many updates as asked for and two for the edges; the limit where that takes too long or is unknown."""
    slow, fast = SensorInfo("IN", "ina3221-iio", 0.4), SensorInfo("CPU", "rapl", 0.01)
    unknown = SensorInfo("X", "ina3221-iio")
    assert energy.plan_window((slow, fast), EnergySpec(min_updates=10)) == pytest.approx(4.8)
    assert energy.plan_window((slow, fast), EnergySpec(min_updates=10), ("CPU",)) == pytest.approx(0.12)
    assert energy.plan_window((slow, fast), EnergySpec(min_updates=100, limit_s=5.0)) == 5.0
    assert energy.plan_window((slow, unknown), EnergySpec(limit_s=7.0)) == 7.0
    assert energy.plan_window((), EnergySpec(limit_s=7.0)) == 7.0
    assert energy.plan_margin((slow, unknown)) == pytest.approx(0.6)
    assert energy.plan_margin(()) == 0.0


@pytest.mark.parametrize("averaging", [True, False])
def test_a_steady_load_needs_no_margin_before_or_after_it(averaging: bool) -> None:
    """Only values that belong to the window as a whole count: what ran before and after shifts and widens nothing."""
    for seed in range(6):
        signal = Signal(2.0, steps=((1010.0, 3.0), (1014.0, -3.5)))
        clock = Clock()
        tree = SignalTree(signal, clock, 0.4224, averaging, 0.02, "iio", seed)
        sensors = find_sensors(tree, _TYPE, clock=clock)
        calibrate.measure_sensors(sensors, 2.0, clock, clock.sleep)
        clock.now_s = 1009.0
        trace = sampler.collect(sensors, 6.0, 100.0, clock, clock.sleep)
        steady = energy.integrate(trace, 1010.0, 1014.0, sensors, steady=True)
        other = energy.integrate(trace, 1010.0, 1014.0, sensors)
        assert other.total is not None
        assert steady.total.energy_ci_j[0] <= 20.0 <= steady.total.energy_ci_j[1]
        assert steady.total.energy_j == pytest.approx(20.0, rel=0.01)
        width_j, usual_j = (each.energy_ci_j[1] - each.energy_ci_j[0] for each in (steady.total, other.total))
        assert width_j <= usual_j


def test_an_idle_baseline_is_long_enough_for_its_sensor() -> None:
    """Three values that belong to it as a whole, for any request."""
    slow = SensorInfo("IN", "ina3221-iio", 0.4)
    assert energy.plan_idle((slow,), 1.0) == pytest.approx(2.0)
    assert energy.plan_idle((slow,), 3.0) == 3.0
    assert energy.plan_idle((), 1.0) == 1.0
