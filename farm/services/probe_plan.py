"""Which boards are due for a probe: pure rules over the store's rows and what came of earlier probes.

Times are seconds on the caller's monotonic clock. Who carries probes out is in `probing`, what one does in `probe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.crew.health import HealthLimits
from farm.store.standing import is_on_demand
from farm.values import Health, State

# As many boards' processes as there may be for probes, 85 MB each.
MOST_AT_ONCE = 4
# After a probe that did not pass, doubling: soon enough for a hiccup, seldom enough for a board that stays broken.
FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 300.0
# One that was not made (a TVM client has the board) cost nothing and blames nobody.
LAST_SKIP_PAUSE_S = 30.0
# The rows may be as old as this: a board that has just passed still looks suspect in them.
SETTLE_S = 2.0
# Passes in a quick row would prove only one moment.
QUARANTINE_PAUSE_S = 30.0


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
    """What is known of a board's probes once `report` has come, which says `passed` and may say `skipped`."""
    passed, skipped = bool(report.get("passed")), bool(report.get("skipped"))
    tries = 0 if passed else 1 + (0 if past is None else past.tries)
    # A failure is another matter than the skips before it.
    if past is not None and past.skipped != skipped:
        tries = min(tries, 1)
    return ProbePast(now_s, passed, skipped, tries)


def plan_probes(
    rows: Sequence[Mapping[str, Any]],
    past: Mapping[str, ProbePast],
    busy: Collection[str],
    now_s: float,
    interval_s: float,
    most: int = MOST_AT_ONCE,
) -> list[str]:
    """The boards to probe now, the most urgent first, so that no more than `most` are under way with those in `busy`.

    `rows` are those of `Store.fetch_boards`. Good boards are probed every `interval_s`, with 0 not at all.
    """
    due = []
    for row in rows:
        name = row["name"]
        if name in busy:
            continue
        at_s = plan_next_s(row, past.get(name), now_s, interval_s)
        if at_s is not None and at_s <= now_s:
            due.append((row["health"] == Health.GOOD, at_s, name))
    return [name for _, _, name in sorted(due)[: max(0, most - len(busy))]]


def plan_next_s(row: Mapping[str, Any], past: ProbePast | None, now_s: float, interval_s: float) -> float | None:
    """From when on a board is due, given that it stays as it is in `row`; None where it is not to be probed."""
    if row["state"] != State.IDLE or row["lease"] is not None or is_on_demand(row):
        return None
    match row["health"]:
        case Health.SUSPECT:
            first_s, pause_s = now_s, SETTLE_S
        case Health.QUARANTINED:
            quarantine = row["quarantine"]
            if quarantine["held"]:  # no probe ends it
                return None
            first_s, pause_s = now_s + max(0.0, HealthLimits().cooldown_s - quarantine["cooling_s"]), QUARANTINE_PAUSE_S
        case Health.GOOD if interval_s > 0:
            first_s, pause_s = now_s, interval_s
        case _:
            return None
    if past is None:
        return first_s
    if past.tries and row["health"] == Health.GOOD:  # a skipped one: it is still due
        pause_s = 0.0
    return max(first_s, past.at_s + max(pause_s, plan_pause_s(past)))


def plan_pause_s(past: ProbePast) -> float:
    """How long to leave a board alone after its latest probe, whatever its health: 0 after one that passed."""
    if past.tries == 0:
        return 0.0
    last_s = LAST_SKIP_PAUSE_S if past.skipped else LAST_PAUSE_S
    return float(min(last_s, FIRST_PAUSE_S * 2.0 ** min(past.tries - 1, 16)))
