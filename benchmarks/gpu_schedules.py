"""Schedules of GPU families over the workloads of whole models: does ptxas take them, and what do they take?

For each workload so many of the best plans by prediction, for Nano (sm_53) and TX2 (sm_62). No GPU takes part. Default
budget: 15 minutes.
"""

from __future__ import annotations

import time
from typing import Any

import _machine
import onnx

from farm.errors import CodeRefusedError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.zoo import ZOO
from farm.search import gpu_code, gpus, target, traces, tvm_env
from farm.search.families import rule
from farm.search.prepared import prepare_model

MODELS = ("squeezenet1.1", "mobilenet_v2", "resnet18")
BOARDS = ("jetson-nano", "jetson-tx2")
PLANS = 20


def main() -> None:
    options = _machine.parser(__doc__).parse_args()
    models, plans = (("tiny-cnn",), 2) if options.quick else (MODELS, PLANS)
    with _machine.only_json() as emit:
        figures = {f"{name} {board}": try_model(name, board, plans) for name in models for board in BOARDS}
        emit("gpu_schedules", {"models": models, "plans": plans}, {"models": figures})


def try_model(name: str, board: str, plans: int) -> dict[str, Any]:
    """What became of the best plans of each of its workloads."""
    tvm = tvm_env.load_compiler()
    entry, kind = ZOO[name], load_board_types()[board]
    assert kind.target is not None
    config = gpus.to_config(board, code.plan_gpu(kind), kind.target.to_tvm(), simulated=False)
    compile_target = target.make_target(config)
    model = onnx.load_model_from_string(entry.build())
    prepared = prepare_model(model, entry.input_shapes, config, gpus.PIPELINE)
    _machine.say(f"{name} for {board}: {len(prepared.workloads)} workloads")
    counts = dict.fromkeys(("taken", "refused by TVM", "refused by ptxas"), 0)
    usages, reasons, unserved, building_s = [], set(), [], 0.0
    for workload in prepared.workloads:
        module = tvm.ir.load_json(workload.module_json)
        outlook = rule.read_outlook(module, gpus.unit_of(config))
        if outlook is None:
            unserved.append(workload.name)
            continue
        context = traces.make_context(module, compile_target)
        for _, plan in outlook.plans()[:plans]:
            schedule = tvm.s_tir.Schedule(module, error_render_level="none")
            try:
                outlook.apply(schedule, plan)
                traces.finish(schedule, context)
            except (RuntimeError, ValueError, TypeError):
                counts["refused by TVM"] += 1
                continue
            begun = time.monotonic()
            try:
                with gpu_code.making(config) as made:
                    tvm.tirx.build(schedule.mod, target=compile_target)
                usages += [usage for each in made for usage in each.usages]
                counts["taken"] += 1
            except CodeRefusedError as error:
                counts["refused by ptxas"] += 1
                reasons.add(error.message[:120])
            building_s += time.monotonic() - begun
    built = counts["taken"] + counts["refused by ptxas"]
    return {
        **counts,
        "reasons": sorted(reasons)[:5],
        "without a family": unserved,
        "seconds_per_candidate": round(building_s / max(1, built), 3),
        "most registers": max((usage.registers for usage in usages), default=0),
        "candidates that spill": sum(usage.spilled_bytes > 0 for usage in usages),
    }


if __name__ == "__main__":
    main()
