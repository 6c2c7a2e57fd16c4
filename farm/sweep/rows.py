"""Queries on a sweep's document: valid rows, varied clocks, ratios of figures.

The document is what `farm sweep show ID --json` prints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import GPU
from farm import units
from farm.programs.metrics import Limit, read_metric

Row = Mapping[str, Any]
Series = Mapping[str, Any]
Document = Mapping[str, Any]

_OBJECTIVES = {
    "energy": "the least energy per {per}",
    "latency": "the {least} {name}",
    "power": "the least power",
    "edp": "the least product of energy and latency",
    "period": "the least mean power of a period",
}


@dataclasses.dataclass(frozen=True)
class VariantRatio:
    """One estimate over another with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_one(self) -> bool:
        """Whether chance alone may explain the difference."""
        return self.low <= 1 <= self.high


def divide(over: Mapping[str, float], under: Mapping[str, float]) -> VariantRatio:
    """Return `over / under` of two independent estimates; relative errors add by their squares."""
    ratio = over["value"] / under["value"]
    half = math.hypot(_half_width(over), _half_width(under))
    return VariantRatio(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def mean_ratio(ratios: Sequence[VariantRatio]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(math.log(ratio.value) for ratio in ratios) / len(ratios))


def name_boards(document: Document, names: str = "") -> str:
    """Return the board type, the boards' names where given, and whether it was their GPU."""
    board = document["board"]
    where = f"{board['type']}/{names}" if names else str(board["type"])
    return f"{where} GPU" if board.get("device") == GPU else where


def describe_goal(goal: Mapping[str, Any]) -> str:
    """Describe the goal: `the least energy per inference, with a latency of at most 33 ms`."""
    limits, metric = [], read_metric(goal)
    if goal["deadline_s"]:
        what = f"95th percentile of the {metric.name}" if goal.get("deadline_on_p95") else metric.name
        limits.append(f"a {what} of {metric.at_most} {metric.format(goal['deadline_s'])}")
    limits += [f"a {Limit(**each)}" for each in goal.get("limits", ())]
    if goal["max_power_w"]:
        limits.append(f"a power of at most {units.WATT.text(goal['max_power_w'])}")
    least = "highest" if metric.counted else "least"
    objective = _OBJECTIVES[goal["objective"]].format(per=metric.per, name=metric.name, least=least)
    objective += " at the wall" if goal["wall"] else ""
    if period_s := goal["period_s"]:
        objective += f" of {units.format_latency(period_s)} ({units.format_number(1 / period_s)} a second)"
    return objective + (f", with {' and '.join(limits)}" if limits else "")


def describe_period(pick: Mapping[str, Any]) -> str:
    """Describe what a pick costs over its period, and with clocks released between inferences; "" without a period."""
    period, released, missed = pick.get("period"), pick.get("released"), (pick.get("period") or {}).get("missed")
    if not period:
        return ""
    joule = units.joule_scale([period["input_j"]])
    told = f"With one every {units.format_latency(period['period_s'])} the mean power is "
    told += f"{units.WATT.text(period['mean_power_w']['value'])}: {joule.text(period['input_j'])} per input, "
    told += f"{units.format_number(period['hours_50_wh'])} hours on 50 Wh."
    if missed:
        told += f" {missed['runs']} of {missed['of']} timed runs took longer (p99 "
        told += f"{units.format_latency(period['latency_p99_s'])}; at most {100 * missed['most']:.2g} % do, with 95 % "
        told += "confidence)."
    if released:
        where = "this point" if released["key"] == pick["key"] else released["key"]
        told += f" With clocks released in between (idle {units.WATT.text(released['idle_w'])}), the best is {where}, "
        told += f"with {units.WATT.text(released['mean_power_w']['value'])}."
    return told


def counts(row: Row) -> bool:
    """Whether the row is valid: it has a latency, and no error."""
    return bool(row["latency_s"]) and not row["throttled"] and not row["invalid"]


def counted(series: Series) -> list[Row]:
    """Return the valid rows, measured and predicted."""
    return [row for row in series["rows"] if counts(row)]


def measured(series: Series) -> list[Row]:
    """Return the valid rows that were measured."""
    return [row for row in counted(series) if row["measured"]]


def find_row(series: Series, key: str) -> Row | None:
    """Return the row of an operating point."""
    return next((row for row in series["rows"] if row["key"] == key), None)


def find_pick(series: Series) -> Row | None:
    """Return the row of the recommended point."""
    return find_row(series, series["pick"]["key"]) if series["pick"] else None


def find_fastest(series: Series) -> Row | None:
    """Return the measured row with the least latency."""
    return min(measured(series), key=lambda row: float(row["latency_s"]["value"]), default=None)


def find_thriftiest(series: Series) -> Row | None:
    """Return the measured row with the least energy; None without a sensor."""
    rows = [row for row in measured(series) if row["energy_j"]]
    return min(rows, key=lambda row: float(row["energy_j"]["value"]), default=None)


def list_others(document: Document) -> list[tuple[str, str]]:
    """List a program's metrics but the objective: names and units."""
    return [each for each in document["metrics"].items() if each[0] != read_metric(document["goal"]).name]


def keeps_metrics(row: Row, goal: Mapping[str, Any]) -> bool:
    """Whether a program's metrics but the objective keep their limits."""
    return all(Limit(**each).keeps(row["metrics"].get(each["metric"])) for each in goal.get("limits", ()))


def has_energy(document: Document) -> bool:
    """Whether the board had a power sensor, as far as the rows show."""
    return any(row["energy_j"] for series in document["series"] for row in series["rows"])


def list_rails(document: Document) -> list[str]:
    """List every rail that was read, in the order of the rows."""
    rows = (row for series in document["series"] for row in series["rows"])
    return list(dict.fromkeys(rail for row in rows for rail in row["rail_power_w"]))


def choose_rails(series: Series, most: int) -> list[str]:
    """Return a series' rails with the highest power at any point, in the board's order."""
    rails = list_rails({"series": [series]})
    drawn_w = {rail: max(float(row["rail_power_w"].get(rail, 0.0)) for row in series["rows"]) for rail in rails}
    largest = sorted(rails, key=lambda rail: -drawn_w[rail])[:most]
    return [rail for rail in rails if rail in largest]


def order_series(document: Document) -> list[Series]:
    """Return the series with tuned ones first, since those are shipped."""
    return sorted(document["series"], key=lambda series: bool(series["variant"] == "untuned"))


def list_batches(document: Document) -> list[int]:
    """List the batch sizes, in the order of the series."""
    return list(dict.fromkeys(series["batch"] for series in document["series"]))


def find_domain(row: Row, name: str) -> Mapping[str, Any] | None:
    """Return one clock of a row."""
    return next((domain for domain in row["domains"] if domain["name"] == name), None)


def find_swept_clocks(document: Document) -> list[tuple[str, ...]]:
    """Name the clocks that were pinned at several frequencies; those that always moved together are one entry."""
    rows = [row for series in document["series"] for row in series["rows"]]
    by_course: dict[tuple[Any, ...], list[str]] = {}
    names = dict.fromkeys(domain["name"] for row in rows for domain in row["domains"])
    for name in names:
        course = tuple(_held_hz(row, name) for row in rows)
        if len(set(course) - {None}) > 1:
            by_course.setdefault(course, []).append(name)
    return [tuple(alike) for alike in by_course.values()]


def find_slice(series: Series, clock: Sequence[str], through: Row) -> list[Row]:
    """Return the rows that differ from `through` in this clock alone, slowest first."""
    rows = [row for row in counted(series) if _elsewhere(row, clock) == _elsewhere(through, clock)]
    rows = [row for row in rows if _held_hz(row, clock[0])]
    return sorted(rows, key=lambda row: _held_hz(row, clock[0]) or 0)


def choose_slice(series: Series, clock: Sequence[str]) -> list[Row]:
    """Return the slice through the pick, or the one with most measured points where that has fewer than three rows."""
    pick = find_pick(series)
    slices = [find_slice(series, clock, pick)] if pick else []
    if slices and len(slices[0]) > 2:
        return slices[0]
    seen: set[object] = set()
    for row in counted(series):
        if (elsewhere := _elsewhere(row, clock)) not in seen:
            seen.add(elsewhere)
            slices.append(find_slice(series, clock, row))
    return max(slices, key=lambda rows: (sum(row["measured"] for row in rows), len(rows)), default=[])


def clock_hz(row: Row, clock: Sequence[str]) -> int | None:
    """Return the clock's pinned frequency."""
    return _held_hz(row, clock[0])


def _held_hz(row: Row, name: str) -> int | None:
    domain = find_domain(row, name)
    return domain["freq_hz"] if domain and domain["held"] and domain["units"] else None


def _elsewhere(row: Row, clock: Sequence[str]) -> tuple[object, ...]:
    """Return everything about a point but this clock's frequency and what follows it by itself."""
    others = tuple(
        (domain["name"], domain["units"], domain["freq_hz"] if domain["held"] and domain["name"] not in clock else None)
        for domain in row["domains"]
    )
    return *others, *(word for word in row["key"].split() if word.startswith("mode="))


def _half_width(estimate: Mapping[str, float]) -> float:
    return math.log(estimate["high"] / estimate["low"]) / 2 if estimate["low"] > 0 else math.inf


def name_series(series: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Name a series within its sweep: `tuned`, `tuned, batch 4`."""
    batches = {each["batch"] for each in document["series"]}
    return str(series["variant"]) + (f", batch {series['batch']}" if len(batches) > 1 or series["batch"] != 1 else "")
