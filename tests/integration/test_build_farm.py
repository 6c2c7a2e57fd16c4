"""Builds that campaigns share: kept, joined, made again where a compiler dies."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest
import ray
import yaml

from device_agent.protocol import Status
from farm.campaign.engine import ray_nodes
from farm.campaign.engine.builds import BuildFarm
from farm.campaign.engine.ray_calls import ray_running
from farm.errors import UsageError
from farm.search import tvm_env
from farm.search.codegen.build_pool import BuildResult
from farm.settings import Settings
from tests.integration.small_builds import TIMEOUT_S, collect, make_module


@pytest.fixture(scope="module")
def host() -> dict[str, Any]:
    return tvm_env.host_target(1)


def idle_pids(farm: BuildFarm) -> list[int]:
    """Process ids of the farm's compilers that are free."""
    return [pid for each in farm._machines.values() for pid in each.pool.pids()]


# On this machine alone


@pytest.fixture(scope="module")
def _own_ray() -> Iterator[None]:
    """One Ray for the tests without a cluster; it is not watched, since the others replace it."""
    with ray_running(2):
        yield


@pytest.fixture
def start_farm(_own_ray: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., BuildFarm]]:
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
    asked = [farm.submit(module, host, standalone=alone) for alone in (False, False, True)]
    broken = farm.submit(make_module(33).replace("tirx.For", "tirx.Fro"), host)
    first, second, alone, broken = collect(farm, *asked, broken)
    assert (broken.status, broken.library) == (Status.BUILD_FAILED, None)
    assert "tirx.Fro" in broken.message
    assert first.status is alone.status is Status.OK
    assert (first.library, first.sha256) == (second.library, second.sha256)
    assert (first.seconds > 0, second.seconds, alone.seconds > 0) == (True, 0.0, True)
    third = farm.submit(module, host).result(0)
    assert (third.seconds, third.library) == (0.0, first.library)
    assert farm.counts == {"built": 3, "joined": 1, "cached": 1}
    farm.close()

    later = start_farm()
    assert later.submit(module, host).result(0).sha256 == first.sha256
    for path in later._cache._folder.glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    [damaged] = collect(later, later.submit(module, host))
    assert (damaged.seconds > 0, damaged.sha256) == (True, first.sha256)


def test_a_compiler_that_dies(start_farm: Callable[..., BuildFarm], host: dict[str, Any]) -> None:
    """A build whose compiler is killed is repeated silently; the second time its module is to blame."""
    farm = start_farm()

    def kill_under(module: str) -> Future[BuildResult]:
        [pid] = idle_pids(farm)  # waits until it has loaded
        farm.poll()
        os.kill(pid, signal.SIGSTOP)
        built = farm.submit(module, host)
        assert farm.waiting == 0
        os.kill(pid, signal.SIGKILL)
        return built

    [once] = collect(farm, kill_under(make_module(9)))
    assert once.status is Status.OK

    asked = kill_under(make_module(10))
    deadline = time.monotonic() + TIMEOUT_S
    while not farm.waiting:  # until it is seen, and before another compiler has loaded
        assert time.monotonic() < deadline
        wait(farm.pending, 0.05, FIRST_COMPLETED)
        farm.poll()
    [pid] = idle_pids(farm)
    os.kill(pid, signal.SIGSTOP)
    farm.poll()
    assert (farm.waiting, asked.done()) == (0, False)
    os.kill(pid, signal.SIGKILL)
    [twice] = collect(farm, asked)
    assert (twice.status, twice.died) == (Status.BUILD_FAILED, False)
    assert "took 2 compilers down" in twice.message


# On a cluster: what needs none; see `test_ray_cluster`


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
