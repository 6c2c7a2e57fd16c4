"""`farm board`: registering boards and giving orders about them, as a user types it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Home, new_home

pytestmark = pytest.mark.core


def test_boards_are_registered_shown_and_forgotten(home: Home) -> None:
    """What was given is what is shown; a new board is offline, and suspect until it has been probed."""
    assert "no boards yet" in home.run("board", "list").out
    added = home.run(
        *("board", "add", "nano-01", "--type", "jetson-nano", "--ssh", "root@10.0.0.5:2222"),
        *("--label", "rack=a", "--label", "shelf=2", "--host-key", "SHA256:" + "a" * 43),
    )
    assert added.code == 0, added.err
    assert home.run("board", "add", "sim", "--virtual", "jetson-tx2", "--count", "12").code == 0
    boards = {board["name"]: board for board in home.run("board", "list", "--json").json()}
    assert len(boards) == 13
    nano = boards["nano-01"]
    assert (nano["state"], nano["health"], nano["simulated"]) == ("offline", "suspect", False)
    assert nano["labels"] == {"rack": "a", "shelf": "2"}
    assert nano["transport"]["host"] == "10.0.0.5"
    assert nano["transport"]["port"] == 2222
    assert nano["lease"] is None
    assert boards["sim-03"]["simulated"]
    assert boards["sim-03"]["transport"] == {"kind": "virtual", "seed": 2}
    shown = home.run("board", "show", "nano-01").out
    assert "jetson-nano/nano-01" in shown
    assert "not reached yet" in shown
    assert home.run("board", "remove", "nano-01", "sim-03").code == 0
    assert len(home.run("board", "list", "--json").json()) == 11


def test_orders_are_kept_with_who_gave_them_and_why(home: Home) -> None:
    """Each order moves the board's health by the one rule, and is an event."""
    home.run("board", "add", "b1", "--virtual", "jetson-nano")
    for words, reason, health, kind in (
        (["hold"], "new fan", "maintenance", "drain"),
        (["release"], "", "suspect", "undrain"),
        (["hold", "--quarantine"], "odd times", "quarantined", "quarantine"),
        (["release"], "", "suspect", "clear"),
        (["hold", "--retire"], "sold", "retired", "retire"),
    ):
        done = home.run("board", *words, "b1", "--why", reason)
        assert done.code == 0, done.err
        document = home.run("board", "show", "b1", "--json").json()
        assert document["health"] == health
        assert document["events"][-1]["kind"] == kind
        assert reason in document["events"][-1]["reason"]
        assert "@" in document["events"][-1]["by"]
    assert home.run("board", "release", "b1", "--json").json() == [
        {"board": "b1", "done": "suspect; cleared by an operator; a probe decides"}
    ]


def test_a_board_is_replaced_under_its_name(home: Home) -> None:
    """The old host key is forgotten; what confirms the new one is said."""
    key = ("--board-type", "jetson-nano", "--ssh", "root@10.0.0.5", "--host-key", "SHA256:" + "A" * 43)
    assert home.run("board", "add", "nano-01", *key).code == 0
    done = home.run("board", "replace", "nano-01", "--why", "burnt out")
    assert done.code == 0, done.err
    document = home.run("board", "show", "nano-01", "--json").json()
    assert document["transport"]["host_key"] == ""
    assert document["events"][-1]["kind"] == "replaced"
    done = home.run("board", "replace", "nano-01", "--ssh", "root@10.0.0.6:2222")
    assert "farm board trust nano-01" in done.out
    transport = home.run("board", "show", "nano-01", "--json").json()["transport"]
    assert (transport["host"], transport["port"], transport["host_key"]) == ("10.0.0.6", 2222, "")
    assert home.run("board", "replace", "nano-02").code == 2


@pytest.fixture(scope="module")
def one_board() -> Iterator[Home]:
    """A home with one registered board; nothing of what is tried on it may work."""
    with new_home() as home:
        assert home.call("board", "add", "b1", "--virtual", "jetson-nano").code == 0
        assert home.call("board", "add", "r1", "--board-type", "x86-64-v3", "--ssh", "a@192.0.2.7").code == 0
        yield home


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        pytest.param("add x", "how the board is reached", id="no-way-to-it"),
        pytest.param("add x --ssh a@b", "--board-type", id="no-type"),
        pytest.param("add x --board-type jetson-nan --ssh a@b", "jetson-nano", id="unknown-type"),
        pytest.param("add x --board-type jetson-nano --ssh @host", "lacks the user", id="no-user"),
        pytest.param("add x --board-type jetson-nano --ssh a@b:99999", "port", id="bad-port"),
        pytest.param("add x --board-type jetson-nano --ssh a@b --count 3", "fleet apply", id="count-of-real-boards"),
        pytest.param("add x --virtual armv8-a", "virtual", id="type-without-a-model"),
        pytest.param("add x --board-type local --ssh a@b", "x86-64-v3 or an armv8-a", id="this-machine-elsewhere"),
        pytest.param("add x --board-type jetson-nano --ssh a@b --host-key SHA256:short", "43 characters", id="bad-key"),
        pytest.param("add x --board-type jetson-nano --ssh b@192.0.2.7:22", "so is r1", id="address-taken"),
        pytest.param("replace b1 --ssh a@192.0.2.7", "not reached over SSH", id="no-address-to-replace"),
        pytest.param("add x --virtual jetson-nano --count 0", "--count", id="none-of-them"),
        pytest.param("add x --virtual jetson-nano --label rack", "KEY=VALUE", id="bad-label"),
        pytest.param("add x:y --virtual jetson-nano", "name", id="bad-name"),
        pytest.param("add b1 --virtual jetson-nano", "already", id="taken"),
        pytest.param("hold b2", "b2", id="unknown-board"),
        pytest.param("hold b1 b2", "b2", id="one-of-two-unknown"),
        pytest.param("remove b1 b2", "b2", id="one-of-two-unknown-to-forget"),
        pytest.param("show b7", "neither a board nor a board type", id="nothing-of-that-name"),
    ],
)
def test_bad_input_is_refused(words: str, answer: str, one_board: Home) -> None:
    """Exit code 2, what was wrong, and nothing changed."""
    before = one_board.rows("SELECT * FROM boards"), one_board.rows("SELECT * FROM board_events")
    done = one_board.call("board", *words.split())
    assert done.code == 2, done.err
    assert answer in done.err
    assert "Traceback" not in done.err
    assert (one_board.rows("SELECT * FROM boards"), one_board.rows("SELECT * FROM board_events")) == before
