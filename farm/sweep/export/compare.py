"""Compare two sweeps: at each operating point that both measured, and at the best points of each.

Pairs series of the same variant and batch; two sweeps of one series each are paired in any case, so that two variants
can be compared across sweeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.errors import UsageError
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series, VariantRatio

# What is compared: the row's key and the name of its ratio.
_QUANTITIES = (("latency_s", "latency"), ("power_w", "power"), ("energy_j", "energy"))


@dataclasses.dataclass(frozen=True)
class PointPair:
    """One operating point in both sweeps; ratios are the second's figure over the first's, None without one of them."""

    label: str
    one: Row
    other: Row
    ratios: Mapping[str, VariantRatio | None]


@dataclasses.dataclass(frozen=True)
class SeriesPair:
    """Two series. `points` are those that both measured; `bests` each one's fastest, least energy, and pick."""

    one: Series
    other: Series
    points: tuple[PointPair, ...]
    bests: tuple[PointPair, ...]
    left_out: int

    def summarise(self, quantity: str) -> dict[str, float] | None:
        """Return the geometric mean, least and greatest of the ratios over all points; None where there are none."""
        ratios = [ratio for pair in self.points if (ratio := pair.ratios[quantity])]
        if not ratios:
            return None
        values = [ratio.value for ratio in ratios]
        return {"mean": sweep_rows.mean_ratio(ratios), "least": min(values), "greatest": max(values)}


def compare_sweeps(one: Document, other: Document, *, mixed: bool = False) -> list[SeriesPair]:
    """Compare every pair of series that match.

    Raises UsageError where a simulated sweep meets a real one without `mixed`, where no series match, and where nothing
    was measured in both.
    """
    refuse_mixture(one, other, mixed=mixed)
    pairs = [_pair(first, second) for first, second in _match(one, other)]
    if not any(pair.points or pair.bests for pair in pairs):
        raise UsageError(
            f"sweeps {one['sweep']} and {other['sweep']} have nothing in common that was measured",
            "`farm sweep show` lists their points.",
        )
    return pairs


def comparison_to_dict(one: Document, other: Document, pairs: Sequence[SeriesPair]) -> dict[str, Any]:
    """Return the comparison for `--json`."""
    return {
        "one": _describe(one),
        "other": _describe(other),
        "mixed": bool(one["board"]["simulated"]) != bool(other["board"]["simulated"]),
        "series": [
            {
                "one": {"variant": pair.one["variant"], "batch": pair.one["batch"]},
                "other": {"variant": pair.other["variant"], "batch": pair.other["batch"]},
                "points": [_point_to_dict(point) for point in pair.points],
                "bests": [_point_to_dict(point) for point in pair.bests],
                "points_in_one_only": pair.left_out,
                "mean": {name: pair.summarise(name) for _, name in _QUANTITIES},
            }
            for pair in pairs
        ],
    }


def refuse_mixture(one: Document, other: Document, *, mixed: bool = False) -> None:
    """Raise UsageError where one of two sweeps is of a simulated board, the other is not, and that is not asked for."""
    if mixed or bool(one["board"]["simulated"]) == bool(other["board"]["simulated"]):
        return
    simulated, real = (one, other) if one["board"]["simulated"] else (other, one)
    raise UsageError(
        f"sweep {simulated['sweep']} is of a simulated board, sweep {real['sweep']} of a real one",
        "Their figures say nothing about each other. To look at both all the same: "
        f"farm sweep show {one['sweep']} {other['sweep']} --mixed.",
    )


def _match(one: Document, other: Document) -> list[tuple[Series, Series]]:
    found = [
        (first, second)
        for first in sweep_rows.order_series(one)
        for second in other["series"]
        if (first["variant"], first["batch"]) == (second["variant"], second["batch"])
    ]
    if not found and len(one["series"]) == len(other["series"]) == 1:
        found = [(one["series"][0], other["series"][0])]
    if not found:
        raise UsageError(
            f"sweeps {one['sweep']} and {other['sweep']} have no series in common",
            f"Sweep {one['sweep']} has {_list_series(one)}, sweep {other['sweep']} has {_list_series(other)}.",
        )
    return found


def _pair(one: Series, other: Series) -> SeriesPair:
    others = {row["key"]: row for row in sweep_rows.measured(other)}
    rows = sweep_rows.measured(one)
    points = tuple(_compare(row["key"], row, others[row["key"]]) for row in rows if row["key"] in others)
    ways: tuple[tuple[str, Callable[[Series], Row | None]], ...] = (
        ("fastest", sweep_rows.find_fastest),
        ("least energy", sweep_rows.find_thriftiest),
        ("pick", _find_measured_pick),
    )
    bests = [_compare(label, first, second) for label, find in ways if (first := find(one)) and (second := find(other))]
    return SeriesPair(one, other, points, tuple(bests), len(rows) + len(others) - 2 * len(points))


def _find_measured_pick(series: Series) -> Row | None:
    row = sweep_rows.find_pick(series)
    return row if row and row["measured"] and sweep_rows.counts(row) else None


def _compare(label: str, one: Row, other: Row) -> PointPair:
    ratios = {
        name: sweep_rows.divide(other[key], one[key]) if one[key] and other[key] else None for key, name in _QUANTITIES
    }
    return PointPair(label, one, other, ratios)


def _describe(document: Document) -> dict[str, Any]:
    return {name: document[name] for name in ("sweep", "model", "state", "board", "started_at", "goal")}


def _point_to_dict(pair: PointPair) -> dict[str, Any]:
    return {
        "label": pair.label,
        "one": {"key": pair.one["key"], **{key: pair.one[key] for key, _ in _QUANTITIES}},
        "other": {"key": pair.other["key"], **{key: pair.other[key] for key, _ in _QUANTITIES}},
        "ratios": {name: _ratio_to_dict(ratio) for name, ratio in pair.ratios.items()},
    }


def _ratio_to_dict(ratio: VariantRatio | None) -> dict[str, float | bool | None] | None:
    if ratio is None:
        return None
    high = ratio.high if math.isfinite(ratio.high) else None
    return {"value": ratio.value, "low": ratio.low, "high": high, "differs": not ratio.is_one}


def _list_series(document: Document) -> str:
    return ", ".join(f"{series['variant']} batch {series['batch']}" for series in document["series"]) or "none"
