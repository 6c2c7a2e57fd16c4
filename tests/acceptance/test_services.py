"""`farm up`, `farm down`, `farm status`: the services start and end cleanly, once, and leave nothing behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.acceptance.conftest import Home, new_home, wait_until

# Two virtual boards are enough for tests that count boards, and start in seconds.
BOARDS = ("sim-1", "sim-2")
# Agents, simulators and helpers notice the end of their parent within this.
ORPHAN_TIMEOUT_S = 20.0


@pytest.fixture
def rack(home: Home) -> Iterator[Home]:
    """A home with virtual boards, and no services yet; what the test left running is ended."""
    add_boards(home)
    yield home
    home.run("down", "--force")


@pytest.fixture(scope="module")
def standing() -> Iterator[Home]:
    """A home whose services are up, for tests that go on with them: each leaves two boards that are reached."""
    with new_home() as home:
        add_boards(home)
        assert home.run("up").code == 0
        wait_until(lambda: is_reachable(home), "all boards to be reachable")
        yield home
        home.run("down", "--force")


def add_boards(home: Home) -> None:
    added = home.run("board", "add", "sim", "--virtual", "jetson-nano", "--count", str(len(BOARDS)))
    assert added.code == 0, added.err


def is_reachable(home: Home) -> bool:
    """Whether the services reach every board, and have probed it: no client holds one. The store is asked first, which
    takes a thousandth of what the command takes.
    """
    good = "SELECT count(*) FROM boards WHERE reachable AND health = 'good' AND name NOT IN (SELECT board FROM leases)"
    if home.rows(good) != [(len(BOARDS),)]:
        return False
    status = home.run("status", "--json")
    boards = status.json().get("boards", []) if status.code == 0 else []
    ready = [board for board in boards if board["reachable"] and board["health"] == "good" and board["lease"] is None]
    return len(boards) == len(ready) == len(BOARDS)


def count_connects(home: Home) -> list[int]:
    return [board["connects"] for board in home.run("status", "--json").json()["boards"]]


def find_process(home: Home, *words: str) -> psutil.Process:
    """The process of this home whose command line holds all words; the oldest of several."""
    found = [p for p in home.processes() if all(word in " ".join(p.cmdline()) for word in words)]
    assert found, words
    return min(found, key=psutil.Process.create_time)


@pytest.mark.core
def test_services_come_up_once_and_end_without_a_trace(rack: Home) -> None:
    """`up` starts them, a second `up` finds them, `down` ends them with every board of theirs; the store says so."""
    first = rack.run("up", "--json")
    assert first.code == 0, first.err
    second = rack.run("up", "--json")
    assert second.json()["pid"] == first.json()["pid"]
    assert "up already" in second.err
    wait_until(lambda: is_reachable(rack), "all boards to be reachable")
    assert {row["state"] for row in rack.run("board", "list", "--json").json()} <= {"idle", "leased"}
    shown = rack.run("status")
    assert all(f"jetson-nano/{name}" in shown.out for name in BOARDS), shown.out

    down = rack.run("down", "--force")
    assert down.code == 0, down.err
    assert not rack.processes()
    assert not list(rack.temporary.iterdir())
    assert {row["state"] for row in rack.run("board", "list", "--json").json()} == {"offline"}
    assert rack.run("status").code == 3
    assert "not running" in rack.run("down").err


@pytest.mark.core
def test_killed_services_take_everything_along_and_come_up_again(rack: Home) -> None:
    """After kill -9 nothing of theirs lives on, and the next `up` starts."""
    pid = rack.run("up", "--json").json()["pid"]
    wait_until(lambda: is_reachable(rack), "all boards to be reachable")
    psutil.Process(pid).kill()
    wait_until(lambda: not rack.processes(), "every process to be gone", ORPHAN_TIMEOUT_S)
    assert rack.run("status").code == 3
    again = rack.run("up", "--json")
    assert again.code == 0, again.err
    assert again.json()["pid"] != pid
    assert len(list(rack.temporary.glob("farm-services-*"))) == 1  # that of the killed ones is gone
    wait_until(lambda: is_reachable(rack), "all boards to be reachable again")


def test_a_killed_tracker_is_started_again_on_its_port(standing: Home) -> None:
    """Boards that registered come back by themselves and nothing is said of them meanwhile."""
    port = standing.run("status", "--json").json()["tracker"]["port"]
    before = standing.rows("SELECT count(*) FROM board_events WHERE after = 'offline'")
    find_process(standing, "rpc.tracker", str(port)).kill()

    def is_back() -> bool:
        status = standing.run("status", "--json").json()
        tracker = status["tracker"]
        return bool(tracker["up"] and tracker["restarts"] == 1 and tracker["port"] == port)

    wait_until(is_back, "the tracker")
    wait_until(lambda: is_reachable(standing), "all boards to be registered again")
    assert standing.rows("SELECT count(*) FROM board_events WHERE after = 'offline'") == before


def test_a_killed_board_comes_back(standing: Home) -> None:
    """A virtual board whose agent dies is offline with a reason, then started again."""
    before = count_connects(standing)
    find_process(standing, "farm.virtual serve", "--name sim-2").kill()
    wait_until(
        lambda: standing.rows("SELECT 1 FROM board_events WHERE board = 'sim-2' AND after = 'offline'"),
        "sim-2 to be lost",
    )
    wait_until(lambda: is_reachable(standing), "all boards to be reachable")
    assert count_connects(standing) == [before[0], before[1] + 1]


def test_boards_that_are_added_and_removed_are_kept_up_with(standing: Home) -> None:
    """A board is reached soon after it was registered, and its agent ends when it is forgotten."""
    assert standing.run("board", "remove", "sim-2").code == 0
    wait_until(lambda: not any("sim-2" in " ".join(p.cmdline()) for p in standing.processes()), "sim-2's agent to end")
    assert standing.run("board", "add", "other", "--virtual", "jetson-tx2").code == 0
    wait_until(
        lambda: (
            {b["name"]: b["reachable"] for b in standing.run("status", "--json").json()["boards"]}
            == {"sim-1": True, "other": True}
        ),
        "the other board",
    )


def test_services_in_use_are_not_ended_by_accident(standing: Home) -> None:
    """`down` names who holds a board and refuses; `--force` does it."""
    standing.run("up")
    from farm.store import Store

    with Store(standing.path / "home" / "farm.db") as store:
        store.leases.acquire("sim-1", "user@elsewhere", "a campaign")
    refused = standing.run("down")
    assert refused.code == 2
    assert "sim-1 by user@elsewhere (a campaign)" in refused.err
    assert standing.run("down", "--force").code == 0
    assert not standing.processes()


def test_a_command_starts_services_for_itself_and_ends_them(rack: Home) -> None:
    """A probe without `farm up` works, leaves no process, file or lease, and its time is in the board's history."""
    done = rack.run("board", "probe", "--json")
    assert done.code == 0, done.err
    assert [report["board"] for report in done.json() if report["passed"]] == list(BOARDS)
    assert not rack.processes()
    assert not list(rack.temporary.iterdir())
    assert not rack.rows("SELECT board FROM leases")
    shown = rack.run("board", "show", "sim-1", "--json").json()
    assert shown["calibration"]["simulated"]
    assert all(run["median_s"] > 0 for run in shown["calibration"]["runs"])
    assert "golden-" in rack.run("board", "show", "sim-1").out


def test_two_commands_share_the_services_that_one_of_them_started(rack: Home) -> None:
    """The second command uses them, and they end after the last command."""
    running = [rack.start("board", "probe", name, "--json") for name in BOARDS]
    for done in [each.wait() for each in running]:
        assert done.code == 0, done.err
    assert sum("starting the farm's services" in each.err for each in running) >= 1
    wait_until(lambda: not rack.processes(), "everything to be gone", ORPHAN_TIMEOUT_S)


def test_an_interrupted_command_takes_its_services_along(rack: Home) -> None:
    """Ctrl-C while boards start up: the prompt is back within seconds and nothing is left."""
    running = rack.start("board", "probe")
    running.wait_for("starting the farm's services")
    wait_until(lambda: any("farm.virtual" in " ".join(p.cmdline()) for p in rack.processes()), "a board to start")
    running.send(signal.SIGINT, group=True)
    done = running.wait(15)
    assert done.code == 130, done.err
    wait_until(lambda: not rack.processes(), "everything to be gone", ORPHAN_TIMEOUT_S)
    assert not list(rack.temporary.iterdir())


def test_two_at_once_start_one(rack: Home) -> None:
    """Two `farm up` at the same moment end with the same services."""
    running = [rack.start("up", "--json") for _ in range(3)]
    pids = {json.loads(done.out)["pid"] for done in (each.wait() for each in running)}
    assert len(pids) == 1
    assert psutil.pid_exists(pids.pop())


def test_services_in_the_foreground_end_with_ctrl_c() -> None:
    """`farm up --foreground` is for service managers and containers: logs on stderr; a signal ends it and the page."""
    with new_home() as home:
        running = home.start("up", "--foreground", "--web")
        running.wait_for("up, tracker on")
        assert "the farm's page: http://127.0.0.1:" in running.err
        assert home.run("status").code == 0, "what an image's health check asks"
        running.send(signal.SIGINT, group=True)
        assert running.wait().code == 0
        home.expect_no_processes()
        assert "Traceback" not in running.err


def test_services_that_cannot_start_say_why(home: Home) -> None:
    """A home that cannot be written, or a port that is no port, is an error."""
    blocked = home.path / "file"
    blocked.write_text("")
    done = home.run("up", FARM_HOME=str(blocked / "home"))
    assert done.code == 3, done.err
    done = home.run("up", FARM_TRACKER_PORT="123456")
    assert done.code == 2
    assert "FARM_TRACKER_PORT" in done.err
