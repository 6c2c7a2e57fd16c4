"""Compiling candidates: what comes out computes, and the pool of compilers outlives all that can happen to one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import numpy as np
import pytest
import ray

from device_agent.protocol import Status
from farm.campaign.engine.builds import RayCompiler
from farm.errors import UsageError
from farm.inventory.core_types import find_core_type, load_core_types
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.search.codegen.build_pool import BuildPool, BuildResult
from farm.settings import Settings

tvm = tvm_env.load()

SIZE = 32
TIMEOUT_S = 120.0


def matmul_module() -> Any:
    from tvm import te

    a, b = (te.placeholder((SIZE, SIZE), name=name) for name in "AB")
    k = te.reduce_axis((0, SIZE), name="k")
    c = te.compute((SIZE, SIZE), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]))
    schedule.vectorize(schedule.split(schedule.get_loops("C")[1], [None, 8])[1])
    return schedule.mod


@pytest.fixture(scope="module")
def matmul_json() -> str:
    return str(tvm.ir.save_json(matmul_module()))


@pytest.fixture(scope="module")
def host() -> dict[str, Any]:
    return tvm_env.host_target(2)


# One build


def test_code_may_be_made_as_for_another_core_with_the_same_instructions() -> None:
    """What a core is called stays; who it is compiled as is of its own kind, and only where its type says so."""
    for kind in load_core_types():
        assert all(find_core_type(name, kind.machine) is kind for pair in kind.compiled_as.items() for name in pair)
    config = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver3", "num-cores": 2}
    assert tvm_env.make_target(config).attrs["mcpu"] == "znver3"
    assert tvm_env.make_code_target(config).attrs["mcpu"] == "znver2"
    for mcpu in ("znver4", "haswell"):
        assert tvm_env.make_code_target(config | {"mcpu": mcpu}).attrs["mcpu"] == mcpu


@pytest.mark.core
def test_a_built_library_computes(matmul_json: str, host: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """The library's `main` gives NumPy's product."""
    path = tmp_path / "matmul.so"
    path.write_bytes(lowering.build_candidate(matmul_json, host, standalone=True))
    function = tvm.runtime.load_module(str(path))["main"]
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((SIZE, SIZE)).astype("float32") for _ in range(2))
    c = tvm.runtime.tensor(np.zeros((SIZE, SIZE), "float32"))
    function(tvm.runtime.tensor(a), tvm.runtime.tensor(b), c)
    assert np.abs(c.numpy() - a @ b).max() < 1e-4


def test_libraries_are_the_same_and_plain(matmul_json: str, host: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Libraries are content-addressed, so building twice must not give two. A candidate is a plain shared library that
    exports its entry.
    """
    first, second = (lowering.build_candidate(matmul_json, host) for _ in range(2))
    assert lowering.content_address(first) == lowering.content_address(second)
    path = tmp_path / "candidate.so"
    path.write_bytes(lowering.build_candidate(matmul_json, host))
    assert hasattr(ctypes.CDLL(str(path)), "__tvm_ffi_main")


def test_what_killed_compilers_left_is_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose owner is gone goes; one that is used stays, and so does what is not a compiler's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("farm-build-left", "farm-build-used", "else"):
        (tmp_path / name).mkdir()
    used = os.open(tmp_path / "farm-build-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    lowering.remove_left()
    os.close(used)
    assert {path.name for path in tmp_path.iterdir()} == {"farm-build-used", "else"}


@pytest.mark.core
def test_a_library_for_an_arm_board(matmul_json: str) -> None:
    """A candidate for cortex-a57 is an aarch64 library on any machine."""
    config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}
    library = lowering.build_candidate(matmul_json, config)
    assert library[:4] == b"\x7fELF"
    assert int.from_bytes(library[18:20], "little") == 183


@pytest.mark.core
def test_an_impossible_target_is_refused() -> None:
    """A target that TVM does not know is the caller's mistake."""
    with pytest.raises(UsageError, match="TVM refuses the target"):
        tvm_env.make_target({"kind": "abacus"})


# The pool


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def start_pool(_ray: None) -> Iterator[Callable[..., BuildPool[str]]]:
    pools: list[BuildPool[str]] = []

    def start(**settings: Any) -> BuildPool[str]:
        pool: BuildPool[str] = BuildPool(1, Settings(**{"build_timeout_s": 60.0, **settings}), lambda: RayCompiler({}))
        pools.append(pool)
        return pool

    yield start
    for pool in pools:
        pool.close()


def finish(pool: BuildPool[str]) -> tuple[str, BuildResult]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (done := pool.poll()):
        assert time.monotonic() < deadline, "the build did not end"
        wait(pool.pending, 0.1, FIRST_COMPLETED)
    return done[0]


def test_a_worker_is_replaced_after_its_count(
    start_pool: Callable[..., BuildPool[str]], matmul_json: str, host: dict[str, Any]
) -> None:
    """The last build allowed is the last of its process, and the pool never runs short. A broken module in between is
    a failure of its candidate, with the compiler's words, and harms nothing else.
    """
    pool = start_pool(build_recycle_count=3)
    [first] = pool.pids()
    pool.submit("good", matmul_json, host)
    assert (pool.free, pool.jobs) == (0, ["good"])
    job, result = finish(pool)
    assert (job, result.status, pool.free) == ("good", Status.OK, 1)
    assert result.library is not None
    assert result.sha256 == lowering.content_address(result.library)
    assert result.seconds > 0
    pool.submit("broken", matmul_json.replace("tirx.For", "tirx.Fro"), host)
    job, result = finish(pool)
    assert (job, result.status, result.library) == ("broken", Status.BUILD_FAILED, None)
    assert "tirx.Fro" in result.message
    assert (pool.recycled, pool.pids()) == (0, [first])
    pool.submit("last", matmul_json, host)
    assert finish(pool)[1].status is Status.OK
    assert pool.recycled == 1
    assert pool.pids() != [first]


def test_a_fat_a_slow_and_a_killed_worker(
    start_pool: Callable[..., BuildPool[str]], matmul_json: str, host: dict[str, Any]
) -> None:
    """A worker above the size limit is replaced after its build; one that overruns is replaced with a time-out as the
    outcome; one that is killed makes a farm error, and the next build works.
    """
    pool = start_pool(build_recycle_bytes=1 << 20)
    [fat] = pool.pids()
    pool.submit("fat", matmul_json, host)
    assert finish(pool)[1].status is Status.OK
    [slow] = pool.pids()
    assert (pool.recycled, slow != fat) == (1, True)

    pool._settings = Settings(build_timeout_s=0.2)
    os.kill(slow, signal.SIGSTOP)
    pool.submit("slow", matmul_json, host)
    assert pool.poll() == []
    job, result = finish(pool)
    assert (job, result.status, pool.jobs, pool.free) == ("slow", Status.BUILD_TIMEOUT, [], 1)
    assert "0.2 s" in result.message

    pool._settings = Settings()
    [victim] = pool.pids()
    os.kill(victim, signal.SIGSTOP)
    pool.submit("victim", matmul_json, host)
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    job, result = finish(pool)
    assert (job, result.status, result.library) == ("victim", Status.FARM_ERROR, None)
    assert "compiler process died" in result.message
    assert time.monotonic() - started < 30
    pool.submit("next", matmul_json, host)
    assert finish(pool)[1].status is Status.OK
    assert pool.recycled == 3


def test_a_closed_pool_leaves_no_process(start_pool: Callable[..., BuildPool[str]]) -> None:
    """The workers end with the pool."""
    pool = start_pool()
    [pid] = pool.pids()
    pool.close()
    deadline = time.monotonic() + 20
    while _is_alive(pid) and time.monotonic() < deadline:
        ray.wait([ray.put(0)], timeout=0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
