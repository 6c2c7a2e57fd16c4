"""Which measurements may be believed, and when one may start."""

from __future__ import annotations

import pathlib

import pytest

from device_agent.platforms.evidence import Sensors
from device_agent.protocol import Evidence, Outcome, StartConditions, Status
from device_agent.session import measurement
from device_agent.sysfs import FileTree
from device_agent.worker.plan import Marks, Phases

HELD = {0: 921_600_000, 1: 921_600_000}
STEADY = Evidence(
    cpu_freq_hz={"0": 921_600_000, "1": 921_600_000},
    cpu_max_hz={"0": 921_600_000, "1": 921_600_000},
    gpu_freq_hz=76_800_000,
    memory_freq_hz=1_600_000_000,
    temperature_c={"CPU-therm": 60.0, "GPU-therm": 71.5},
    cooling={"cpu-throttle-alert": 0},
    alarms={"soctherm_oc.oc1_event_cnt": 7},
)


def changed(**fields: object) -> Evidence:
    return Evidence(**{**STEADY.to_dict(), **fields})  # type: ignore[arg-type]


def ok(before: Evidence, after: Evidence, latency_s: tuple[float, ...] = (1.0, 1.01, 0.99)) -> Outcome:
    return Outcome(Status.OK, latency_s=latency_s, before=before, after=after)


@pytest.mark.parametrize(
    ("before", "after", "status", "words"),
    [
        (STEADY, STEADY, Status.OK, ""),
        (STEADY, changed(cooling={"cpu-throttle-alert": 2}), Status.THROTTLED, "cpu-throttle-alert = 2"),
        (changed(cooling={"cpu-throttle-alert": 1}), STEADY, Status.THROTTLED, "GPU-therm at 71.5 C"),
        (STEADY, changed(alarms={"soctherm_oc.oc1_event_cnt": 8}), Status.THROTTLED, "over-current"),
        (STEADY, changed(cpu_freq_hz={"0": 614_400_000, "1": 921_600_000}), Status.CLOCK_DRIFTED, "cpu0 ran at 614.4"),
        (STEADY, changed(cpu_freq_hz={"0": 0, "1": 930_000_000}), Status.OK, ""),
        (STEADY, changed(cpu_freq_hz={"0": 921_600_000}), Status.OK, ""),
        (STEADY, changed(cpu_max_hz={"0": 1_479_000_000, "1": 921_600_000}), Status.CLOCK_DRIFTED, "limit of cpu0"),
        (STEADY, changed(memory_freq_hz=800_000_000), Status.CLOCK_DRIFTED, "memory clock"),
        (STEADY, changed(memory_freq_hz=None), Status.OK, ""),
    ],
)
def test_evidence_decides(before: Evidence, after: Evidence, status: Status, words: str) -> None:
    """Each kind of evidence leads to its status, with the reason in words."""
    outcome = measurement.judge(ok(before, after), HELD, None)
    assert outcome.status is status
    assert words in outcome.message
    assert outcome.latency_s == (1.0, 1.01, 0.99)


def test_what_is_no_fault_of_a_measurement() -> None:
    """Where nothing is held, a governor that changes the clock is no drift. A candidate that crashed on a hot board has
    crashed. Samples that spread past the bound are noisy; without a bound, or with two samples, they are not.
    """
    moved = changed(cpu_freq_hz={"0": 102_000_000, "1": 102_000_000}, memory_freq_hz=204_000_000)
    assert measurement.judge(ok(STEADY, moved), {}, None).status is Status.OK
    crashed = Outcome(Status.CRASHED, before=STEADY, after=changed(cooling={"x": 1}))
    assert measurement.judge(crashed, HELD, 0.01) is crashed
    wild = ok(STEADY, STEADY, (1.0, 1.5, 2.0, 1.2))
    assert measurement.judge(wild, HELD, 0.05).status is Status.NOISY
    assert "5.0% is allowed" in measurement.judge(wild, HELD, 0.05).message
    assert measurement.judge(wild, HELD, None).status is Status.OK
    assert measurement.judge(ok(STEADY, STEADY, (1.0, 2.0)), HELD, 0.05).status is Status.OK


def test_other_load_is_what_is_left_of_the_cpu_time() -> None:
    """Own CPU time is not other load; a window shorter than the kernel's ticks says nothing."""
    before, after = Evidence(busy_s=100.0), Evidence(busy_s=103.0)
    assert measurement.other_load(before, after, 2.0, 2.0) == pytest.approx(0.5)
    assert measurement.other_load(before, after, 2.0, 5.0) == 0.0
    assert measurement.other_load(before, after, 0.05, 0.0) is None
    assert measurement.other_load(Evidence(), after, 2.0, 0.0) is None


class Board:
    def __init__(self, root: pathlib.Path) -> None:
        self.now_s = 0.0
        self.zone = root / "sys/class/thermal/thermal_zone0"
        self.zone.mkdir(parents=True)
        (self.zone / "type").write_text("CPU-therm\n")
        self.stat = root / "proc/stat"
        self.stat.parent.mkdir()
        self.busy_ticks, self.busy_cores, self.celsius, self.cooling_c_per_s = 0.0, 0.0, 70.0, 10.0
        self.sleep(0.0)
        self.sensors = Sensors(FileTree(root))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.celsius -= self.cooling_c_per_s * seconds
        self.busy_ticks += self.busy_cores * seconds * 100
        (self.zone / "temp").write_text(f"{round(self.celsius * 1000)}\n")
        self.stat.write_text(f"cpu {round(self.busy_ticks)} 0 0 0 0 0 0 0 0 0\n")

    def wait(self, conditions: StartConditions) -> str:
        return measurement.wait(conditions, self.sensors, lambda: self.now_s, self.sleep)


def test_a_hot_board_is_waited_for(tmp_path: pathlib.Path) -> None:
    """The measurement starts once the hottest zone is cool enough, not later."""
    board = Board(tmp_path)
    assert board.wait(StartConditions(max_temperature_c=50.0)) == ""
    assert 2.0 <= board.now_s <= 2.5


def test_a_board_that_stays_hot_is_given_up(tmp_path: pathlib.Path) -> None:
    """At the deadline the answer names the zone and both temperatures."""
    board = Board(tmp_path)
    board.cooling_c_per_s = 0.0
    problem = board.wait(StartConditions(max_temperature_c=50.0, deadline_s=3.0))
    assert "CPU-therm is at 70 C, above 50 C" in problem
    assert 3.0 <= board.now_s <= 3.5


def test_a_busy_board_is_waited_for(tmp_path: pathlib.Path) -> None:
    """Load of others counts as cores; above the bound until the deadline is a refusal."""
    board = Board(tmp_path)
    board.busy_cores = 1.5
    assert "cores, more than 0.5" in board.wait(StartConditions(max_load=0.5, deadline_s=2.0))
    board.busy_cores = 0.1
    assert board.wait(StartConditions(max_load=0.5)) == ""


def test_a_condition_that_the_board_cannot_promise_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    """Without a thermal zone or /proc/stat there is no wait."""
    sensors = Sensors(FileTree(tmp_path))
    assert "no thermal zone" in measurement.wait(StartConditions(max_temperature_c=50.0), sensors)
    assert "does not say how busy" in measurement.wait(StartConditions(max_load=1.0), sensors)


def test_marks_outlive_their_worker() -> None:
    """Notes are shared memory: set, read, cleared; a phase that did not happen is 0."""
    marks = Marks()
    marks.set("timing_start_s", 12.5)
    marks.set("busy_calls", 3)
    assert marks.read() == Phases(timing_start_s=12.5, busy_calls=3.0)
    marks.clear()
    assert marks.read() == Phases()
