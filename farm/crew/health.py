"""The effect of each observation on a board's health, as one pure function; `store.boards.observe` applies it.

    good ── fault, failed probe, misfit, throttled, drifted, slow sensors, back ──> suspect ── passing probe ──> good
    good, suspect ── k board-side faults within a window ──> quarantined ── cool-down, then n passing probes ──> good
    any but retired ── unsafe ──> unsafe            unsafe, quarantined, retired ── clear ──> suspect
    any but unsafe and retired ── hostile ──> quarantined
    good, suspect, quarantined ── drain ──> maintenance ── undrain ──> suspect          any ── retire ──> retired
    good, suspect, quarantined ── its power was cycled ──> suspect ── in vain, too often ──> quarantined

A board that an operator quarantined, or that attacked us, stays so until an operator clears it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from device_agent.protocol import StrEnum
from farm.errors import BoardHostileError, BoardUnsafeError, FarmError, InvalidReplyError, UsageError
from farm.values import Health, HealthHistory, Standing, Transition

# Probes and faults change these; the others wait for an operator.
_IN_SERVICE = frozenset({Health.GOOD, Health.SUSPECT, Health.QUARANTINED})


class Kind(StrEnum):
    """What can be observed of a board."""

    PROBE_PASSED = "probe_passed"
    PROBE_FAILED = "probe_failed"  # no connection, no answer in time, or a wrong result
    FAULT = "fault"  # a trial failed on the board's side
    THROTTLED = "throttled"
    DRIFTED = "drifted"  # slower or faster than its own history or its type allows
    SLOW_SENSORS = "slow_sensors"
    MISFIT = "misfit"  # of another type or protocol version, or without clocks to pin: an operator must act
    INVALID_REPLY = "nonsense"  # an invalid answer
    UNSAFE = "unsafe"  # clocks could not be restored
    HOSTILE = "hostile"  # it sent what would have harmed the coordinator
    DRAIN = "drain"
    UNDRAIN = "undrain"
    QUARANTINE = "quarantine"
    CLEAR = "clear"
    RETIRE = "retire"
    LOST = "lost"  # its connection is cut
    BACK = "back"
    POWER_CYCLED = "power_cycled"
    POWER_FAILED = "power_failed"  # the command for it failed
    NOT_REVIVED = "not_revived"  # it still fails after the maximum of power cycles


COMMANDS = frozenset({Kind.DRAIN, Kind.UNDRAIN, Kind.QUARANTINE, Kind.CLEAR, Kind.RETIRE})
_BOARD_FAULTS = frozenset({Kind.FAULT, Kind.PROBE_FAILED, Kind.INVALID_REPLY})
# Not faults: they do not quarantine, so a board is back as soon as the cause is gone.
_DOUBTS = frozenset({Kind.THROTTLED, Kind.DRIFTED, Kind.SLOW_SENSORS, Kind.MISFIT})

# command -> the healths it applies to, where it leads
_COMMANDED = {
    Kind.DRAIN: (_IN_SERVICE, Health.MAINTENANCE),
    Kind.UNDRAIN: (frozenset({Health.MAINTENANCE}), Health.SUSPECT),
    Kind.QUARANTINE: (_IN_SERVICE | {Health.MAINTENANCE}, Health.QUARANTINED),
    Kind.CLEAR: (frozenset({Health.SUSPECT, Health.QUARANTINED, Health.UNSAFE, Health.RETIRED}), Health.SUSPECT),
    Kind.RETIRE: (frozenset(Health) - {Health.RETIRED}, Health.RETIRED),
}
# command -> the healths in which it is done already: repeating it is no error
_DONE = {
    Kind.DRAIN: frozenset({Health.MAINTENANCE}),
    Kind.UNDRAIN: frozenset({Health.GOOD, Health.SUSPECT}),
    Kind.CLEAR: frozenset({Health.GOOD}),
    Kind.RETIRE: frozenset({Health.RETIRED}),
}
_TEXT = {
    Kind.PROBE_PASSED: "a probe passed",
    Kind.PROBE_FAILED: "a probe failed",
    Kind.FAULT: "a fault on the board's side",
    Kind.THROTTLED: "it throttled",
    Kind.DRIFTED: "its times drifted",
    Kind.SLOW_SENSORS: "its sensors are slow",
    Kind.MISFIT: "it does not fit what is registered",
    Kind.INVALID_REPLY: "it gave an invalid reply",
    Kind.UNSAFE: "its clocks could not be restored",
    Kind.HOSTILE: "it attacked the coordinator",
    Kind.DRAIN: "drained by an operator",
    Kind.UNDRAIN: "put back in service by an operator; a probe decides",
    Kind.QUARANTINE: "quarantined by an operator",
    Kind.CLEAR: "cleared by an operator; a probe decides",
    Kind.RETIRE: "retired by an operator",
    Kind.LOST: "it cannot be reached",
    Kind.BACK: "it can be reached again",
    Kind.POWER_CYCLED: "its power was cycled",
    Kind.POWER_FAILED: "its power could not be cycled",
    Kind.NOT_REVIVED: "cycling its power does not help",
}


@dataclasses.dataclass(frozen=True)
class Observation:
    """An observation of a board, or an operator's command; `detail` says more, for people."""

    kind: Kind
    detail: str = ""

    @property
    def text(self) -> str:
        """Describe it in one line; never empty."""
        return f"{_TEXT[self.kind]}: {self.detail}" if self.detail else _TEXT[self.kind]


@dataclasses.dataclass(frozen=True)
class HealthLimits:
    """How many faults are tolerated: our choice. Times are in seconds.

    `faults` board-side faults within `window_s` quarantine a board; it is back after `cooldown_s` without another, and
    then `passes` passing probes in a row. A suspect board needs `suspect_passes`. Its power may be cycled `cycles`
    times until it works again, and this often within `cycle_window_s` at all.
    """

    faults: int = 3
    window_s: float = 1800.0
    cooldown_s: float = 600.0
    passes: int = 3
    suspect_passes: int = 1
    cycles: int = 3
    cycle_window_s: float = 3600.0

    def __post_init__(self) -> None:
        """Raise ValueError for limits that would let a board out of quarantine unseen."""
        if min(self.faults, self.passes, self.suspect_passes) < 1 or not (self.window_s > 0 and self.cooldown_s >= 0):
            raise ValueError(f"counts must be 1 or more and times positive: {self}")


def transition(
    standing: Standing, observation: Observation, history: HealthHistory, limits: HealthLimits, now_s: float
) -> Transition:
    """Apply `observation` to a board. `now_s` is on the clock of the history's times.

    Pure. A command that is done already changes nothing. Raises UsageError for one that does not apply to the board's
    health, naming those that do.
    """
    kind, text = observation.kind, observation.text
    if kind in COMMANDS:
        return _obey(standing, observation, history, now_s)
    if kind is Kind.LOST:
        return Transition(dataclasses.replace(standing, reachable=False), history, text if standing.reachable else "")
    if kind is Kind.BACK:
        if standing.reachable:
            return Transition(standing, history, "")
        # It may have rebooted, or be another kernel or machine: a probe must pass first.
        health = Health.SUSPECT if standing.health is Health.GOOD else standing.health
        after = dataclasses.replace(standing, reachable=True, health=health)
        return Transition(after, dataclasses.replace(history, passes=0), text)
    if kind is Kind.UNSAFE:
        if standing.health in (Health.UNSAFE, Health.RETIRED):
            return Transition(standing, history, "")
        return Transition(_with(standing, Health.UNSAFE), _start_over(now_s), text)
    if kind is Kind.HOSTILE:
        if standing.health in (Health.UNSAFE, Health.RETIRED) or (
            standing.health is Health.QUARANTINED and history.held
        ):
            return Transition(standing, history, "")
        return Transition(_with(standing, Health.QUARANTINED), HealthHistory(cooling_since_s=now_s, held=True), text)
    if kind in (Kind.POWER_CYCLED, Kind.POWER_FAILED):
        return _cycle(standing, observation, history, now_s)
    if standing.health not in _IN_SERVICE:
        return Transition(standing, history, "")
    if kind is Kind.NOT_REVIVED:
        given_up = dataclasses.replace(_start_over(now_s), held=history.held, cycles_s=history.cycles_s)
        return Transition(_with(standing, Health.QUARANTINED), given_up, text)
    if kind in _BOARD_FAULTS:
        return _blame(standing, text, history, limits, now_s)
    if kind in _DOUBTS:
        doubted = Health.SUSPECT if standing.health is Health.GOOD else standing.health
        return Transition(_with(standing, doubted), dataclasses.replace(history, passes=0), text)
    return _pass(standing, history, limits, now_s)


def find_kind(error: FarmError) -> Kind:
    """Return how an error of a board is observed."""
    match error:
        case BoardHostileError():
            return Kind.HOSTILE
        case BoardUnsafeError():
            return Kind.UNSAFE
        case InvalidReplyError():
            return Kind.INVALID_REPLY
    return Kind.FAULT


_USUAL = HealthLimits()


def decide_by(
    observation: Observation, limits: HealthLimits = _USUAL
) -> Callable[[Standing, HealthHistory, float], Transition]:
    """Return the rule for one observation, for `store.boards.observe`: board and time are still open."""

    def decide(standing: Standing, history: HealthHistory, now_s: float) -> Transition:
        return transition(standing, observation, history, limits, now_s)

    return decide


def _obey(standing: Standing, observation: Observation, history: HealthHistory, now_s: float) -> Transition:
    command = observation.kind
    applies, health = _COMMANDED[command]
    if standing.health in _DONE.get(command, frozenset()):
        return Transition(standing, history, "")
    if standing.health not in applies:
        possible = sorted(str(other) for other, (healths, _) in _COMMANDED.items() if standing.health in healths)
        raise UsageError(
            f"{command} does not apply to a board that is {standing.health}", f"Possible: {', '.join(possible)}."
        )
    fresh = dataclasses.replace(_start_over(now_s), held=command is Kind.QUARANTINE)
    return Transition(_with(standing, health), fresh, observation.text)


def _blame(standing: Standing, text: str, history: HealthHistory, limits: HealthLimits, now_s: float) -> Transition:
    if standing.health is Health.QUARANTINED:
        again = dataclasses.replace(history, passes=0, cooling_since_s=now_s)
        return Transition(standing, again, f"{text}; the cool-down starts over")
    recent = (*(at for at in history.faults_s if now_s - at < limits.window_s), now_s)
    if len(recent) >= limits.faults:
        reason = f"{len(recent)} faults within {limits.window_s:g} s, the last: {text}"
        over = dataclasses.replace(_start_over(now_s), cycles_s=history.cycles_s)
        return Transition(_with(standing, Health.QUARANTINED), over, reason)
    reason = f"{text} ({len(recent)} of {limits.faults} within {limits.window_s:g} s)"
    return Transition(_with(standing, Health.SUSPECT), dataclasses.replace(history, faults_s=recent, passes=0), reason)


def _cycle(standing: Standing, observation: Observation, history: HealthHistory, now_s: float) -> Transition:
    tried = dataclasses.replace(history, cycles_s=(*history.cycles_s, now_s))
    if observation.kind is Kind.POWER_FAILED:
        return Transition(standing, tried, observation.text)
    if standing.health not in _IN_SERVICE or history.held:
        return Transition(standing, history, observation.text)
    # Faults before the power cycle do not count; cycles are limited separately.
    fresh = HealthHistory(cooling_since_s=now_s, cycles_s=tried.cycles_s)
    return Transition(_with(standing, Health.SUSPECT), fresh, observation.text)


def _pass(standing: Standing, history: HealthHistory, limits: HealthLimits, now_s: float) -> Transition:
    if standing.health is Health.GOOD:
        return Transition(standing, history, "")
    if standing.health is Health.QUARANTINED:
        # Passing during the cool-down proves little: what heats up or wears out fails later.
        if history.held or now_s - history.cooling_since_s < limits.cooldown_s:
            return Transition(standing, history, "")
        needed = limits.passes
    else:
        # Faults stay in the window: a board that fails between passing probes is quarantined too.
        needed = limits.suspect_passes
    passes = history.passes + 1
    if passes < needed:
        return Transition(standing, dataclasses.replace(history, passes=passes), "")
    reason = "a probe passed" if needed == 1 else f"{needed} probes passed in a row"
    cycles_s = tuple(at for at in history.cycles_s if now_s - at < limits.cycle_window_s)
    return Transition(_with(standing, Health.GOOD), HealthHistory(history.faults_s, cycles_s=cycles_s), reason)


def _with(standing: Standing, health: Health) -> Standing:
    return dataclasses.replace(standing, health=health)


def _start_over(now_s: float) -> HealthHistory:
    return HealthHistory(cooling_since_s=now_s)
