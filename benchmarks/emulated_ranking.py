"""Candidates as an emulated Cortex-A57 prices them: what one costs the host, how alike price and prediction rank them.

Fifty schedules of each of six workloads, drawn from all that their families offer, compiled for a Jetson Nano as trials
are, and run by the emulator as a trial's candidate is, on four cores. Told of each workload: the rank correlation of
prices with the family's predictions (Spearman's), how far the best predicted is from the best of all, and how long
building and emulating took, one candidate at a time on one host core.
Default budget: about 4 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from pathlib import Path
from typing import Any

import _farm
import _machine

from device_agent.board_types import load_board_types
from device_agent.protocol import Limits, MeasureSpec, TensorSpec, count_seconds
from farm import emulation, settings
from farm.inventory.board_types import require_board_type
from farm.search import gpus, tvm_env
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.tuners.decisions import Candidate as SearchCandidate
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.search.tuners.warm_start import spearman
from farm.values import Workload
from farm.virtual.emulated.runs import Candidate, Emulator
from farm.virtual.rig import VirtualRig

BOARD_TYPE, THREADS = "jetson-nano", 4
# By model; one of each kind: matrix products with many pixels and with few, a depthwise convolution, a dense one, a
# model's first, one by Winograd's algorithm.
WORKLOADS = {
    "mobilenet_v2": (
        "conv2d_add_clip 1x1 14x14x64>384",
        "conv2d_add 1x1 28x28x144>32",
        "depthwise_conv2d_add_clip 3x3 14x14x384>384",
    ),
    "squeezenet1.1": (
        "transpose_conv2d_add_relu 3x3/2 3x224x224>64",
        "winograd4_conv2d_add_relu 3x3 13x13x48>192",
        "conv2d_add_relu 1x1 55x55x16>64",
    ),
}


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--candidates", type=int, default=50, help="of each workload (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which candidates are drawn (default: 0)")
    options = parser.parse_args()
    if options.quick:
        options.candidates = 3
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("emulated_ranking", vars(options), measure(options, folder))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tvm_env.load()
    loaded = settings.load()
    natives = emulation.prepare(dataclasses.replace(loaded, home=str(folder)))
    kind = require_board_type(BOARD_TYPE)
    assert natives is not None
    assert kind.target is not None
    rows = []
    with VirtualRig() as rig:
        emulator = rig.start_emulator(natives, load_board_types()[BOARD_TYPE].clusters)
        assert emulator is not None
        emulator = dataclasses.replace(emulator, tasks=THREADS)
        for name, wanted in list(WORKLOADS.items())[: 1 if options.quick else None]:
            found = {each.name: each for each in _farm.read_model(name).prepare(kind.target.to_tvm(), kind.pipeline)}
            for workload in wanted[: 1 if options.quick else None]:
                prices = Prices(found[workload], emulator, float(kind.clusters[0].freqs_hz[-1]))
                rows.append(rank(prices, options))
                _machine.say(str(rows[-1]))
    costs = [row["build_s"]["median"] + row["emulate_s"]["median"] for row in rows]
    return {
        "correlation_is": "Spearman's, of prices with predictions of the same candidates",
        "workloads": rows,
        "build_and_emulate_s": _machine.round_to(statistics.median(costs), 3),
    }


class Prices:
    """What a workload's candidates take on the emulated board, by hash, and what asking cost."""

    def __init__(self, workload: Workload, emulator: Emulator, hz: float) -> None:
        self.workload = workload
        self.known: dict[str, float] = {}
        self.build_s: list[float] = []
        self.emulate_s: list[float] = []
        self._emulator, self._hz = emulator, hz

    def fetch(self, candidate: SearchCandidate) -> float:
        """Seconds; builds and runs it where it is new."""
        if candidate.hash in self.known:
            return self.known[candidate.hash]
        began = time.perf_counter()
        library = lowering.build_candidate(candidate.module_json, self.workload.target)
        built = time.perf_counter()
        arguments = tuple(TensorSpec(shape, dtype) for shape, dtype in candidate.arguments)
        spec = MeasureSpec(arguments, cold_weights=True, limits=Limits(memory_bytes=2 << 30, threads=THREADS))
        program = Candidate(self._emulator, spec, library)
        program.run(1)
        self.emulate_s.append(time.perf_counter() - built)
        self.build_s.append(built - began)
        seconds = count_seconds(program.segments, self._emulator.core, self._hz, THREADS)[0]
        self.known[candidate.hash] = seconds
        return seconds


def rank(asked: Prices, options: argparse.Namespace) -> dict[str, Any]:
    """Price the workload's candidates."""
    tvm, workload = tvm_env.load(), asked.workload
    space = ScheduleSpace(workload)
    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), gpus.unit_of(workload.target))
    assert outlook is not None
    plans = outlook.plans()
    order = list(enumerate(space.ranked))
    best, rest = order[0], order[1:]
    random.Random(options.seed).shuffle(rest)
    predicted: list[float] = []
    prices: list[float] = []
    seen = set()
    for place, genome in [best, *rest]:
        if len(prices) == options.candidates:
            break
        (evaluated,) = space.evaluate([(genome, 0)])
        if evaluated is None or evaluated.hash in seen:
            continue
        seen.add(evaluated.hash)
        prices.append(asked.fetch(space.describe(evaluated)))
        predicted.append(plans[place][0].seconds)
    return {
        "name": workload.name,
        "plans": len(order),
        "candidates": len(prices),
        "correlation_with_prediction": _machine.round_to(spearman(predicted, prices), 3),
        "best_predicted_over_best": _machine.round_to(prices[0] / min(prices), 3),
        "price_over_prediction": _machine.spread([a / b for a, b in zip(prices, predicted, strict=True)]),
        "price_us": _machine.spread([one * 1e6 for one in prices]),
        "build_s": _machine.spread(asked.build_s),
        "emulate_s": _machine.spread(asked.emulate_s),
    }


if __name__ == "__main__":
    main()
