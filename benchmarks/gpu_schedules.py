"""Schedules of GPU families over the workloads of whole models: do TVM, NVRTC and ptxas take them, and what do they
take of the GPU?

For each workload so many of the best plans by prediction, for Nano (sm_53) and TX2 (sm_62); TVM's defaults where no
family serves it. No GPU takes part. Default budget: half an hour; `--model` and `--board` do a part of it.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping
from typing import Any

import _machine
import onnx

from farm.errors import CodeRefusedError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.zoo import ZOO
from farm.search import gpus, target, traces, tvm_env
from farm.search.build import lowering
from farm.search.families import rule
from farm.search.workloads import prepare_model

MODELS = ("squeezenet1.1", "resnet18", "mobilenet_v2")
BOARDS = ("jetson-nano", "jetson-tx2")
PLANS = 20
# By the words that an error of code begins with (`farm/gpu`).
REFUSALS = {"the CUDA compiler": "refused by NVRTC", "ptxas": "refused by ptxas", "the kernel": "over a limit"}
TVM_REFUSED = "refused by TVM"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--model", action="append", choices=sorted(ZOO), help="a model; repeatable")
    parser.add_argument("--board", action="append", choices=BOARDS, help="a board type; repeatable")
    parser.add_argument("--plans", type=int, default=PLANS, help="of each workload")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for a model and board: later ranks are left out")
    options = parser.parse_args()
    models, boards, plans = options.model or MODELS, options.board or BOARDS, options.plans
    if options.quick:
        models, plans = ("tiny-cnn",), 2
    with _machine.only_json() as emit:
        figures = {
            f"{name} {board}": try_model(name, board, plans, options.limit_s) for name in models for board in boards
        }
        emit("gpu_schedules", {"models": models, "boards": boards, "plans": plans}, {"models": figures})


def try_model(name: str, board: str, plans: int, limit_s: float = math.inf, every: int = 1) -> dict[str, Any]:
    """What became of the best plans of each of its workloads, or of every so manyth: of all the best first, then of all
    the next best.
    """
    tvm = tvm_env.load_compiler()
    entry, kind = ZOO[name], load_board_types()[board]
    assert kind.target is not None
    config = gpus.to_config(board, code.plan_gpu(kind), kind.target.to_tvm(), simulated=False)
    model = onnx.load_model_from_string(entry.build())
    prepared = prepare_model(model, entry.input_shapes, config, gpus.PIPELINE)
    _machine.say(f"{name} for {board}: {len(prepared.workloads)} workloads")
    begun, deadline = time.process_time(), time.monotonic() + limit_s
    offered = []
    for workload in prepared.workloads[::every]:
        module = tvm.ir.load_json(workload.module_json)
        outlook = rule.read_outlook(module, gpus.unit_of(config))
        ranked = [plan for _, plan in outlook.plans()[:plans]] if outlook else [None]
        offered.append((workload.name, module, outlook, ranked))
    tally, first, rank = Tally(config), collections.Counter[str](), 0
    while rank < plans and (rank == 0 or time.monotonic() < deadline):
        for workload_name, module, outlook, ranked in offered:
            if rank < len(ranked):
                end = tally.try_plan(workload_name, module, outlook, ranked[rank])
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
    }


class Tally:
    """What became of plans for a GPU's target, and why."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._target = config, target.make_target(config)
        self.ends = collections.Counter[str]()
        self.by_family = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self.reasons = collections.Counter[str]()
        self.usages: list[Any] = []
        self.spilling = 0

    def try_plan(self, workload: str, module: Any, outlook: rule.Outlook | None, plan: Any) -> str:
        """Schedule a function and make its code; without an outlook as TVM's defaults have it."""
        family = outlook.family.name if outlook else "TVM's defaults"
        try:
            usages = self._make(module, outlook, plan)
            end = "taken"
            self.usages += usages
            self.spilling += any(usage.spilled_bytes for usage in usages)
        except CodeRefusedError as error:
            end = next(said for words, said in REFUSALS.items() if error.message.startswith(words))
            self._note(family, workload, plan, error.message)
        except (RuntimeError, ValueError, TypeError) as error:
            end = TVM_REFUSED
            self._note(family, workload, plan, str(error))
        self.ends[end] += 1
        self.by_family[family][end] += 1
        return end

    def _make(self, module: Any, outlook: rule.Outlook | None, plan: Any) -> list[Any]:
        tvm = tvm_env.load_compiler()
        if outlook is None:
            scheduled = lowering.bind_rest(module, self._target)
        else:
            schedule = tvm.s_tir.Schedule(module, error_render_level="none")
            outlook.apply(schedule, plan)
            traces.finish(schedule, traces.make_context(module, self._target))
            scheduled = schedule.mod
        with lowering.making(self._config) as made:
            tvm.tirx.build(scheduled, target=self._target)
        return [usage for each in made for usage in each.usages]

    def _note(self, family: str, workload: str, plan: Any, text: str) -> None:
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        _machine.say(f"{family} {workload} {plan}: {lines[-1][:300] if lines else ''}")
        self.reasons[f"{family}: {lines[-1][:160] if lines else 'no word'}"] += 1


if __name__ == "__main__":
    main()
