"""What one more machine of a Ray cluster is worth: builds a second with 1, 2 and 4 nodes of one CPU, by demand.

The nodes are this machine's. With `--compile` they compile and link, which tells something up to as many nodes as it
has cores. Without, a build only takes its time (`--build-s`) and gives back a library's worth of bytes: asking,
placing, carrying and keeping are real, and what they cost the coordinator is what ends the growth.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import _machine
import psutil
import ray
from ray.cluster_utils import Cluster

from device_agent.protocol import Status
from farm.campaign.engine import builds, ray_calls, ray_nodes
from farm.campaign.engine.builds import BuildFarm
from farm.search import tvm_env
from farm.search.codegen.build_pool import BuildResult, compiler_versions
from farm.settings import Settings

LIBRARY_BYTES = 60_000  # of a convolution's library
_NODE: dict[str, Any] = {"object_store_memory": 80 << 20}
_TIMEOUT_S = 3600.0


def _launch_waiting(seconds: float, versions: str, options: Mapping[str, Any]) -> Any:
    """As `builds.launch_compiler`: a compiler that only takes its time."""

    class Compiler:
        def where(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def load(self) -> str:
            return versions

        def build(self, *order: Any) -> tuple[BuildResult, int, int]:
            time.sleep(seconds)
            return BuildResult(Status.OK, "", os.urandom(LIBRARY_BYTES), "0" * 64, seconds), 1, 1

        def pid(self) -> int:
            return os.getpid()

    return ray.remote(**{"num_cpus": 0, **options})(Compiler).remote()


def _make_module(number: int, compiles: bool) -> str:
    """A unique module: a matrix product, or a word if nothing compiles it."""
    if not compiles:
        return f"module {number}"
    tvm = tvm_env.load()
    from tvm import te

    a, b = te.placeholder((64, 64), name="A"), te.placeholder((64, 64 + number), name="B")
    k = te.reduce_axis((0, 64), name="k")
    c = te.compute((64, 64 + number), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return str(tvm.ir.save_json(tvm.IRModule({"main": te.create_prim_func([a, b, c])})))


@contextlib.contextmanager
def _building(nodes: int, options: Any) -> Iterator[BuildFarm]:
    """A farm of builds on so many nodes; this machine's own compiler is stopped, and does not help."""
    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(**_NODE, num_cpus=1)
        settings = Settings(ray_address=cluster.address, ray_max_builders=nodes, build_timeout_s=_TIMEOUT_S)
        launch = builds.launch_compiler
        if not options.compile:
            versions = compiler_versions()
            launch = lambda where: _launch_waiting(options.build_s, versions, where)  # noqa: E731 - one of two
        with (
            tempfile.TemporaryDirectory() as folder,
            ray_nodes.farm_ray(settings, 1),
            mock.patch.object(builds, "launch_compiler", launch),
            BuildFarm(settings, pathlib.Path(folder), 1, _machine.say) as farm,
        ):
            [here] = farm._machines.values()
            while not here.pool.has_loaded():
                concurrent.futures.wait(farm.pending, 0.2, concurrent.futures.FIRST_COMPLETED)
                farm.poll()
            [pid] = here.pool.pids()
            os.kill(pid, signal.SIGSTOP)
            try:
                yield farm
            finally:
                os.kill(pid, signal.SIGKILL)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _run(farm: BuildFarm, nodes: int, options: Any) -> dict[str, float]:
    """Builds a second once all nodes build, when that was, and what a build costs this process: the engine's loop,
    Ray's client and the cache.
    """
    host, wanted = tvm_env.host_target(1), options.builds * nodes
    modules = [_make_module(number, options.compile) for number in range(2 * wanted + 40 * nodes)]
    began, full_at, before_s = time.monotonic(), 0.0, 0.0
    asked: list[concurrent.futures.Future[BuildResult]] = []
    ended: list[float] = []
    while len(ended) < wanted:
        while farm.waiting < nodes + 1:
            asked.append(farm.submit(modules.pop(0), host))
        concurrent.futures.wait(farm.pending, 0.2, concurrent.futures.FIRST_COMPLETED)
        farm.poll()
        answers = [each.result() for each in asked if each.done()]
        asked = [each for each in asked if not each.done()]
        if any(answer.status is not Status.OK for answer in answers):
            raise RuntimeError(f"a build failed: {answers}")
        now = time.monotonic()
        if full_at:
            ended += [now for _ in answers]
        elif sum(bool(each.pool.jobs) for each in farm._machines.values()) == nodes + 1:
            full_at, before_s = now, _read_cpu_s()
    return {
        "builds_per_s": len(ended) / (ended[-1] - full_at),
        "all_nodes_build_after_s": full_at - began,
        "coordinator_core_s_per_build": (_read_cpu_s() - before_s) / len(ended),
    }


def _read_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Take turns; print medians."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--builds", type=int, default=100, help="for each node")
    parser.add_argument("--compile", action="store_true", help="compile and link, instead of taking --build-s")
    parser.add_argument("--build-s", type=float, default=0.5, help="how long a build takes")
    parser.add_argument("--times", type=int, default=3, help="runs, in turns")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.builds, options.times = [1, 2], 5, 1
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray_calls.forget_token()
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in options.nodes}
    with _machine.only_json() as emit, ray_calls.on_loopback():
        for _ in range(options.times):
            for count in options.nodes:
                with _building(count, options) as farm:
                    runs[count].append(_run(farm, count, options))
                _machine.say(f"{count} nodes: {runs[count][-1]}")
        figures = {
            str(count): {name: round(statistics.median(run[name] for run in found), 4) for name in found[0]}
            for count, found in runs.items()
        }
        one = figures[str(options.nodes[0])]["builds_per_s"]
        for each in figures.values():
            each["speed_up"] = round(each["builds_per_s"] / one, 2)
        emit("build_nodes", vars(options), {"nodes": figures})


if __name__ == "__main__":
    main()
