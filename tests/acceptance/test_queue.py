"""One queue for boards, as users see it: a campaign gives a board up for who waits, and has it back; kill -9."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.conftest import Home, new_home, wait_until

# Live, so that trials take as long as on boards: a second each, during which the host has little to do.
FLEET = """\
vars: { transport: virtual, time: live }
groups:
  nanos: { vars: { type: jetson-nano }, hosts: { nano: { count: 2 } } }
"""
# More trials than there is time for: it is cancelled in the end.
CAMPAIGN = """\
name: long
models: tiny-cnn
boards: { types: jetson-nano }
budget: { trials: 4000 }
search: { tuner: random }
measure: { repeat: 2, min_repeat: 500ms, verify_top: 1 }
"""
FIRST, SECOND = "nano-1", "nano-2"


def read_queue(home: Home) -> Any:
    return home.call("queue", "--json").json()


def holders(home: Home) -> dict[str, str]:
    """Who holds which board, from the store, which costs a hundredth of the command; `farm queue` says the same."""
    return dict(home.rows("SELECT board, purpose FROM leases"))


@pytest.fixture
def busy() -> Iterator[Home]:
    with new_home() as home:
        (home.path / "fleet.yaml").write_text(FLEET)
        (home.path / "long.yaml").write_text(CAMPAIGN)
        assert home.call("fleet", "apply", "fleet.yaml").code == 0
        home.start("campaign", "run", "long.yaml")
        wait_until(home.count_trials, "a campaign to measure", 240.0)
        wait_until(lambda: holders(home) == dict.fromkeys((FIRST, SECOND), "campaign"), "it to have both boards")
        yield home


@pytest.mark.timeout(600)
def test_a_campaign_gives_a_board_to_who_waits_and_has_it_back(busy: Home) -> None:
    """A sweep that comes gets a board once the trial under way has ended, which counts. One that is killed while it
    waits for the same board leaves neither a request nor a lease. Afterwards the campaign goes on with the board.
    """
    home = busy
    sweep = home.start("sweep", "run", "mlp", "--board", FIRST, "--window", "1s", "--budget-points", "2", "--json")
    wait_until(lambda: holders(home).get(FIRST) == "sweep mlp", "the sweep to have its board")
    shown = {board["name"]: board["purpose"] for board in read_queue(home)["boards"]}
    assert shown == {FIRST: "sweep mlp", SECOND: "campaign"}

    def find_waiting() -> Any:
        return [each for each in read_queue(home)["requests"] if each["kind"] == "sweep"]

    killed = home.start("sweep", "run", "mlp", "--board", FIRST, "--wait", "10m")
    [request] = wait_until(find_waiting, "another one to wait for it")
    assert request["why"].startswith(FIRST) or "its share" in request["why"]
    assert home.call("queue", "--priority", str(request["id"]), "3").code == 0
    assert [each["priority"] for each in find_waiting()] == [3]
    killed.send(signal.SIGKILL, group=True)
    wait_until(lambda: not find_waiting(), "the request of who was killed to expire", 30.0)
    done = sweep.wait()
    assert done.code == 0, done.err
    wait_until(lambda: holders(home).get(FIRST) == "campaign", "the campaign to have its board back")
    counted = home.count_trials()
    wait_until(lambda: home.count_trials() > counted, "the campaign to go on")
    assert home.rows("SELECT count(*) FROM trials WHERE fault_side IN ('board', 'farm')") == [(0,)]
    assert home.run("campaign", "cancel", "long").code == 0
    wait_until(lambda: not holders(home), "all boards to be free")
    queue = read_queue(home)
    assert ([board["purpose"] for board in queue["boards"]], queue["requests"]) == ([None, None], [])
