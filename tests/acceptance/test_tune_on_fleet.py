"""`farm tune` on a board of the fleet, from registering it to records."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import Home


@pytest.mark.core
def test_a_virtual_board_is_tuned_for(home: Home) -> None:
    """Registered, it is brought up, probed, leased, tuned on and given back; its records say simulated."""
    assert home.run("board", "add", "nano-01", "--virtual", "jetson-nano").code == 0
    done = home.run("tune", "mlp", "--board-type", "jetson-nano", "--trials", "2", "--json")
    assert done.code == 0, done.err
    document = done.json()
    assert document["board"] == {"name": "nano-01", "type": "jetson-nano", "simulated": True}
    assert document["trials"]["ok"] == 2
    assert document["boards"] == [{"name": "nano-01", "trials": 2}]
    assert document["records"]["new"] >= 1
    assert home.run("record", "list", "--json").json() == []
    assert len(home.run("record", "list", "--simulated", "--json").json()) == document["records"]["new"]
    [board] = home.run("board", "list", "--json").json()
    assert (board["health"], board["lease"]) == ("good", None)
    home.expect_no_processes()


@pytest.mark.core
def test_boards_that_cannot_be_had_are_named(home: Home) -> None:
    """No board of the type, a board of another one, and none in service: each ends at once and says what to do."""
    done = home.run("tune", "tiny-cnn", "--board-type", "jetson-nano")
    assert done.code == 2
    assert "no board of type 'jetson-nano' is registered" in done.err
    home.run("board", "add", "nano-01", "--virtual", "jetson-nano")
    done = home.run("tune", "tiny-cnn", "--board", "nano-02")
    assert (done.code, "there is no board 'nano-02'" in done.err) == (2, True)
    done = home.run("tune", "tiny-cnn", "--board", "nano-01", "--board-type", "jetson-tx2")
    assert (done.code, "is a jetson-nano, not a jetson-tx2" in done.err) == (2, True)
    done = home.run("tune", "tiny-cnn", "--board", "nano-01", "--wait", "soon")
    assert (done.code, "--wait 'soon' is not a duration" in done.err) == (2, True)
    home.run("board", "hold", "nano-01")
    done = home.run("tune", "tiny-cnn", "--board", "nano-01")
    assert done.code == 3
    assert "nano-01: maintenance" in done.err
