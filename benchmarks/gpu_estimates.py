"""Hold estimates of GPU kernels, made from their machine code, against latencies measured on boards.

The kernels are AutoTVM's best schedules (`_autotvm.py`), built with NVRTC and ptxas. `--fit` fits three constants to
every fourth direct convolution of the TX2; the others judge them. A best schedule should also be estimated faster than
its neighbours, in which one factor of a tile moves. No GPU takes part. Default budget: 5 minutes, 10 with `--fit`.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _autotvm
import _machine
import numpy as np
from _autotvm import read_records

from device_agent.protocol import find_processor
from farm.errors import CodeRefusedError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.search.tuners.warm_start import spearman
from farm.virtual import gpu_time

SOURCE = "TopHub (tlc-pack/tophub), cuda_v0.10.log"
FITTED = "jetson-tx2 direct"
CARD = "gtx-1080-ti"
_CARD_ARCH = "sm_61"
# NVIDIA's data sheet; the clock is assumed: near the highest of such cards.
_CARD = gpu_time.Gpu(28, freq_hz=1.85e9, memory_bytes_per_s=484e9, l2_bytes=2816 << 10)
_EVERY = 4
_CONSTANTS = {"port_bytes": (8.0, 16.0, 32.0), "pair_slots": (1, 2), "vector_turns": (0.5, 1.0)}
_LIMITS = code.PtxLimits(registers=65536, shared_bytes=49152, threads=1024)
# Workloads whose neighbours are tried: FLOPs, how many, and neighbours of each.
_NEIGHBOUR_FLOPS, _WORKLOADS, _NEIGHBOURS = (3e7, 3e8), 12, 6


@dataclasses.dataclass(frozen=True)
class Built:
    """A record's kernel, or a neighbour's, with its machine code."""

    record: _autotvm.Record
    kernel: _autotvm.Kernel
    cubin: bytes

    def estimate(self, driver: ctypes.CDLL, **constants: float) -> float:
        """Estimate its seconds on the record's board."""
        device = dataclasses.replace(find_gpu(self.record.board)[1], **constants)
        launch = _autotvm.KERNEL, self.kernel.grid, self.kernel.block, self.record.sizes
        return gpu_time.estimate(driver, self.cubin, *launch, device)


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, instead of the model's own")
    options = parser.parse_args()
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        emit("gpu_estimates", vars(options), measure(options, open_driver(Path(folder))))


def open_driver(folder: Path) -> ctypes.CDLL:
    """Build the stand-in driver, which estimates, and load it."""
    return gpu_time.open_driver(str(code.build_driver(folder, None)))


def find_gpu(board: str) -> tuple[str, gpu_time.Gpu]:
    """A board's architecture, and its GPU at the highest clock."""
    if board == CARD:
        return _CARD_ARCH, _CARD
    gpu = load_board_types()[board].gpu
    assert gpu is not None
    assert gpu.processors is not None
    assert gpu.memory_bytes_per_s is not None
    cache = find_processor(gpu.arch).cache_bytes
    return gpu.arch, gpu_time.Gpu(gpu.processors, float(max(gpu.freqs_hz)), float(gpu.memory_bytes_per_s), cache)


def build(record: _autotvm.Record) -> Built:
    """Build a record's kernel. Raises CodeRefusedError where the GPU cannot take it."""
    kernel, arch = _autotvm.make_kernel(record), find_gpu(record.board)[0]
    cubin, _ = code.assemble(code.compile_ptx(kernel.source, arch), arch, _LIMITS)
    return Built(record, kernel, cubin)


def split(records: Sequence[_autotvm.Record]) -> tuple[list[_autotvm.Record], list[_autotvm.Record]]:
    """The kernels that constants are fitted to, and those of their kind that are held out."""
    direct = [each for each in records if each.group == FITTED]
    return direct[::_EVERY], [each for at, each in enumerate(direct) if at % _EVERY]


def build_all(records: Sequence[_autotvm.Record]) -> list[Built]:
    return [build(each) for each in records]


def measure(options: argparse.Namespace, driver: ctypes.CDLL) -> dict[str, Any]:
    records = read_records()[:: 20 if options.quick else 1]
    fitted, held_out = split(records)
    groups = {f"{FITTED}, held out": held_out, f"{FITTED}, fitted on": fitted}
    for record in records:
        if record.group != FITTED:
            groups.setdefault(record.group, []).append(record)
    constants = fit(build_all(fitted), driver) if options.fit else {}
    rows = []
    for name, some in groups.items():
        _machine.say(f"estimating {name}")
        rows.append({"group": name} | judge(build_all(some), driver, **constants))
    _machine.say("estimating neighbours")
    workloads = choose_workloads(records)[: 1 if options.quick else None]
    ratios = [ratio for each in workloads for ratio in compare(each, driver, **constants)]
    return {
        "measured": SOURCE,
        "constants": constants or "the model's own",
        "held_out": {key: rows[0][key] for key in ("kernels", "median_error", "worst_error", "rank_of_shares")},
        "rows": rows,
        "neighbours": {
            "workloads": len(workloads),
            "tried": len(ratios),
            "below_the_best": sum(ratio < 1 for ratio in ratios),
            "lowest": _machine.round_to(min(ratios, default=math.nan), 3),
            "median": _machine.round_to(statistics.median(ratios), 3) if ratios else None,
        },
    }


def fit(kernels: Sequence[Built], driver: ctypes.CDLL) -> dict[str, float]:
    """The constants with the least spread of estimates over measurements."""
    best: tuple[float, dict[str, float]] = math.inf, {}
    for values in itertools.product(*_CONSTANTS.values()):
        constants = dict(zip(_CONSTANTS, values, strict=True))
        ratios = [each.estimate(driver, **constants) / each.record.seconds for each in kernels]
        error = statistics.mean(_errors(ratios))
        _machine.say(f"{constants}: mean error {error:.3f}")
        best = min(best, (error, constants), key=lambda one: one[0])
    return best[1]


def judge(kernels: Sequence[Built], driver: ctypes.CDLL, **constants: float) -> dict[str, Any]:
    """Ranks, and errors without the common factor. Shares are FLOPs per second: what a schedule makes of the GPU."""
    estimates = np.array([each.estimate(driver, **constants) for each in kernels])
    measured = np.array([each.record.seconds for each in kernels])
    flops = np.array([each.record.flops for each in kernels])
    ratios = list(estimates / measured)
    errors = _errors(ratios)
    figures = {
        "rank": spearman(measured, estimates),
        "rank_of_shares": spearman(flops / measured, flops / estimates),
        "factor": statistics.median(ratios),
        "median_error": statistics.median(errors),
        "error_of_90_percent": float(np.quantile(errors, 0.9)),
        "worst_error": max(errors),
        "median_error_with_the_factor": statistics.median(max(each, 1 / each) - 1 for each in ratios),
    }
    return {"kernels": len(kernels)} | {name: _machine.round_to(value, 3) for name, value in figures.items()}


def _errors(ratios: Sequence[float]) -> list[float]:
    """By how much ratios differ from their median, upwards or downwards."""
    factor = statistics.median(ratios)
    return [max(each / factor, factor / each) - 1 for each in ratios]


def choose_workloads(records: Sequence[_autotvm.Record]) -> list[_autotvm.Record]:
    """Some direct convolutions of middle size, the same ones each time."""
    least, most = _NEIGHBOUR_FLOPS
    some = [each for each in records if each.group == FITTED and least < each.flops < most]
    return random.Random(0).sample(some, min(_WORKLOADS, len(some)))


def compare(record: _autotvm.Record, driver: ctypes.CDLL, most: int = _NEIGHBOURS, **constants: float) -> list[float]:
    """Estimates of neighbours of a best schedule over its own."""
    best = build(record).estimate(driver, **constants)
    found: list[float] = []
    for neighbour in move_factors(record):
        try:
            found.append(build(neighbour).estimate(driver, **constants) / best)
        except CodeRefusedError:
            continue
        if len(found) == most:
            break
    return found


def move_factors(record: _autotvm.Record) -> list[_autotvm.Record]:
    """Schedules of the same workload with one prime factor at another place of its tile, in random order."""
    found = []
    for name, tile in record.knobs.items():
        for source, target in itertools.permutations(range(len(tile)), 2):
            if prime := next((each for each in (2, 3, 5, 7) if tile[source] % each == 0), None):
                moved = list(tile)
                moved[source] //= prime
                moved[target] *= prime
                found.append(dataclasses.replace(record, knobs={**record.knobs, name: tuple(moved)}))
    random.Random(0).shuffle(found)
    return [each for each in found if _is_allowed(_autotvm.make_kernel(each).block)]


def _is_allowed(block: Sequence[int]) -> bool:
    """A block has a warp at least; CUDA limits its threads, and its layers to 64."""
    return 32 <= math.prod(block) <= _LIMITS.threads and block[2] <= 64


if __name__ == "__main__":
    main()
