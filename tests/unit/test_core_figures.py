"""Which boards' cores are not as those of their type's others."""

from __future__ import annotations

from typing import Any

import pytest

from farm.inventory.core_figures import find_odd


def make_boards(*boards: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the store: 0, 1, … of one type, each with these figures, and what else is given in its place."""
    about = {"board_type": "jetson-nano", "simulated": False, "clock_hz": 1.5e9, "core": "cortex-a57"}
    rows = []
    for number, figures in enumerate(boards):
        row = {name: figures.get(name, value) for name, value in about.items()}
        found = {name: {"value": value} for name, value in figures.items() if name not in about}
        row["core"] = row["core"] and {"core": row["core"], "clock_hz": row.pop("clock_hz"), "found": found}
        rows.append({"name": str(number)} | row)
    return rows


@pytest.mark.parametrize(
    ("boards", "odd"),
    [
        # The other two have nothing between them; it is the third that is odd, though half of the others differ.
        ([{"fma_pipes": 1.0}, {"fma_pipes": 0.5}, {"fma_pipes": 1.02}], ["1"]),
        ([{"fma_pipes": 1.0}, {"fma_pipes": 1.14}, {"fma_pipes": 1.1}], []),
        # Nobody can tell which of two it is.
        ([{"l2_bytes": 1 << 20}, {"l2_bytes": 2 << 20}], ["0", "1"]),
        ([{"l2_bytes": 1 << 20}, {"l2_bytes": 1.4 * (1 << 20)}], []),
        # One that throttles has less of a clock; what only one could tell is compared with nothing.
        ([{"clock_hz": 1.0e9, "region_s": 1}, {}, {"fma_pipes": 1}, {}], ["0"]),
        # Compared are boards of one type and one kind of core, real or not, that were asked.
        ([{"fma_pipes": 1}, {"fma_pipes": 2, "simulated": True}, {"fma_pipes": 3, "board_type": "jetson-tx2"}], []),
        ([{"fma_pipes": 1}, {"fma_pipes": 2, "core": "denver2"}, {"core": None}], []),
    ],
)
def test_what_is_not_as_others_is_named(boards: list[dict[str, Any]], odd: list[str]) -> None:
    """By more than 15 % of a rate, or half an octave of a size, from the median of the others."""
    assert sorted(find_odd(make_boards(*boards))) == odd


def test_both_figures_are_said() -> None:
    """The board's own and that of the others."""
    found = find_odd(make_boards({"fma_pipes": 1.0}, {"fma_pipes": 0.5}, {"fma_pipes": 1.0}))
    assert found == {"1": "fma_pipes 0.5 (others: 1)"}
