"""How well predictions rank schedules on this machine's core: the best predicted plans of each workload, all timed.

For each workload of some models: its first plan's time over the best's of those that were timed, the rank correlation
(Spearman's) of predictions with times, and the fastest plans with what was predicted of them. One thread, processor
time, so that other work here matters little. Weights come from memory, as in a model.
Default budget: about 10 minutes on one core.

It is what a core's figures are fitted by: with `--figures "l1_bytes=32768,49152 l2_wait=0.15,0.6"` the first choices by
all combinations of these are timed too, and each combination is listed with its choices' time over the best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import _machine
import search_efficiency

MODELS = "squeezenet1.1,mobilenet_v2"
_SHOWN = 3
# In which a workload's plans take turns: hosts that others use, too, are slower for seconds at a time.
_ROUNDS = 12
# Weights in turns: so many bytes of copies.
_COLD_BYTES = 64 << 20
# First choices by other figures of the core that are timed.
_FIRST = 2

Figures = Mapping[str, float]


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--match", default="conv2d", help="workloads whose name has this expression (default: conv2d)")
    parser.add_argument("--plans", type=int, default=24, help="of each workload, the best predicted (default: 24)")
    parser.add_argument("--figures", default="", help="of the core, to choose by as well: NAME=VALUE,VALUE ...")
    options = parser.parse_args()
    if options.quick:
        options.models, options.match, options.plans = "tiny-cnn", "conv2d", 2
        options.figures = "l1_bytes=32768,49152"
    # Candidates run alone; TVM reads this when it loads.
    os.environ["TVM_NUM_THREADS"] = "1"
    with _machine.only_json() as emit, _machine.scratch():
        emit("plan_ranking", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    import _farm

    from farm.search import tvm_env
    from farm.search.tvm_env import host_target

    tvm_env.load()
    timer = search_efficiency.Timer(options.quick, _COLD_BYTES, _ROUNDS)
    tried = list_figures(options.figures)
    found = {
        workload.hash: workload
        for name in options.models.split(",")
        for workload in _farm.read_model(name).prepare(host_target(1))
        if re.search(options.match, workload.name)
    }
    rows = []
    for workload in found.values():
        if (row := rank(options, timer, workload, tried)) is not None:
            rows.append(row)
            _machine.say(f"{row['name']}: first over best {row['first_over_best']}, correlation {row['correlation']}")
    return {
        "first_over_best": _machine.spread([row["first_over_best"] for row in rows]),
        "correlation_is": "Spearman's, of predictions with times of the same plans",
        "by_other_figures": compare_figures(tried, [row.pop("others_over_best") for row in rows]),
        "workloads": rows,
    }


def list_figures(text: str) -> list[Figures]:
    """All combinations of figures in `NAME=VALUE,VALUE ...`; none for an empty text."""
    given = {name: values.split(",") for name, _, values in (word.partition("=") for word in text.split())}
    return [
        {name: float(value) for name, value in zip(given, values, strict=True)}
        for values in itertools.product(*given.values())
        if given
    ]


def compare_figures(tried: Sequence[Figures], ratios: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Each combination beside its choices' times over the best plans', the geometric mean of workloads; best first."""
    means = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*ratios, strict=True)]
    worst = [max(column) for column in zip(*ratios, strict=True)]
    rows = [
        {"figures": dict(figures), "first_over_best": _machine.round_to(mean), "worst": _machine.round_to(most, 3)}
        for figures, mean, most in zip(tried, means, worst, strict=bool(ratios))
    ]
    return sorted(rows, key=lambda row: row["first_over_best"])


def rank(
    options: Any, timer: search_efficiency.Timer, workload: Any, tried: Sequence[Figures]
) -> dict[str, Any] | None:
    """Time a workload's plans; None where no family has any."""
    import tvm

    from farm.search import gpus
    from farm.search.families import rule
    from farm.search.tuners.schedule_space import ScheduleSpace
    from farm.search.tuners.warm_start import spearman

    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), gpus.unit_of(workload.target))
    if outlook is None:
        return None
    space = ScheduleSpace(workload)
    plans = list(zip(outlook.plans(), space.ranked, strict=False))
    others = [_with_figures(outlook, figures) for figures in tried]
    wanted = [plan for other in others for _, plan in other.plans()[:_FIRST]]
    chosen, candidates = [], []
    for at, ((prediction, plan), genome) in enumerate(plans):
        if at >= options.plans and plan not in wanted:
            continue
        (evaluated,) = space.evaluate([(genome, 0)])
        if evaluated is not None:
            candidate = space.describe(evaluated)
            chosen.append((prediction.seconds, plan))
            candidates.append((candidate.hash, candidate.module_json, candidate.arguments))
    seconds = timer.time_in_turns(workload, candidates)
    timed = [(taken, *each) for taken, each in zip(seconds, chosen, strict=True) if taken is not None]
    if not timed:
        return None
    fastest = sorted(timed, key=lambda each: each[0])
    by_others = [min(timed, key=lambda each: _predict(other, each[2]))[0] for other in others]
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
        "others_over_best": [taken / fastest[0][0] for taken in by_others],
    }


def _with_figures(outlook: Any, figures: Figures) -> Any:
    """A function as it would be seen if its core had these figures; its options stay."""
    return dataclasses.replace(outlook, core=dataclasses.replace(outlook.core, **figures))


def _predict(outlook: Any, plan: Mapping[str, int]) -> float:
    found = outlook.predict(plan)
    return math.inf if found is None else found.seconds


if __name__ == "__main__":
    main()
