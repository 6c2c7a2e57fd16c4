"""Rules of probes: what the evidence says of a board, and when the next probe is due. Pure.

`probe` gathers the evidence, `farm.crew.health` judges the observation.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from device_agent.protocol import Description, Outcome, SensorInfo, Status, format_hz, format_mhz
from farm.crew.calibration import DRIFT_TOLERANCE, MIN_SAMPLES, TYPE_TOLERANCE, fit_factor
from farm.crew.calibration import find_drift as find_drift_of_runs
from farm.crew.health import HealthLimits, Kind
from farm.search.codegen import golden
from farm.types.documents import BoardInfo
from farm.values import Health, State

# Boards that are probed at once.
MOST_AT_ONCE = 4
# After a probe that did not pass, doubling: soon enough for a hiccup, seldom enough for a board that stays broken.
FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 300.0
# A skipped one (a TVM client has the board) cost nothing and blames no board.
LAST_SKIP_PAUSE_S = 30.0
# The rows may be as old as this: a board that has just passed still looks suspect in them.
SETTLE_S = 2.0
# Passes in quick succession would prove only one moment.
QUARANTINE_PAUSE_S = 30.0

# A virtual board's time depends on the golden kernel's cost on this machine, which is measured anew where the cache was
# deleted, perhaps beside other programs. Wrong clocks of a board differ by more than this.
SIMULATED_TOLERANCE = 0.30
# This far above the type's value is another setting of the chip or a late driver, not chance. Below 0.1 s a second has
# ten values, which is enough for any type.
SLOW_RATIO, SLOW_FLOOR_S = 3.0, 0.1
# Above this, in cores, another program may have used the core or the memory bandwidth of the golden kernel.
OTHER_LOAD = 0.5
# How many boards of its type a board is compared with: more do not improve the median, and cost time.
MOST_PEERS = 16
# Of each of them, the newest runs.
PEER_RUNS = 10
_RAN = frozenset({Status.OK, Status.THROTTLED, Status.CLOCK_DRIFTED, Status.NOISY})


@dataclasses.dataclass(frozen=True)
class ProbePast:
    """The latest probe of a board: when it was answered, whether it passed or was made at all.

    `tries` counts those in a row that did not pass, itself included; skipped ones among them count too.
    """

    at_s: float
    passed: bool
    skipped: bool = False
    tries: int = 0


def note_report(past: ProbePast | None, report: Mapping[str, Any], now_s: float) -> ProbePast:
    """Return the history of a board's probes after `report`."""
    passed, skipped = bool(report.get("passed")), bool(report.get("skipped"))
    tries = 0 if passed else 1 + (0 if past is None else past.tries)
    # A failure starts a new count after skips.
    if past is not None and past.skipped != skipped:
        tries = min(tries, 1)
    return ProbePast(now_s, passed, skipped, tries)


def plan_probes(
    rows: Sequence[BoardInfo], past: Mapping[str, ProbePast], busy: Collection[str], now_s: float, interval_s: float
) -> list[str]:
    """Return the boards to probe now, the most urgent first, so that with `busy` ones at most `MOST_AT_ONCE` run.

    `rows` are those of `store.boards.fetch`. Good boards are probed every `interval_s`, with 0 not at all.
    """
    due = []
    for row in rows:
        name = row.name
        if name in busy:
            continue
        at_s = plan_next_s(row, past.get(name), now_s, interval_s)
        if at_s is not None and at_s <= now_s:
            due.append((row.health == Health.GOOD, at_s, name))
    return [name for _, _, name in sorted(due)[: max(0, MOST_AT_ONCE - len(busy))]]


def plan_next_s(row: BoardInfo, past: ProbePast | None, now_s: float, interval_s: float) -> float | None:
    """Return when a board is due, if its `row` stays the same; None where it is not probed."""
    if row.state != State.IDLE or row.lease is not None or row.on_demand:
        return None
    match row.health:
        case Health.SUSPECT:
            first_s, pause_s = now_s, SETTLE_S
        case Health.QUARANTINED:
            quarantine = row.quarantine
            if quarantine is None or quarantine.held:  # no probe ends it
                return None
            first_s, pause_s = now_s + max(0.0, HealthLimits().cooldown_s - quarantine.cooling_s), QUARANTINE_PAUSE_S
        case Health.GOOD if interval_s > 0:
            first_s, pause_s = now_s, interval_s
        case _:
            return None
    if past is None:
        return first_s
    if past.tries and row.health == Health.GOOD:  # a skipped one: it is still due
        pause_s = 0.0
    return max(first_s, past.at_s + max(pause_s, plan_pause_s(past)))


def plan_pause_s(past: ProbePast) -> float:
    """Return how long to leave a board alone after its latest probe, at any health: 0 after one that passed."""
    if past.tries == 0:
        return 0.0
    last_s = LAST_SKIP_PAUSE_S if past.skipped else LAST_PAUSE_S
    return float(min(last_s, FIRST_PAUSE_S * 2.0 ** min(past.tries - 1, 16)))


@dataclasses.dataclass(frozen=True)
class Finding:
    """A probe's observation, in the terms of `farm.crew.health`; `detail` is for people."""

    kind: Kind
    detail: str = ""


def find_wrong_type(registered: str, description: Description) -> str:
    """Explain why a board is not of its registered type; empty where it is, or it is unknown."""
    if description.board_type != registered:
        return (
            f"it is registered as {registered}, but its agent says that it is a {description.board_type}; "
            "register it under that type, or start its agent with the right --board-type"
        )
    if description.detected_type and description.detected_type != registered:
        return f"it is registered as {registered}, but its device tree says {description.detected_type}"
    return ""


def find_slow_sensors(sensors: Sequence[SensorInfo], expected_s: float | None) -> str:
    """Name the power sensors that update far less often than every `expected_s`; empty where none does."""
    if expected_s is None:
        return ""
    slow = [
        f"{sensor.rail} every {sensor.update_period_s:.3g} s"
        for sensor in sensors
        if sensor.update_period_s is not None and sensor.update_period_s > max(SLOW_FLOOR_S, SLOW_RATIO * expected_s)
    ]
    return f"a new value of {', '.join(slow)}; the board type says every {expected_s:.3g} s" if slow else ""


def judge_run(outcome: Outcome, outputs: Mapping[str, npt.NDArray[Any]]) -> Finding | None:
    """Return the fault of a run of the golden kernel, whose code is known to be good; None where there is none."""
    if outcome.status not in _RAN:
        return Finding(Kind.PROBE_FAILED, f"the golden kernel did not run: {outcome.status}: {outcome.message}")
    if wrong := golden.find_mismatch(outputs):
        return Finding(Kind.PROBE_FAILED, wrong)
    if outcome.status is Status.THROTTLED:
        return Finding(Kind.THROTTLED, outcome.message)
    if outcome.status is not Status.OK:  # another client moved a limit meanwhile
        return Finding(Kind.DRIFTED, outcome.message)
    return None


def is_off(median_s: float, history_s: Sequence[float], simulated: bool) -> bool:
    """Whether one run differs so much from a board's history that more of them should decide. No verdict."""
    if len(history_s) < MIN_SAMPLES:
        return False
    ratio = median_s / statistics.median(history_s)
    return max(ratio, 1 / ratio) > 1 + (SIMULATED_TOLERANCE if simulated else DRIFT_TOLERANCE)


def find_drift(history_s: Sequence[float], runs_s: Sequence[float], simulated: bool) -> str:
    """Explain a board's drift, given its earlier medians and those of this probe; empty where there is none."""
    tolerance = SIMULATED_TOLERANCE if simulated else DRIFT_TOLERANCE
    return find_drift_of_runs([*history_s, *runs_s], recent=max(MIN_SAMPLES, len(runs_s)), tolerance=tolerance)


def find_outlier(board: str, medians_s: Mapping[str, Sequence[float]], simulated: bool) -> tuple[float | None, str]:
    """Return a board's factor against its type, if known, and why it is too large; empty where it is not.

    `medians_s` are of boards of the type, its own among them; of many only some are used.
    """
    peers = sorted(name for name, values in medians_s.items() if name != board and len(values) >= MIN_SAMPLES)
    chosen = {name: medians_s[name] for name in [*peers[:MOST_PEERS], board] if name in medians_s}
    factor = fit_factor(board, chosen)
    if factor is None:
        return None, ""
    if not factor.exceeds(max(TYPE_TOLERANCE, SIMULATED_TOLERANCE if simulated else 0.0)):
        return factor.ratio, ""
    interval = f"{factor.ci_low:.3f} to {factor.ci_high:.3f}"
    return factor.ratio, f"golden kernel {factor.percent} against {factor.boards} boards of its type ({interval})"


def describe_limits(outcome: Outcome, description: Description) -> str:
    """Name the cores with a reduced clock limit, as a hint why a board is slow; empty where there is none."""
    if outcome.before is None:
        return ""
    for core, limit_hz in sorted(outcome.before.cpu_max_hz.items()):
        range_hz = description.cpu_freq_range_hz.get(core)
        if range_hz and limit_hz < range_hz[1]:
            return f"; cpu{core} is limited to {format_mhz(limit_hz)} of {format_hz(range_hz[1])}"
    return ""
