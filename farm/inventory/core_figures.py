"""What was found of boards' cores: how it is written and said, and what is not as a type or as other boards have it.

How it is found out is `farm.services.core_probe`'s business, what predictions make of it `core_types`'.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Differences that are worth a word: of a rate, and of a size, which is known to half an octave.
_RATE_DIFFERS, _SIZE_DIFFERS = 1.15, 1.45
SIZED = ("l1_bytes", "l2_bytes")
# What a core ran at is no figure of its type, but of boards that are compared: one that throttles has less.
CLOCK = "clock_hz"


@dataclasses.dataclass(frozen=True)
class CoreFigure:
    """A figure of a core, and between what the rounds that agree have it."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class CoreFigures:
    """What was found of a core: of the fields in `core_types.MEASURED` those that could be told, `unknown` the others.

    `clock_hz` is what it ran at meanwhile.
    """

    core: str
    clock_hz: float
    found: Mapping[str, CoreFigure]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for a certificate and the store."""
        found = {name: dataclasses.asdict(each) for name, each in self.found.items()}
        return {"core": self.core, CLOCK: self.clock_hz, "found": found, "unknown": list(self.unknown)}


def list_values(core: Mapping[str, Any]) -> dict[str, float]:
    """The figures of what `CoreFigures.to_dict` wrote, without their spread."""
    return {name: float(each["value"]) for name, each in core["found"].items()}


def say_figures(figures: Mapping[str, float], typical: Mapping[str, float], whose: str = "type") -> str:
    """Figures beside those that they are compared with, for people."""
    return ", ".join(f"{name} {value:.4g} ({whose}: {typical[name]:.4g})" for name, value in figures.items())


def find_differing(found: Mapping[str, float], typical: Mapping[str, float]) -> dict[str, float]:
    """Those figures that are not as the typical ones, which must be positive; what has no typical one is left out."""
    differing = {}
    for name, value in found.items():
        differs = _SIZE_DIFFERS if name in SIZED else _RATE_DIFFERS
        if name in typical and not 1 / differs <= value / typical[name] <= differs:
            differing[name] = value
    return differing


def find_odd(boards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By name the boards whose core is not as those of their type's others, and in which figures, for people.

    Takes all rows of `Store.fetch_boards`. Compared are boards of one type, kind of core, and either simulated or not.
    """
    said = {}
    others = list_others(boards)
    for board in boards:
        if typical := others.get(board["name"]):
            found = list_values(board["core"]) | {CLOCK: board["core"][CLOCK]}
            if differing := find_differing(found, typical):
                said[board["name"]] = say_figures(differing, typical, "others")
    return said


def list_others(boards: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By name of a board whose core was asked: of each of its figures what its type's others have, the median.

    Of two in the middle the one that is nearer: of three boards one that is broken does not make the other two odd. A
    figure that no other board has is left out.
    """
    groups: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for board in boards:
        if core := board["core"]:
            group = groups.setdefault((board["board_type"], board["simulated"], core["core"]), {})
            group[board["name"]] = list_values(core) | {CLOCK: core[CLOCK]}
    others: dict[str, dict[str, float]] = {}
    for group in groups.values():
        columns: dict[str, list[float]] = {}
        for figures in group.values():
            for figure, value in figures.items():
                columns.setdefault(figure, []).append(value)
        for column in columns.values():
            column.sort()
        for name, figures in group.items():
            known = {figure: value for figure, value in figures.items() if len(columns[figure]) > 1}
            others[name] = {figure: _find_middle(columns[figure], value) for figure, value in known.items()}
    return others


def _find_middle(column: Sequence[float], own: float) -> float:
    """The median of a sorted column without one of its values."""
    place, count = bisect.bisect_left(column, own), len(column) - 1
    middles = [column[each + (each >= place)] for each in {(count - 1) // 2, count // 2}]
    return min(middles, key=lambda middle: abs(math.log(middle / own)))
