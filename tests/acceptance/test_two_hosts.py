"""Two coordinators, each with a home and services of its own, on one PostgreSQL store; boards behind real sshds.

One keeps the way to each board, the other works on it all the same, and takes over where the first is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from farm.store import Store
from farm.types.states import CampaignState
from tests.acceptance.conftest import wait_until
from tests.acceptance.hosts import Coordinator, coordinators, register, wait_in_service
from tests.integration.board_hosts import BoardHost, board_host
from tests.postgresql import Cluster

# What an operator is promised.
TAKEN_OVER_S = 30.0
NAMES = ("nano-01", "nano-02", "nano-03")
CAMPAIGN = """\
name: vision
models: [mlp]
boards: { types: [jetson-nano] }
budget: { per_workload: 12 }
search: { tuner: random, ops: [dense], warm_start: false, seed: 7 }
measure: { repeat: 2, min_repeat: 5ms, timeout: 5s, verify_top: 1 }
"""


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BoardHost]]:
    folder = tmp_path_factory.mktemp("b")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(board_host(name, folder / name)) for name in NAMES]


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[list[Coordinator]]:
    with coordinators(cluster) as made:
        yield made


def take_over_s(store: Store, boards: set[str], to: Coordinator, what: str) -> float:
    """How long it takes, from now, until the ways of all boards are one coordinator's (s); it lends them soon after."""
    began = time.monotonic()
    wait_until(lambda: store.routes.fetch() == dict.fromkeys(boards, to.name), "the other to take over", 90)
    seconds = time.monotonic() - began
    wait_until(lambda: to.lends() == boards, "it to lend them")
    print(f"after {what}: ways taken over after {seconds:.1f} s, boards lent after {time.monotonic() - began:.1f} s")
    return seconds


def test_one_keeps_the_way_and_another_takes_over(hosts: list[BoardHost], pair: list[Coordinator]) -> None:
    """While two have services up no board is reported as lost. A probe from the second one moves the way there. One
    that stands still, with its connections open, and one that is killed with everything it had, are followed by the
    other within 30 s; and who wakes up late lets the other go on.
    """
    left, right = pair
    for host in hosts:
        register(left, host)
    left.run("up")
    wait_in_service(left.url, set(NAMES))
    right.run("up")
    with Store(left.url) as store:
        settled = store.events.fetch_of_boards()[-1].id

        def list_new() -> list[str]:
            return [event.kind for event in store.events.fetch_of_boards() if event.id > settled]

        wait_until(lambda: len(right.status()) == len(NAMES), "the second to know them")
        assert left.lends() == set(NAMES)
        assert right.lends() == set()
        assert all("has its connection" in board["trouble"] for board in right.status().values())
        began = time.monotonic()
        probed = right.home.run("board", "probe", NAMES[0], "--json")
        assert probed.json()[0]["passed"], probed.out
        print(f"the way went to the other and the board was probed there within {time.monotonic() - began:.1f} s")
        wait_until(lambda: left.lends() == set(NAMES[1:]) and right.lends() == {NAMES[0]}, "each to list what it lends")
        assert "lost" not in list_new()
        with left.frozen():
            assert take_over_s(store, set(NAMES), right, "the first stood still") < TAKEN_OVER_S
        wait_in_service(right.url, set(NAMES))
        wait_until(lambda: all(each["kept_by"] == right.name for each in left.status().values()), "it to let go")
        settled = store.events.fetch_of_boards()[-1].id
        right.kill_everything()
        assert take_over_s(store, set(NAMES), left, "the second was killed") < TAKEN_OVER_S
        wait_in_service(left.url, set(NAMES))
        assert list_new().count("lost") <= len(NAMES)


def test_a_campaign_goes_on_at_the_other(hosts: list[BoardHost], pair: list[Coordinator]) -> None:
    """The first is killed with everything it had in the middle of a campaign: the second, which may take over, ends it.
    What was measured is kept, no trial is lost and none counts twice.
    """
    left, right = pair
    for host in hosts:
        register(left, host)
    left.run("up")
    wait_in_service(left.url, set(NAMES))
    right.run("up", "--take-over")
    (left.home.path / "vision.yaml").write_text(CAMPAIGN)
    left.run("campaign", "run", "vision.yaml", "--detach")
    with Store(left.url) as store:

        def list_counted() -> dict[tuple[str, str, str], int]:
            rows = store.trials.fetch(1, columns=("id", "workload", "operating_point", "candidate", "counted"))
            return {(r["workload"], r["operating_point"], r["candidate"]): r["id"] for r in rows if r["counted"]}

        wait_until(lambda: len(list_counted()) >= 6, "trials of the first", 180)
        left.kill_everything()
        began, before = time.monotonic(), list_counted()
        wait_until(lambda: len(list_counted()) > len(before), "trials of the second", 180)
        print(f"{len(before)} trials before; the next one {time.monotonic() - began:.1f} s after the end of the first")
        wait_until(lambda: store.campaigns.require("vision").over, "its end", 240)
        campaign = store.campaigns.require("vision")
        after = list_counted()
        assert campaign.state is CampaignState.FINISHED, campaign.reason
        assert before.items() <= after.items()
        tasks = {key[:2] for key in after}
        assert {sum(key[:2] == task for key in after) for task in tasks} == {12}
        assert len(after) == len(store.trials.fetch_counted(1))
        assert len(store.records.fetch(simulated=None)) == len(tasks)
