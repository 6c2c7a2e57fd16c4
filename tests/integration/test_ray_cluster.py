"""A shared cluster: compilers are asked for when builds wait and given back, machines come, go and die."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import psutil
import pytest
import ray

from device_agent.protocol import Status
from farm.campaign.engine import ray_nodes
from farm.campaign.engine.builds import BuildFarm
from farm.errors import UnavailableError
from farm.search import tvm_env
from farm.search.codegen.build_pool import BuildResult
from farm.settings import Settings
from tests.integration import ray_cluster
from tests.integration.small_builds import TIMEOUT_S, make_module
from tests.ports import find_free_port

MOST = 3


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head without CPUs, and an autoscaler that starts up to three nodes with one each."""
    with ray_cluster.with_token(), ray_cluster.autoscaling_cluster(MOST) as address:
        yield address


class Campaign:
    """A build farm that is kept in work, with one compiler here, which does nothing but wait."""

    def __init__(self, farm: BuildFarm, notes: list[str]) -> None:
        self.farm, self.notes = farm, notes
        self.asked: list[Future[BuildResult]] = []
        self._host = tvm_env.host_target(1)

    def submit(self) -> None:
        self.asked.append(self.farm.submit(make_module(len(self.asked) + 9), self._host))

    @property
    def answers(self) -> list[BuildResult]:
        return [each.result() for each in self.asked if each.done()]

    def until(self, done: Callable[[], Any], what: str, waiting: int = 0) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}; said was {self.notes}"
            while self.farm.waiting < waiting:
                self.submit()
            if pending := self.farm.pending:
                wait(pending, 0.2, FIRST_COMPLETED)
            self.farm.poll()

    @property
    def others(self) -> list[Any]:
        return [each for each in self.farm._machines.values() if not each.node.is_here]


@contextlib.contextmanager
def campaign(address: str, folder: pathlib.Path, **settings: Any) -> Iterator[Campaign]:
    """A campaign's builds on the cluster."""
    chosen = Settings(ray_address=address, ray_max_builders=MOST, build_timeout_s=120.0, **settings)
    notes: list[str] = []
    with ray_nodes.farm_ray(chosen, 1), BuildFarm(chosen, folder, 1, notes.append) as farm:
        work = Campaign(farm, notes)
        [here] = farm._machines.values()
        work.until(here.pool.has_loaded, "this machine's compiler")
        [pid] = here.pool.pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield work
        finally:
            os.kill(pid, signal.SIGKILL)


def count_nodes() -> int:
    return len(ray_nodes.fetch_nodes())


def test_a_cluster_grows_while_builds_wait_and_shrinks_again(address: str, tmp_path: pathlib.Path) -> None:
    """From no machine to as many as may be asked for, each with its compiler. One that dies in the middle of a build
    has it made elsewhere, and nothing is blamed. Where nothing waits, compilers are given back, and machines with them.
    """
    with campaign(address, tmp_path / "builds", ray_idle_s=1.0, ray_builder_label=ray_cluster.BUILDER) as work:
        assert (count_nodes(), work.farm.workers) == (1, 1 + MOST)
        work.until(
            lambda: len(work.others) == MOST and all(each.pool.has_loaded() or each.pool.jobs for each in work.others),
            "three machines",
            waiting=MOST + 1,
        )
        assert count_nodes() == 1 + MOST

        dying = work.others[0]
        work.until(lambda: dying.pool.jobs, "a build there", waiting=1)
        raylet = _find_raylet(dying.node.id)
        raylet.kill()
        work.until(lambda: dying not in work.others, "its end", waiting=1)

        work.until(lambda: len(work.answers) == len(work.asked) - 1, "all builds but the one that is held up here")
        work.until(lambda: count_nodes() == 1, "the machines to go")
        assert not work.others
    assert {answer.status for answer in work.answers} == {Status.OK}
    assert any("it left the cluster" in note for note in work.notes)
    assert any("it was idle" in note for note in work.notes)


def _find_raylet(node: str) -> psutil.Process:
    [socket] = [each["RayletSocketName"] for each in ray.nodes() if each["NodeID"] == node]
    found = ray_nodes._find_process("", f"--raylet_socket_name={socket}")
    assert found is not None
    return found


def test_a_machine_that_cannot_build_is_left_out(address: str, tmp_path: pathlib.Path) -> None:
    """It is named, with what it lacks; then a machine that the autoscaler starts builds instead."""
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("raise ImportError('another TVM altogether')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])  # where Ray may be
    # In this order: of two nodes at one address a driver takes either for its own.
    with campaign(address, tmp_path / "builds") as work, ray_cluster.joined_node(address, {"PYTHONPATH": path}):
        work.until(lambda: work.farm._refused, "a machine that is refused", waiting=2)
        assert any("another TVM altogether" in note for note in work.notes), work.notes
        work.until(lambda: len(work.answers) >= 2, "builds elsewhere", waiting=2)
        assert {each.node.id for each in work.others}.isdisjoint(work.farm._refused)


def test_a_cluster_that_does_not_let_us_in(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token and a dead address give different errors, both soon, with what to do."""
    with (
        pytest.raises(UnavailableError, match="nothing answers there") as refused,
        _joined(f"127.0.0.1:{find_free_port()}"),
    ):
        pass
    assert "ray start --head" in refused.value.hint
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
    with pytest.raises(UnavailableError, match="its token is another") as refused, _joined(address):
        pass
    assert "RAY_AUTH_TOKEN" in refused.value.hint


def _joined(address: str) -> Any:
    return ray_nodes.farm_ray(Settings(ray_address=address), 1)
