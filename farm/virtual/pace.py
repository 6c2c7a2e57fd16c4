"""How fast a virtual board is: the cost of a call (`work.py`), scaled by the board's clocks and cores.

At its highest clocks the board takes `slowdown` times as long as this machine. A share of that scales with the core
clock, the rest with the memory clock. Parallel work spreads over the board's cores. `gpu_time.py` models its GPU.
`set_pace` times the code of stock TVM clients, which have no worker.
"""

from __future__ import annotations

import io
import json
import random
import struct
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.platforms.board_time import BoardTime
from device_agent.protocol import GPU, MeasureSpec, RunSpec, Segment, count_seconds
from device_agent.sysfs import Tree
from device_agent.worker.plan import OverrunError
from farm.virtual import gpu_time, work
from farm.virtual.lapse import WorkersTime
from farm.virtual.tree import CLOCKS, LOAD, PACE

# TVM's name of a client's `time_evaluator`.
_EVALUATOR = "runtime.RPCTimeEvaluator"

# Assumed shares of the memory's bandwidth, per busy share of the board's cores: what governors make room for, and what
# code moves that is not emulated.
_TRAFFIC, _MOVED = 0.5, 0.1
# A smaller change of load is not sent to the board.
_SAME_LOAD = 0.05
# The board's time advances in blocks of at least this: a request to the simulator costs more than a short run.
_BLOCK_S = 0.02
# An overlong sleep shortens the next ones by up to this, so that a window holds as many calls as the board's time
# allows.
_CREDIT_S = 0.5
# Share of a worker's time limit for measuring a call's cost, so that this does not look like a hanging candidate.
_ESTABLISHING = 0.5


def set_pace(tree: Tree) -> None:
    """Make this process time for stock clients as the virtual board `tree` says (`timing` of its faults)."""
    from tvm_ffi import get_global_func, register_global_func

    evaluator = get_global_func(_EVALUATOR)

    def make(
        module: Any, name: str, device: int, index: int, number: int, repeat: int, min_repeat_ms: int, *rest: Any
    ) -> Any:
        set_s = float(json.loads(tree.read(PACE))["timing_s"])
        if not set_s:
            return evaluator(module, name, device, index, number, repeat, min_repeat_ms, *rest)
        once = evaluator(module, name, device, index, 1, 1, 0, *rest)

        def time_it(*tensors: Any) -> bytes:
            began = time.monotonic()
            (call_s,) = struct.unpack("@d", once(*tensors))
            time.sleep(max(0.0, began + set_s - time.monotonic()))
            return struct.pack(f"@{repeat}d", *[call_s] * repeat)

        return time_it

    register_global_func(_EVALUATOR, make, override=True)


def name_content(spec: MeasureSpec | RunSpec, content: Sequence[bytes], cores: str, gpu: str = "") -> str:
    """The cache key of what `spec` runs: everything that determines the cost of a call, with `cores` and `gpu`.

    That is the program, the shapes and types of its inputs, and threads; never the values, so one program has one
    latency.
    """
    program, *given = content
    if isinstance(spec, MeasureSpec):
        how = [spec.arguments, spec.entry, spec.cold_weights]
    else:
        how = [str(spec.engine), spec.entry, [_list_forms(arrays, spec.stacked) for arrays in given], spec.command]
    if spec.device == GPU:
        how += [GPU, gpu]
    return work.make_key(repr(how), cores, program)


def _list_forms(arrays: bytes, stacked: int) -> Any:
    """Shape and type of one inference's arrays in an .npz; the raw bytes of anything else, which workers report."""
    forms = []
    try:
        with zipfile.ZipFile(io.BytesIO(arrays)) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(stream)
                    forms.append((shape[stacked > 1 :], str(dtype)))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, NotImplementedError):
        return arrays
    return forms


def make_emulated(segments: Sequence[Segment]) -> work.Work:
    """Work of emulated code, which is deterministic. Seconds stand for cycles at 1 GHz."""
    return work.Work(max(1e-9, sum(each[2] for each in segments) / 1e9), 0.0, (), tuple(segments))


class Pace:
    """The pace of one worker on its cluster ("": all open to the scheduler), with `host_cores` cores of the host.

    It runs `key` for the `draw`th time: noise depends only on these and on the board's seed. Every method raises
    OSError when the simulator is gone.
    """

    def __init__(
        self,
        tree: Tree,
        time: BoardTime,
        cluster: str,
        host_cores: int,
        limit_s: float,
        folder: Path | None,
        key: str,
        draw: int = 1,
        *,
        on_gpu: bool = False,
        core: Mapping[str, Any] | None = None,
        core_share: float | None = None,
    ) -> None:
        """`limit_s` is the board's time limit; `folder` caches the cost of work, None for no cache.

        `core_share` of the time scales with the core clock; None: the board's usual share.

        `core`: the board's own code is emulated for this core (`farm/virtual/emulated/pipeline.py`).
        """
        self._on_gpu, self._core, self._core_share = on_gpu, core, core_share
        self._read_cost: Callable[[], Sequence[Segment]] | None = None
        self._added: dict[tuple[int, float, float, str], tuple[float, float]] = {}
        self._again = True
        self._tree, self._time = tree, time
        self._cluster = cluster
        self._host_cores = max(1, host_cores)
        self._limit_s, self._used_s = limit_s, 0.0
        self._book, self._key, self._draw = work.WorkBook(folder), key, draw
        self._facts: dict[str, Any] | None = None
        self._work: work.Work | None = None
        self._load_sent: tuple[float, float, float] | None = None
        self._owed_s = 0.0
        self._clocks: tuple[float, int] | None = None
        self._core_hz, self._individual, self._memory_s = 1.0, 1.0, 1.0
        self._gpu_clocks = (0.0, 1.0)
        self._shown: str | None = None

    def emulate(self, read_cost: Callable[[], Sequence[Segment]], *, again: bool) -> None:
        """Declare the code as emulated: `read_cost` returns the last call's cost. `again`: also if that is known."""
        self._read_cost, self._again = read_cost, again

    def begin(self) -> float:
        """Start computing: with the host's cores as the load, until the work is known."""
        timing_s = float(self._read_facts()["timing_s"])
        cores = self._read_clocks()[1]
        if self._on_gpu:
            gpu_time.take_launches()  # drop the launches of loading
        self._send_load(float(cores if self._host_cores > 1 and not self._on_gpu else 1), cores)
        return timing_s

    def end(self) -> None:
        """Return to idle after all of the board's time has passed."""
        self.settle()
        self._load_sent = None
        self._tree.write(LOAD, "{}")

    def take(self, run: Callable[[int], float], calls: int, calls_beside: int = 0) -> float:
        """Let the board make `calls` calls; return its seconds per call.

        Executes the program once, to detect hangs, and more often if its cost is unknown; otherwise charges modelled
        time. Raises OverrunError as soon as the board would miss its limit.
        """
        if self._work is None:
            self._work = self._book.find(self._key)
            if self._work is not None:
                if self._again:
                    run(1)
            elif self._read_cost is not None:
                run(1)
                self._work = self._book.keep(self._key, make_emulated(self._read_cost()))
            elif self._on_gpu:
                run(1)
                kernels = gpu_time.sum_up(gpu_time.take_launches(), 1 + calls_beside)
                asking_s = gpu_time.ASKING_S * sum(kernel.times for kernel in kernels)
                self._work = self._book.keep(self._key, work.Work(max(asking_s, gpu_time.ASKING_S), 0.0, kernels))
            else:
                found = work.establish(run, calls_beside, self._host_cores, _ESTABLISHING * self._limit_s)
                self._work = self._book.keep(self._key, found)
        board_s = self.board_seconds(self._work)
        self._used_s += board_s * (calls + calls_beside)
        if self._used_s > self._limit_s:
            raise OverrunError(f"not finished after {self._limit_s:g} s of the simulated board's time")
        self._owed_s += board_s * (calls + calls_beside)
        if self._owed_s >= _BLOCK_S:
            self.settle()
        return board_s

    def board_seconds(self, done: work.Work) -> float:
        """The board's time for this work at its present clocks."""
        facts = self._read_facts()
        stretch, cores = self._read_clocks()
        if done.segments:
            return self._price_emulated(done.segments, cores) * self._draw_noise(facts)
        base_s = done.base_s(cores)
        if self._load_sent is not None:
            busy = (done.alone_s + done.shared_s) / base_s
            if done.kernels:
                cpu_s = base_s * stretch
                gpu_s, now = self._compute_gpu(done, cpu_s, *self._gpu_clocks)
                _, wanted = self._compute_gpu(done, cpu_s, float(facts["gpu"]["highest_hz"]), 1.0)
                self._send_load(busy * min(1.0, cpu_s / gpu_s), cores, now, wanted)
            else:
                self._send_load(busy, cores)
            stretch, cores = self._read_clocks()
        # The CPU goes on submitting while the GPU computes.
        cpu_s = done.base_s(cores) * stretch
        board_s = max(cpu_s, self._compute_gpu(done, cpu_s, *self._gpu_clocks)[0])
        return board_s * self._draw_noise(facts)

    def _draw_noise(self, facts: Mapping[str, Any]) -> float:
        return max(0.5, 1 + float(facts["noise"]) * self._dice.gauss(0, 1))

    def _price_emulated(self, segments: Sequence[Segment], cores: int) -> float:
        """The time of emulated code at the present clocks: its lanes' cycles, or the memory time of its lines."""
        base_s, busy_s = self._add_segments(segments, cores)
        if self._load_sent is not None:
            lines_s, _ = self._add_segments([(0.0, 0, 0.0, sum(each[3] for each in segments))], cores, "lines")
            self._send_load(min(float(cores), busy_s / base_s), cores, (lines_s / base_s, 0.0))
            _, cores = self._read_clocks()
            base_s, _ = self._add_segments(segments, cores)
        return base_s

    def _add_segments(self, segments: Sequence[Segment], cores: int, part: str = "") -> tuple[float, float]:
        """The time of segments (or of what `part` names), and of all cores together, in s."""
        # One worker runs one program at few distinct clocks.
        clocks = cores, self._core_hz, self._memory_s, part
        if clocks not in self._added:
            self._added[clocks] = count_seconds(segments, self._core or {}, self._core_hz, cores, self._memory_s)
        base_s, busy_s = self._added[clocks]
        return base_s * self._individual, busy_s * self._individual

    def _compute_gpu(
        self, done: work.Work, cpu_s: float, gpu_hz: float, memory_share: float
    ) -> tuple[float, tuple[float, float]]:
        """The GPU's time at such clocks, and the shares of memory and GPU beside `cpu_s`; zeros without GPU work."""
        if not done.kernels:
            return 0.0, (0.0, 0.0)
        facts = self._read_facts()["gpu"]
        gpu_s, computing, moving = gpu_time.compute_seconds(done.kernels, facts, gpu_hz, memory_share)
        share = gpu_s / max(gpu_s, cpu_s)
        return gpu_s, (share * moving, share * computing)

    def settle(self) -> None:
        """Let the owed time pass; an overlong sleep of the host counts towards the next block."""
        if self._owed_s <= 0:
            return
        self._owed_s = max(self._owed_s - self._time.sleep(self._owed_s), -_CREDIT_S)
        self._clocks = None  # heat may have changed them
        self._shown = self._time.clocks if isinstance(self._time, WorkersTime) else None

    def _send_load(
        self, busy: float, cores: int, now: tuple[float, float] | None = None, wanted: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Send busy cores, and the shares of memory and GPU: now (None: unknown code's), and at the highest clocks."""
        now = now or (_MOVED * busy / cores, 0.0)
        pairs = zip((busy, *now), self._load_sent or (-1.0, -1.0, -1.0), strict=True)
        if any(abs(share - sent) > _SAME_LOAD * max(share, sent) for share, sent in pairs):
            self._load_sent = busy, *now
            load = {"cluster": self._cluster, "cores": busy, "memory": min(1.0, now[0]), "gpu": now[1]}
            load["wanted"] = (_TRAFFIC * busy / cores + wanted[0], wanted[1])
            self._tree.write(LOAD, json.dumps(load))
            self._clocks = self._shown = None  # the governor follows the load

    def _read_facts(self) -> dict[str, Any]:
        if self._facts is None:
            facts = self._facts = json.loads(self._tree.read(PACE))
            self._dice = random.Random(f"{facts['seed']} {self._key} {self._draw}")
        return self._facts

    def _read_clocks(self) -> tuple[float, int]:
        """(board time over host time for one core, cores online) now; the slowest cluster in use counts."""
        if self._clocks is None:
            self._clocks = self._fetch_clocks()
        return self._clocks

    def _fetch_clocks(self) -> tuple[float, int]:
        facts = self._read_facts()
        known, self._shown = self._shown, None
        now = json.loads(known or self._tree.read(CLOCKS))
        chosen = [
            name
            for name, cluster in facts["clusters"].items()
            if now["clusters"][name]["online"]
            and (name == self._cluster or (not self._cluster and not cluster["isolated"]))
        ]
        # A cluster with all cores offline runs nothing: its threads move to the others.
        chosen = chosen or [name for name in facts["clusters"] if now["clusters"][name]["online"]]
        core_share = facts["core_share"] if self._core_share is None else self._core_share
        memory_s = 1.0
        if facts["memory_reference_hz"]:
            memory_s = facts["memory_reference_hz"] / now["memory_hz"]
        self._gpu_clocks = (float(now["gpu_hz"]), 1 / memory_s)
        self._memory_s = memory_s
        self._core_hz = float(min(now["clusters"][name]["hz"] for name in chosen))
        self._individual = max(float(facts["clusters"][name]["individual"]) for name in chosen)
        stretches = [
            facts["clusters"][name]["slowdown"]
            * (
                core_share * facts["clusters"][name]["reference_hz"] / now["clusters"][name]["hz"]
                + (1 - core_share) * memory_s
            )
            for name in chosen
        ]
        return max(stretches), sum(now["clusters"][name]["online"] for name in chosen)
