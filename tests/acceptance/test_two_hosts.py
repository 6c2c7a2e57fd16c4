"""Two coordinators, each with a home and services of its own, on one PostgreSQL store; boards behind real sshds.

One keeps the way to each board, the other works on it all the same, and takes over where the first is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from farm.store import Store
from tests.acceptance.conftest import wait_until
from tests.acceptance.hosts import Coordinator, coordinators, register, wait_in_service
from tests.integration.board_hosts import BoardHost, board_host
from tests.postgresql import Cluster

# What an operator is promised.
TAKEN_OVER_S = 30.0
NAMES = ("nano-01", "nano-02", "nano-03")


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BoardHost]]:
    """Three boards, in a folder with a short name: agents keep sockets below it."""
    folder = tmp_path_factory.mktemp("b")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(board_host(name, folder / name)) for name in NAMES]


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[list[Coordinator]]:
    """Two coordinators without services."""
    with coordinators(cluster) as made:
        yield made


def test_one_keeps_the_way_and_the_other_works_and_takes_over(hosts: list[BoardHost], pair: list[Coordinator]) -> None:
    """Boards are told to be lost by nobody while two have services up; a probe from the second one moves the way there,
    and when the first is killed with everything it had, all boards are the second's within 30 s.
    """
    left, right = pair
    for host in hosts:
        register(left, host)
    left.run("up")
    wait_in_service(left.url, set(NAMES))
    right.run("up")
    with Store(left.url) as store:
        settled = store.fetch_board_events()[-1]["id"]
        wait_until(lambda: len(right.status()) == len(NAMES), "the second to know them")
        assert left.lends() == set(NAMES)
        assert right.lends() == set()
        assert all("keeps the way to it" in board["trouble"] for board in right.status().values())
        began = time.monotonic()
        probed = right.home.run("board", "probe", NAMES[0], "--timeout", "60s", "--json")
        assert probed.json()[0]["passed"], probed.out
        print(f"the way went to the other and the board was probed there within {time.monotonic() - began:.1f} s")
        wait_until(lambda: left.lends() == set(NAMES[1:]) and right.lends() == {NAMES[0]}, "each to list what it lends")
        kinds = [event["kind"] for event in store.fetch_board_events() if event["id"] > settled]
        assert "lost" not in kinds, kinds
        left.kill_everything()
        began = time.monotonic()
        wait_until(lambda: right.lends() == set(NAMES), "the other to take over", 90)
        seconds = time.monotonic() - began
        print(f"taken over after {seconds:.1f} s")
        assert seconds < TAKEN_OVER_S
        wait_in_service(right.url, set(NAMES))
