"""How well predictions rank schedules on this machine's core: the best predicted plans of each workload, all timed.

For each workload of some models: its first plan's time over the best's of those that were timed, the rank correlation
(Spearman's) of predictions with times, and the fastest plans with what was predicted of them. One thread, processor
time, so that other work here matters little. It is what a core's constants are fitted by; `emulated_ranking.py` asks
an emulated board the same. Default budget: about 10 minutes on one core.
"""

from __future__ import annotations

import os
import re
from typing import Any

import _machine
import search_efficiency

MODELS = "squeezenet1.1,mobilenet_v2"
_SHOWN = 3


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--match", default="conv2d", help="workloads whose name has this expression (default: conv2d)")
    parser.add_argument("--plans", type=int, default=24, help="of each workload, the best predicted (default: 24)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.match, options.plans = "tiny-cnn", "conv2d", 2
    # Candidates run alone; TVM reads this when it loads.
    os.environ["TVM_NUM_THREADS"] = "1"
    with _machine.only_json() as emit, _machine.scratch():
        emit("plan_ranking", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    import _farm

    from farm.search import tvm_env
    from farm.search.target import host_target

    tvm_env.load()
    timer = search_efficiency.Timer(options.quick)
    found = {
        workload.hash: workload
        for name in options.models.split(",")
        for workload in _farm.read_model(name).prepare(host_target(1))
        if re.search(options.match, workload.name)
    }
    rows = []
    for workload in found.values():
        if (row := rank(options, timer, workload)) is not None:
            rows.append(row)
            _machine.say(f"{row['name']}: first over best {row['first_over_best']}, correlation {row['correlation']}")
    return {
        "first_over_best": _machine.spread([row["first_over_best"] for row in rows]),
        "correlation_is": "Spearman's, of predictions with times of the same plans",
        "workloads": rows,
    }


def rank(options: Any, timer: search_efficiency.Timer, workload: Any) -> dict[str, Any] | None:
    """Time a workload's plans; None where no family has any."""
    import tvm

    from farm.search import gpus
    from farm.search.families import rule
    from farm.search.tuners.schedule_space import ScheduleSpace
    from farm.search.tuners.warm_start import spearman

    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), gpus.unit_of(workload.target))
    if outlook is None:
        return None
    space, timed = ScheduleSpace(workload), []
    for (prediction, plan), genome in list(zip(outlook.plans(), space.ranked, strict=False))[: options.plans]:
        (evaluated,) = space.evaluate([(genome, 0)])
        if evaluated is None:
            continue
        candidate = space.describe(evaluated)
        seconds = timer.time(workload, candidate.hash, candidate.module_json, candidate.arguments)
        if seconds is not None:
            timed.append((seconds, prediction.seconds, plan))
    if not timed:
        return None
    fastest = sorted(timed, key=lambda each: each[0])
    return {
        "name": workload.name,
        "plans": len(timed),
        "first_us": _machine.round_to(timed[0][0] * 1e6),
        "first_over_best": _machine.round_to(timed[0][0] / fastest[0][0], 3),
        "correlation": _machine.round_to(spearman([each[1] for each in timed], [each[0] for each in timed]), 3),
        "fastest": [
            {"us": _machine.round_to(s * 1e6), "predicted_us": _machine.round_to(p * 1e6), "plan": dict(plan)}
            for s, p, plan in fastest[:_SHOWN]
        ],
    }


if __name__ == "__main__":
    main()
