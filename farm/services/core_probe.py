"""What a board's core can do, found out by micro-kernels on the board itself, beside what its core type says.

Whatever else runs can only take time away, so that the least time of each kernel counts, once several rounds agree on
it; what they do not agree on stays unknown. Which kernels there are is in `farm.search.core_kernels`; what is found, in
`farm.inventory.core_figures`; what it changes in predictions, in `farm.inventory.core_types` (`FittedCore`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import Engine, Limits, RunSpec, Status
from farm.crew.golden_runs import LOAD_TIMEOUT_S, RUN_TIMEOUT_S
from farm.errors import PermanentError
from farm.inventory.core_figures import CoreFigure, CoreFigures
from farm.inventory.core_types import MEASURED, CoreType, find_impossible
from farm.measure.session import BoardSession
from farm.processes.compile_subprocess import compile_in_subprocess
from farm.search import core_kernels
from farm.search.cores import Core, core_of

# So many rounds agree within this share, or the time is over.
_AGREEING, _AGREE = 3, 0.03
# Two rounds of a noisy host may agree on what is too long; no kernel has fewer than `_AGREEING` rounds in any case.
TIME_LIMIT_S = 60.0
_RUNS, _WARMUP = 15, 2
_MEMORY_BYTES = 512 << 20
# What a core is asked to chase through: every cache that boards have ends at one of these, or between two.
_SIZES = tuple(size << 10 for power in range(3, 12) for size in (1 << power, 3 << (power - 1)))
# A first cache ends where a load takes so much longer; a second one, half way (in factors) to what lies beyond it.
_FIRST_ENDS, _BEYOND = 1.25, 1.5

# A kernel and the bytes that it goes through (0: always the same).
Asked = tuple[str, int]


def probe_core(session: BoardSession, kind: CoreType, target: Mapping[str, Any], cores: int) -> CoreFigures:
    """Run the kernels on a board that somebody holds, at the clocks that it has, for `TIME_LIMIT_S` at most.

    `target` is TVM's dict form, `cores` the threads of what they share. Raises PermanentError where a kernel fails,
    and what building and the session raise.
    """
    core = core_of(target, 1)
    kernels = core_kernels.list_kernels(core, cores)
    sources = {name: kernel.source for name, kernel in kernels.items()}
    libraries = compile_in_subprocess(functools.partial(core_kernels.build, sources, dict(target)), "core kernels")

    def run(asked: Asked) -> float:
        name, size_bytes = asked
        return _run(session, name, kernels[name], libraries[name], size_bytes)

    agreed = settle(run, list_asked(core, kernels))
    return work_out(kind, agreed, {asked: kernels[asked[0]].count(asked[1]) for asked in agreed}, cores)


def list_asked(core: Core, kernels: Mapping[str, core_kernels.CoreKernel]) -> list[Asked]:
    """Every kernel with the sizes that it is asked about."""
    asked: list[Asked] = [(name, 0) for name in ("clock", "latency", "products")]
    asked += [("chase", size) for size in _SIZES]
    asked += [("reads", core.l1_bytes // 2), *(("reads", size) for size in _SIZES if size > core.l1_bytes)]
    if "regions" in kernels:
        asked += [("regions", 0), ("shared reads", _SIZES[-1])]
    return asked


def settle(
    run: Callable[[Asked], float], asked: Sequence[Asked], monotonic: Callable[[], float] = time.monotonic
) -> dict[Asked, tuple[float, float] | None]:
    """Ask in turns until the least times agree, or the time is over; seconds of a call: the least, and its fellow's.

    None for what was not agreed on. Each gets as much of the time: beside other programs a kernel of all threads takes
    seconds where others take tenths, and those would have had four turns.
    """
    deadline = monotonic() + TIME_LIMIT_S
    seen: dict[Asked, list[float]] = {each: [] for each in asked}
    spent_s = dict.fromkeys(asked, 0.0)
    open_ = list(asked)
    while open_:
        each, began = min(open_, key=spent_s.__getitem__), monotonic()
        seen[each] = sorted([*seen[each], run(each)])
        now = monotonic()
        spent_s[each] += now - began
        open_ = [one for one in open_ if not _agrees(seen[one]) and (now < deadline or len(seen[one]) < _AGREEING)]
    return {each: (times[0], times[_AGREEING - 1]) if _agrees(times) else None for each, times in seen.items()}


def _agrees(times: Sequence[float]) -> bool:
    return len(times) >= _AGREEING and times[_AGREEING - 1] <= times[0] * (1 + _AGREE)


def work_out(
    kind: CoreType, agreed: Mapping[Asked, tuple[float, float] | None], counts: Mapping[Asked, float], cores: int
) -> CoreFigures:
    """Figures from seconds of calls and what a call takes of each. Raises PermanentError where the clock is unknown."""
    if (clock := agreed["clock", 0]) is None:
        raise PermanentError("its clock does not hold still", "Something else runs on the board, or it throttles.")
    hz = counts["clock", 0] / clock[0]

    def cycles(asked: Asked) -> CoreFigure | None:
        """Of one of what is asked for."""
        seconds = agreed.get(asked)
        if seconds is None:
            return None
        least, fellow = (each * hz / counts[asked] for each in seconds)
        return CoreFigure(least, least, fellow)

    vector_bytes, wide = kind.vector_bits / 8, max(1.0, kind.vector_bits / kind.datapath_bits)
    chase = {size: steps.value for size in _SIZES if (steps := cycles(("chase", size))) is not None}
    l1_bytes, l2_bytes = find_caches(chase)
    # Well inside the second cache, and well outside the first.
    inside = max((size for size in _SIZES if size <= (l2_bytes or kind.l2_bytes) / 2), default=0)
    shared = None if kind.l3_bytes else cycles(("shared reads", _SIZES[-1]))  # a third cache may hold it all
    found = {
        "fma_latency": cycles(("latency", 0)),
        "fma_pipes": _invert(cycles(("products", 0)), wide),
        "load_pipes": _invert(cycles(("reads", kind.l1_bytes // 2)), wide / vector_bytes),
        "l1_bytes": _size(l1_bytes),
        "l2_bytes": _size(l2_bytes),
        "l2_bytes_per_cycle": _invert(cycles(("reads", inside)), 1.0),
        "far_bytes_per_cycle": _invert(cycles(("reads", _SIZES[-1])), 1.0) if l2_bytes else None,
        "memory_bytes_per_s": _invert(shared, hz * cores),
        "region_s": _scale(cycles(("regions", 0)), 1 / hz),
    }
    told = {name: each for name, each in found.items() if each is not None and not find_impossible(name, each.value)}
    return CoreFigures(kind.name, hz, told, tuple(name for name in MEASURED if name not in told))


def find_caches(chase: Mapping[int, float]) -> tuple[int | None, int | None]:
    """Sizes of the first and the second cache from cycles of a load by size, None where no end of it is seen."""
    sizes = sorted(chase)
    if not sizes:
        return None, None
    first = [size for size in sizes if chase[size] <= chase[sizes[0]] * _FIRST_ENDS]
    # Sizes in between are partly in the first one.
    outside = [size for size in sizes if size >= 2 * first[-1]]
    if not outside:
        return None, None
    near, last = chase[outside[0]], chase[outside[-1]]
    if last < near * _BEYOND:
        return first[-1], None
    return first[-1], max(size for size in outside if chase[size] <= math.sqrt(near * last))


def _run(session: BoardSession, name: str, kernel: core_kernels.CoreKernel, library: bytes, size_bytes: int) -> float:
    """Seconds of the least of some calls. Raises PermanentError."""
    limits = Limits(
        timeout_s=RUN_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, threads=kernel.threads
    )
    spec = RunSpec(
        Engine.KERNEL, entry=core_kernels.ENTRY, runs=_RUNS, warmup=_WARMUP, return_outputs=False, limits=limits
    )
    outcome, _ = session.run_model(spec, library, kernel.make_inputs(size_bytes))
    if outcome.status is not Status.OK:
        raise PermanentError(f"the kernel that asks a core for its {name} failed: {outcome.status} {outcome.message}")
    return min(outcome.latency_s)


def _scale(found: CoreFigure | None, factor: float) -> CoreFigure | None:
    return found and CoreFigure(found.value * factor, found.low * factor, found.high * factor)


def _invert(found: CoreFigure | None, factor: float) -> CoreFigure | None:
    return found and CoreFigure(factor / found.value, factor / found.high, factor / found.low)


def _size(size_bytes: int | None) -> CoreFigure | None:
    """A size that is known to the next one above it that was asked about."""
    if size_bytes is None:
        return None
    return CoreFigure(size_bytes, size_bytes, next((each for each in _SIZES if each > size_bytes), size_bytes))
