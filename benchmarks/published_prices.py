"""ncnn's own library, priced by our model of each core, beside the latencies that ncnn publishes of boards with it.

The same program on both sides (its aarch64 wheel, under QEMU with a recorder of blocks and caches), so the difference
is the model's; that versions and compilers differ is in it, too. Several threads are taken to share the work evenly.
Default budget: about 25 minutes, most of it emulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _emulated
import _farm
import _machine
import _recorded
import numpy as np

from device_agent.protocol import Engine
from farm.artifacts import bench
from farm.models import zoo
from farm.models.inputs import make_inputs
from farm.models.zoo import ZOO
from farm.virtual.emulated.pipeline import load_core

MODELS = ("squeezenet1.1", "mobilenet_v2", "resnet18", "resnet50")
SOURCE = "Tencent/ncnn, benchmark/README.md (2026-10), rows of the processor, `min`"
# As ncnn measures them, where the zoo's differ.
DIFFERENT: Mapping[str, dict[str, Any]] = {
    "squeezenet1.1": {"input_shapes": {"data": (1, 3, 227, 227)}},
    "resnet50": {"network": functools.partial(zoo.resnet50, shrinks_first=True)},
}
# QEMU's names of processors, by what they can: the first three have no half precision, which ncnn uses where it is.
PROCESSORS = {"cortex-a57": ("cortex-a57", "cortex-a72", "cortex-a53"), "cortex-a76": ("cortex-a76", "cortex-a78ae")}


@dataclasses.dataclass(frozen=True)
class Board:
    """A published board. `bytes_per_s` is what its memory is taken to reach, where that is not the core type's."""

    title: str
    core: str
    hz: float
    ms: Mapping[int, tuple[float, ...]]  # by threads, of MODELS
    bytes_per_s: float | None = None


# Those with one kind of core in use, and clocks that are named.
BOARDS = (
    Board("Jetson Nano", "cortex-a57", 1.43e9, {1: (85.91, 93.81, 221.27, 624.43), 4: (30.03, 33.49, 83.10, 203.42)}),
    Board("Snapdragon 810", "cortex-a57", 2.0e9, {1: (70.83, 77.85, 182.58, 502.77)}),
    Board("RK3399, A72", "cortex-a72", 1.8e9, {1: (71.35, 78.18, 175.71, 503.25), 2: (43.73, 51.30, 111.77, 291.51)}),
    Board("Raspberry Pi 4", "cortex-a72", 1.8e9, {1: (73.35, 92.98, 190.80, 533.15), 4: (46.28, 61.63, 122.27, 261.9)}),
    Board("RK3399, A53", "cortex-a53", 1.5e9, {1: (129.63, 143.02, 351.64, 975.4), 4: (48.11, 53.6, 116.68, 297.23)}),
    Board(
        "Snapdragon 410", "cortex-a53", 1.2e9, {1: (147.48, 168.04, 396.46, 1136.96), 4: (65.45, 77.98, 137.91, 380.46)}
    ),
    Board("Raspberry Pi 5", "cortex-a76", 2.4e9, {1: (11.77, 16.21, 29.54, 89.04), 4: (6.74, 10.46, 19.84, 45.94)}),
    Board("Jetson Orin Nano", "cortex-a78ae", 1.5e9, {1: (15.94, 19.32, 48.49, 138.19), 6: (5.07, 5.86, 12.26, 38.69)}),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model on a board with so many threads: published, and what a price is made of."""

    board: Board
    threads: int
    model: str
    published_ms: float
    layers: int
    stretches: list[tuple[float, int, int]]

    def price_ms(self, core: Mapping[str, Any]) -> float:
        """One layer begins after the other, each with its threads."""
        memory = self.board.bytes_per_s or core["memory_bytes_per_s"]
        seconds = _recorded.price(self.stretches, core, self.board.hz, self.threads, memory)
        regions = self.layers if self.threads > 1 else 0
        return (seconds + regions * core["region_cycles"] / self.board.hz) * 1e3


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of these (default): {', '.join(MODELS)}")
    parser.add_argument("--fit", action="store_true", help="also find the two constants that fit each core best")
    options = parser.parse_args()
    if options.quick:
        options.models = MODELS[0]
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("published_prices", vars(options), measure(options, folder))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    cores = {name: core for names in PROCESSORS.values() for name in names if (core := load_core(name)) is not None}
    runs = [run for name in options.models.split(",") for run in record(name, cores, folder)]
    rows = []
    for run in runs:
        price_ms = run.price_ms(cores[run.board.core])
        rows.append(
            {
                "board": run.board.title,
                "core": run.board.core,
                "threads": run.threads,
                "model": run.model,
                "published_ms": run.published_ms,
                "price_ms": _machine.round_to(price_ms),
                "price_over_published": _machine.round_to(price_ms / run.published_ms, 3),
            }
        )
    errors = [abs(row["price_over_published"] - 1) for row in rows]
    prices, published = ([row[key] for row in rows] for key in ("price_ms", "published_ms"))
    return {
        "published": SOURCE,
        "rows": rows,
        "median_error": _machine.round_to(statistics.median(errors), 3),
        "worst_error": _machine.round_to(max(errors), 3),
        "rank_correlation": _machine.round_to(correlate(prices, published), 4),
        "constants": {name: [core["wait_cycles"], core["crowding"]] for name, core in cores.items()},
        "best_constants": {name: fit(runs, core) for name, core in cores.items()} if options.fit else None,
    }


def record(name: str, cores: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Run]:
    """A model on all boards."""
    path = folder / f"{name}.onnx"
    path.write_bytes(dataclasses.replace(ZOO[name], **DIFFERENT.get(name, {})).build())
    model = _farm.read_model(str(path))
    network = folder / f"{name}.zip"
    shapes = [spec.static_shape for spec in model.inputs]
    network.write_bytes(bench.convert(Engine.NCNN, model.source.onnx_bytes, shapes))
    with zipfile.ZipFile(network) as archive:
        layers = int(archive.read("model.ncnn.param").split()[1])
    inputs = folder / f"{name}.npz"
    np.savez(inputs, **make_inputs(model.inputs, 0))
    runs = []
    for processor, names in PROCESSORS.items():
        job = _emulated.Job("ncnn half", (network,), inputs)
        caches = [cores[each]["caches"] for each in names]
        recording = _recorded.record(job, _emulated.require_wheels(), caches, processor)
        _machine.say(f"{name} on {processor}: {recording.instructions / 1e6:.0f} million instructions")
        for pair, core in enumerate(names):
            stretches = recording.summarise(pair, cores[core])
            for board in BOARDS:
                if board.core == core:
                    at = MODELS.index(name)
                    runs += [Run(board, n, name, ms[at], layers, stretches) for n, ms in board.ms.items()]
    return runs


def fit(runs: list[Run], core: Mapping[str, Any]) -> list[float]:
    """Fit `wait_cycles` to runs on one thread, then `crowding` to the others: least squares of logarithms."""

    def make(run: Run) -> Callable[[float, float], float]:
        def find_ratio(wait_cycles: float, crowding: float) -> float:
            tried = {**core, "wait_cycles": wait_cycles, "crowding": crowding}
            return run.price_ms(tried) / run.published_ms

        return find_ratio

    own = [run for run in runs if run.board.core == core["name"]]
    alone, beside = ([make(run) for run in own if (run.threads == 1) is single] for single in (True, False))
    wait_cycles = min(np.arange(0.5, 60, 0.5), key=lambda tried: sum_squares(alone, tried, 0.0))
    crowding = min(np.arange(0, 4, 0.05), key=lambda tried: sum_squares(beside, wait_cycles, tried))
    return [float(wait_cycles), round(float(crowding), 3)]


def sum_squares(ratios: Sequence[Callable[[float, float], float]], wait_cycles: float, crowding: float) -> float:
    return sum(math.log(ratio(wait_cycles, crowding)) ** 2 for ratio in ratios)


def correlate(left: list[float], right: list[float]) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
