"""Which boards a run may use, why not, and what its code is compiled for."""

from __future__ import annotations

from typing import Any

import pytest

from farm.crew.choice import find_blocked, find_left_out, plan_choice, plan_pool, plan_target
from farm.errors import UnavailableError, UsageError
from farm.inventory.board_types import require_board_type
from tests.board_rows import make_row as row


def test_boards_of_the_type_are_taken_real_ones_first() -> None:
    """The pool has every board of the type, and no other, in the order of their names. Figures of both kinds never mix
    in a run; a simulated board beside real ones is had by its name.
    """
    rows = [row("n2"), row("x1", "jetson-tx2"), row("n1", state="offline")]
    assert plan_pool(rows, "jetson-nano", None) == ("n1", "n2")
    rows = [row("real"), row("model", simulated=True)]
    assert plan_pool(rows, "jetson-nano", None) == ("real",)
    assert plan_pool(rows[1:], "jetson-nano", None) == ("model",)
    assert plan_pool(rows, "jetson-nano", "model") == ("model",)


def test_boards_of_the_other_kind_are_left_out_with_a_word() -> None:
    """One dead real board beside virtual ones: the line names those left out, why, and how to use them."""
    rows = [row("real", state="offline"), *(row(f"v{n}", simulated=True) for n in range(4)), row("x", "jetson-tx2")]
    said = find_left_out(rows, "jetson-nano", plan_pool(rows, "jetson-nano", None))
    assert "4 simulated boards of type jetson-nano left out (v0, v1, v2, …): real is real" in said
    assert "boards: {simulated: true}" in said
    assert plan_pool(rows, "jetson-nano", None, simulated=True) == ("v0", "v1", "v2", "v3")
    assert find_left_out(rows[1:5], "jetson-nano", ("v0", "v1", "v2", "v3")) == ""
    with pytest.raises(UsageError, match="no real board of type 'jetson-nano'"):
        plan_pool(rows[1:], "jetson-nano", None, simulated=False)


def test_what_has_no_board_is_refused() -> None:
    """An unregistered board is wrong usage, with the registered types and the command to add one. A name that is of
    another type, or of no board, is refused at once. A real board that is not what its type says would run nothing
    that is built for it.
    """
    with pytest.raises(UsageError, match="no board of type 'jetson-tx2'") as caught:
        plan_pool([row("n1")], "jetson-tx2", None)
    assert "jetson-nano" in caught.value.hint
    assert "farm board add" in caught.value.hint
    with pytest.raises(UsageError, match="is a jetson-nano, not a jetson-tx2"):
        plan_pool([row("n1")], "jetson-tx2", "n1")
    with pytest.raises(UsageError, match="no board 'n2'"):
        plan_pool([row("n1")], "jetson-nano", "n2")
    with pytest.raises(UnavailableError, match="'n1' is x86_64"):
        plan_target(require_board_type("jetson-nano"), {"name": "n1", "architecture": "x86_64", "simulated": False}, 2)


def test_each_board_that_cannot_be_had_has_its_reason() -> None:
    """Leased, offline, doubted, removed: the reason is the store's own."""
    rows = [
        row("a", state="leased", state_reason="leased by ann: tuning"),
        row("b", state="offline", state_reason="no route"),
        row("c", health="suspect", health_reason="a fault"),
        row("d"),
    ]
    choice = plan_choice(rows, ("a", "b", "c", "d", "e"))
    assert choice.free == ("d",)
    assert choice.text == "a: leased by ann: tuning; b: offline: no route; c: suspect: a fault; e: it was removed"


def test_waiting_is_in_vain_only_where_an_operator_must_act() -> None:
    """Maintenance, unsafe and retired do not end by themselves; one board that may mend is worth waiting for."""
    held = [row("a", health="maintenance", health_reason="drained"), row("b", health="unsafe", health_reason="stuck")]
    assert find_blocked(held, ("a", "b")) == "a: maintenance: drained; b: unsafe: stuck"
    assert find_blocked([*held, row("c", health="quarantined")], ("a", "b", "c")) == ""


@pytest.mark.parametrize(
    ("about", "config", "cores", "threads"),
    [
        ({"architecture": "aarch64", "simulated": False}, "cortex-a57", 4, 4),
        ({"architecture": "x86_64", "simulated": True}, None, 4, 2),
    ],
)
def test_code_is_made_for_what_runs_it(about: dict[str, Any], config: str | None, cores: int, threads: int) -> None:
    """A real board gets its type's target, a simulated one the host's with the board's cores."""
    plan = plan_target(require_board_type("jetson-nano"), {"name": "n1", **about}, 2)
    assert (plan.config["mcpu"] if plan.config else None, plan.cores, plan.threads) == (config, cores, threads)
