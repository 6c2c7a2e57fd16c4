"""Schedules of GPU families over the workloads of whole models: do TVM, NVRTC and ptxas take them, what do they take
of the GPU, and how much slower than the best is the one that is predicted best?

For each workload so many of the best plans by prediction, then as many drawn from the next 200; TVM's defaults where no
family serves it. Times are estimates of a virtual board. No GPU takes part. Default budget: half an hour a model.
"""

from __future__ import annotations

import collections
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import _machine
import gpu_models
import numpy as np
import onnx

from device_agent.protocol import GPU, Engine, RunSpec
from device_agent.worker import engines
from farm.errors import CodeRefusedError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.zoo import ZOO
from farm.search import gpus, traces, tvm_env
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.workloads import Workload, prepare_model
from farm.virtual import gpu_time

MODELS = ("squeezenet1.1", "resnet18", "mobilenet_v2")
BOARDS = ("jetson-nano", "jetson-tx2")
PLANS, DRAWN, NEXT = 20, 10, 200
# Workloads of fewer FLOP are mostly launches.
LARGE = 20e6
# By the words that an error of code begins with (`farm/gpu`).
REFUSALS = {"the CUDA compiler": "refused by NVRTC", "ptxas": "refused by ptxas", "the kernel": "over a limit"}
TVM_REFUSED = "refused by TVM"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--model", action="append", choices=sorted(ZOO), help="a model; repeatable")
    parser.add_argument("--board", default=BOARDS[0], choices=BOARDS, help="a board type")
    parser.add_argument("--plans", type=int, default=PLANS, help="of each workload")
    parser.add_argument("--drawn", type=int, default=DRAWN, help="more of each, drawn from the next 200")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for a model: later ranks are left out")
    options = parser.parse_args()
    models, plans, drawn = options.model or MODELS, options.plans, options.drawn
    if options.quick:
        models, plans, drawn = ("tiny-cnn",), 2, 0
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        clock = Clock(options.board, Path(folder))
        figures = {name: try_model(name, options.board, plans, drawn, options.limit_s, clock=clock) for name in models}
        emit("gpu_schedules", {**vars(options), "models": models}, {"models": figures, **sum_up(figures.values())})


def try_model(
    name: str,
    board: str,
    plans: int,
    drawn: int = 0,
    limit_s: float = math.inf,
    every: int = 1,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """What became of the plans of each of its workloads, or of every so manyth: of all the best first, then of all the
    next best. Without a clock nothing is estimated.
    """
    tvm = tvm_env.load_compiler()
    entry, kind = ZOO[name], load_board_types()[board]
    assert kind.target is not None
    host = tvm_env.host_target(1) if clock else kind.target.to_tvm()
    config = gpus.to_config(board, code.plan_gpu(kind), host, simulated=clock is not None)
    model = onnx.load_model_from_string(entry.build())
    prepared = prepare_model(model, entry.input_shapes, config, gpus.PIPELINE)
    _machine.say(f"{name} for {board}: {len(prepared.workloads)} workloads")
    begun, deadline = time.process_time(), time.monotonic() + limit_s
    offered = []
    for workload in prepared.workloads[::every]:
        module = tvm.ir.load_json(workload.module_json)
        outlook = rule.read_outlook(module, gpus.unit_of(config))
        ranked = outlook.plans() if outlook else [(None, None)]
        later = ranked[plans : plans + NEXT]
        more = random.Random(workload.name).sample(later, min(drawn, len(later)))
        offered.append((workload, module, outlook, ranked[:plans] + more))
    tally, first, rank = Tally(config, clock), collections.Counter[str](), 0
    while rank < plans + drawn and (rank == 0 or time.monotonic() < deadline):
        for workload, module, outlook, ranked in offered:
            if rank < len(ranked):
                end = tally.try_plan(workload, module, outlook, *ranked[rank])
                first[end] += rank == 0
        rank += 1
    built = tally.ends.total() - tally.ends[TVM_REFUSED]
    return {
        "workloads": len(offered),
        "plans of each": rank,
        "first plans": dict(+first),
        "plans": dict(tally.ends),
        "by family": {family: dict(ends) for family, ends in tally.by_family.items()},
        "reasons": dict(tally.reasons.most_common(12)),
        "processor seconds per candidate": round((time.process_time() - begun) / max(1, built), 3),
        "most registers": max((usage.registers for usage in tally.usages), default=0),
        "candidates that spill": tally.spilling,
        "error of predictions": _machine.round_to(statistics.median(tally.errors), 2) if tally.errors else None,
        "estimates": tally.compare(),
    }


def sum_up(figures: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The first plan over the best one tried, of all workloads; shares of the peak of large ones."""
    rows = [row for each in figures for row in each["estimates"]]
    over = [row["first_over_best"] for row in rows]
    shares = [row["share_of_peak"] for row in rows if row["flop"] >= LARGE and "conv" in row["workload"]]
    return {
        "first_over_best": {"n": len(over), "median": statistics.median(over), "worst": max(over)} if over else {},
        "share_of_peak": {"n": len(shares), "median": statistics.median(shares), "worst": min(shares)}
        if shares
        else {},
    }


class Clock:
    """Estimates of candidates by a virtual board in this process."""

    def __init__(self, board: str, folder: Path) -> None:
        code.prepare(folder)
        gpu_models.use_gpu(board, folder)
        os.environ[gpu_time.VARIABLE] += ";run=estimate"
        self._facts, self._hz = gpu_models.describe(board)
        self._folder, self._count = folder, 0
        self.peak = gpu_models.count_peak(board)

    def estimate(self, workload: Workload, library: bytes) -> float:
        """Seconds of a candidate."""
        self._count += 1
        program = self._folder / f"candidate{self._count}.so"  # a loaded library's name must not come again
        program.write_bytes(library)
        arrays = {str(at): np.zeros(shape, dtype) for at, (shape, dtype) in enumerate(workload.arguments)}
        gpu_time.take_launches()
        run, _ = engines.load_program(RunSpec(Engine.KERNEL, device=GPU), program, arrays)
        program.unlink()
        run()
        kernels = gpu_time.sum_up(gpu_time.take_launches(), 1)
        return gpu_time.compute_seconds(kernels, self._facts, self._hz, 1.0)[0]


class Tally:
    """What became of plans for a GPU's target, and why."""

    def __init__(self, config: Mapping[str, Any], clock: Clock | None) -> None:
        self._config, self._target, self._clock = config, tvm_env.make_target(config), clock
        self.ends = collections.Counter[str]()
        self.by_family = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self.reasons = collections.Counter[str]()
        self.usages: list[Any] = []
        self.spilling = 0
        self._seconds = collections.defaultdict[str, list[float]](list)
        self.errors: list[float] = []
        self._workloads: dict[str, Workload] = {}

    def try_plan(self, workload: Workload, module: Any, outlook: rule.Outlook | None, predicted: Any, plan: Any) -> str:
        """Schedule a function and make its code; without an outlook as TVM's defaults have it."""
        family = outlook.family.name if outlook else "TVM's defaults"
        try:
            usages, library = self._make(module, outlook, plan)
            end = "taken"
            self.usages += usages
            self.spilling += any(usage.spilled_bytes for usage in usages)
            if self._clock is not None and outlook is not None:
                self._workloads[workload.name] = workload
                seconds = self._clock.estimate(workload, library())
                self._seconds[workload.name].append(seconds)
                self.errors.append(abs(predicted.seconds / seconds - 1))
        except CodeRefusedError as error:
            end = next(said for words, said in REFUSALS.items() if error.message.startswith(words))
            self._note(family, workload.name, plan, error.message)
        except (RuntimeError, ValueError, TypeError) as error:
            end = TVM_REFUSED
            self._note(family, workload.name, plan, str(error))
        self.ends[end] += 1
        self.by_family[family][end] += 1
        return end

    def compare(self) -> list[dict[str, Any]]:
        """The first plan of each workload, in seconds, beside the best."""
        return [
            {
                "workload": name,
                "flop": self._workloads[name].flop,
                "first_ms": _machine.round_to(1e3 * seconds[0]),
                "first_over_best": _machine.round_to(seconds[0] / min(seconds), 3),
                "share_of_peak": _machine.round_to(self._workloads[name].flop / self._clock.peak / seconds[0], 3),
            }
            for name, seconds in self._seconds.items()
            if self._clock is not None and seconds
        ]

    def _make(self, module: Any, outlook: rule.Outlook | None, plan: Any) -> tuple[list[Any], Callable[[], bytes]]:
        tvm = tvm_env.load_compiler()
        if outlook is None:
            scheduled = lowering.bind_rest(module, self._target)
        else:
            schedule = tvm.s_tir.Schedule(module, error_render_level="none")
            outlook.apply(schedule, plan)
            traces.finish(schedule, traces.make_context(module, self._target))
            scheduled = schedule.mod
        with lowering.making(self._config) as made:
            built = tvm.tirx.build(scheduled, tvm_env.make_code_target(self._config), lowering.use_pipeline())
        return [usage for each in made for usage in each.usages], lambda: lowering.link_candidate(built)

    def _note(self, family: str, workload: str, plan: Any, text: str) -> None:
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        _machine.say(f"{family} {workload} {plan}: {lines[-1][:300] if lines else ''}")
        self.reasons[f"{family}: {lines[-1][:160] if lines else 'no word'}"] += 1


if __name__ == "__main__":
    main()
