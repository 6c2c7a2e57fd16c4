"""Builds that campaigns share: kept, joined, made again where a compiler or a machine dies, on all nodes of Ray."""

from __future__ import annotations

import os
import pathlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from device_agent.protocol import Status
from farm.campaign.engine import ray_calls, ray_nodes
from farm.campaign.engine.builds import BuildAnswer, BuildFarm
from farm.campaign.engine.ray_calls import ray_running
from farm.errors import UnavailableError, UsageError
from farm.search import target, tvm_env
from farm.settings import Settings
from tests.ports import find_free_port

tvm = tvm_env.load()

TIMEOUT_S = 90.0


def make_module(size: int) -> str:
    """`main(A, B)`, B being A plus one over `size` floats, as it travels."""
    from tvm import te

    a = te.placeholder((size,), name="A")
    b = te.compute((size,), lambda i: a[i] + 1.0, name="B")
    return str(tvm.ir.save_json(tvm.IRModule({"main": te.create_prim_func([a, b])})))


@pytest.fixture(scope="module")
def host() -> dict[str, Any]:
    """The target of this machine."""
    return target.host_target(1)


def collect(farm: BuildFarm, count: int) -> list[BuildAnswer]:
    """The next `count` results."""
    found: list[BuildAnswer] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {count - len(found)} builds"
        if pending := farm.pending:
            ray.wait(pending, timeout=0.2)
        found += farm.poll()
    return found


def idle_pids(farm: BuildFarm) -> list[int]:
    """Process ids of the farm's compilers that are free."""
    return [pid for each in farm._machines.values() for pid in each.pool.pids()]


# On this machine alone


@pytest.fixture(scope="module")
def _own_ray() -> Iterator[None]:
    """One Ray for the tests without a cluster; nobody watches it, since the others put another in its place."""
    with ray_running(2):
        yield


@pytest.fixture
def start_farm(_own_ray: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., BuildFarm]]:
    """Start build farms that share a folder; closed afterwards."""
    farms: list[BuildFarm] = []

    def start(cores: int = 1, **settings: Any) -> BuildFarm:
        farms.append(BuildFarm(Settings(**settings), tmp_path / "builds", cores))
        return farms[-1]

    yield start
    for farm in farms:
        farm.close()


def test_a_module_is_compiled_once_per_farm(start_farm: Callable[..., BuildFarm], host: dict[str, Any]) -> None:
    """Who asks for what is being built gets the same library for nothing; so does a later farm, from the folder, unless
    the file there was damaged. Another kind of build of the module is another library, and a broken module fails with
    the compiler's words.
    """
    farm = start_farm()
    module = make_module(32)
    for job in ("first", "second"):
        farm.submit(job, module, host)
    farm.submit("standalone", module, host, standalone=True)
    farm.submit("broken", make_module(33).replace("tirx.For", "tirx.Fro"), host)
    results = {built.job: built for built in collect(farm, 4)}
    broken = results.pop("broken").result
    assert (broken.status, broken.library) == (Status.BUILD_FAILED, None)
    assert "tirx.Fro" in broken.message
    assert {job: built.cached for job, built in results.items()} == {
        "first": False,
        "second": True,
        "standalone": False,
    }
    first, second = results["first"].result, results["second"].result
    assert first.status is Status.OK
    assert (first.library, first.sha256) == (second.library, second.sha256)
    assert (first.seconds > 0, second.seconds) == (True, 0.0)
    farm.submit("third", module, host)
    [third] = farm.poll()
    assert (third.cached, third.result.library) == (True, first.library)
    assert farm.counts == {"built": 3, "joined": 1, "cached": 1}
    farm.close()

    later = start_farm()
    later.submit("later", module, host)
    assert ray.wait(later.pending, timeout=0)[0], "a result is at hand, and nothing says so"
    assert later.poll()[0].cached
    for path in later._cache._folder.glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    later.submit("damaged", module, host)
    [damaged] = collect(later, 1)
    assert (damaged.cached, damaged.result.sha256) == (False, first.sha256)


def test_a_compiler_that_dies(start_farm: Callable[..., BuildFarm], host: dict[str, Any]) -> None:
    """A build whose compiler is killed is made again and nobody hears of it; the second time its module is to blame."""
    farm = start_farm()

    def kill_under(job: str, module: str) -> None:
        [pid] = idle_pids(farm)  # waits until it has loaded
        farm.poll()
        os.kill(pid, signal.SIGSTOP)
        farm.submit(job, module, host)
        assert farm.waiting == 0
        os.kill(pid, signal.SIGKILL)

    kill_under("once", make_module(9))
    [once] = collect(farm, 1)
    assert (once.job, once.result.status, once.cached) == ("once", Status.OK, False)

    kill_under("twice", make_module(10))
    deadline = time.monotonic() + TIMEOUT_S
    while not farm.waiting:  # until it is seen, and before another compiler has loaded
        assert time.monotonic() < deadline
        ray.wait(farm.pending, timeout=0.05)
        assert not farm.poll()
    [pid] = idle_pids(farm)
    os.kill(pid, signal.SIGSTOP)
    assert not farm.poll()
    assert farm.waiting == 0
    os.kill(pid, signal.SIGKILL)
    twice = collect(farm, 1)
    assert (twice[0].result.status, twice[0].result.died) == (Status.BUILD_FAILED, False)
    assert "took 2 compilers down" in twice[0].result.message


# On several machines

# Ray's own would notice a machine that died after some 15 s.
_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
_NODE: dict[str, Any] = {"object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster(_own_ray: None) -> Iterator[Cluster]:
    """A cluster on loopback whose head is this machine's own node. Its token is in the environment."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray_calls._forget_token()
        # Or Ray takes 127.0.0.1 for this machine's address in some network, and listens there.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**_NODE, "num_cpus": 1, "include_dashboard": False, "_system_config": _SOON},
        )
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            ray_calls._forget_token()


def test_a_machine_joins_and_dies_in_the_middle_of_a_build(
    cluster: Cluster, host: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """A machine that joins gets builds beside this one. When it dies its build is made here, blaming nobody, and
    nothing is lost; boards and searches stay here all the while.
    """
    notes: list[str] = []
    settings = Settings(ray_address=cluster.address, build_timeout_s=60.0)
    with ray_nodes.farm_ray(settings, 1), BuildFarm(settings, tmp_path / "builds", 1, notes.append) as farm:
        assert farm.workers == 1
        second = cluster.add_node(**_NODE, num_cpus=1, wait=False)
        deadline = time.monotonic() + TIMEOUT_S
        while not (farm.workers == 2 and all(each.pool.has_loaded() for each in farm._machines.values())):
            assert time.monotonic() < deadline, "the second machine did not come into use"
            ray.wait(farm.pending, timeout=0.2)
            farm.poll()
        [own] = [node for node in ray_nodes.fetch_nodes() if node.is_here]
        assert _place_of_an_actor() == own.id

        there = next(each for each in farm._machines.values() if not each.node.is_here)
        [pid] = there.pool.pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            for size in range(8, 14):
                farm.submit(size, make_module(size), host)
            assert len(there.pool.jobs) == 1, "the other machine got no build"
            results = collect(farm, 5)
            cluster.remove_node(second, allow_graceful=False)
            results += collect(farm, 1)
            while (
                len(notes) < 2 and time.monotonic() < deadline + TIMEOUT_S
            ):  # what it built may be told before its end
                ray.wait(farm.pending, timeout=0.2)
                farm.poll()
        finally:
            os.kill(pid, signal.SIGKILL)
    assert sorted(built.job for built in results) == list(range(8, 14))
    assert {built.result.status for built in results} == {Status.OK}
    assert "builds too" in notes[0]
    assert "builds no more" in notes[1]


def _place_of_an_actor() -> str:
    """The node that an actor with `here()` is on."""

    class Somebody:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    actor = ray.remote(**ray_nodes.here(), num_cpus=0)(Somebody).remote()
    place = str(ray.get(actor.node.remote(), timeout=TIMEOUT_S))
    ray.kill(actor)
    return place


def test_a_cluster_that_does_not_let_us_in(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token is told from an address where nothing answers, and both soon, with what to do."""
    with (
        pytest.raises(UnavailableError, match="nothing answers there") as refused,
        _joined(f"127.0.0.1:{find_free_port()}"),
    ):
        pass
    assert "ray start --head" in refused.value.hint
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
    with pytest.raises(UnavailableError, match="its token is another") as refused, _joined(cluster.address):
        pass
    assert "RAY_AUTH_TOKEN" in refused.value.hint


def _joined(address: str) -> Any:
    return ray_nodes.farm_ray(Settings(ray_address=address), 1)


def test_another_version_is_named() -> None:
    """Ray's own complaint about versions becomes one line with what to do."""
    with pytest.raises(RuntimeError) as complaint:
        ray._private.utils.check_version_info({"ray_version": "1.0", "python_version": "3.6.9"}, "the cluster")
    error = ray_nodes._unusable("10.0.0.1:6379", str(complaint.value))
    assert "its versions are not ours" in error.message
    assert "1.0" in error.message
    assert "same Python, Ray and tvm-farm" in error.hint


def test_the_example_of_a_cluster_is_one() -> None:
    """Ray's own schema takes `deploy/ray-cluster.yaml`."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    path = pathlib.Path(__file__).parents[2] / "deploy" / "ray-cluster.yaml"
    validate_config(prepare_config(yaml.safe_load(path.read_text())))


@pytest.mark.parametrize("text", ["ray://head:10001", "head", "head:0", "head:99999", "local", ":6379"])
def test_an_address_that_is_none(text: str) -> None:
    """What cannot be a cluster's address is wrong usage, said before anything is tried."""
    with pytest.raises(UsageError, match="FARM_RAY_ADDRESS"):
        ray_nodes.require_address(text)
