"""How good a workload's first trial is, how many trials the search needs, and what it costs.

Workloads of the zoo's models, each searched alone from nothing with the whole budget, as a campaign searches it: the
first trial over the best of all, trials until within 5 % of that best, and processor seconds of search for each
candidate that it proposed. Candidates are timed by processor time on one thread (`search_efficiency.Timer`), so that
other work here matters little. Default budget: 12 workloads x 512 trials, about half an hour on one core.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import _machine
import search_efficiency

MODELS = "squeezenet1.1,resnet18,resnet50,mobilenet_v2"
WITHIN = 1.05
# Slower functions would make the benchmark wait.
MOST_FLOP = 300e6


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--workloads", type=int, default=12, help="how many, spread over all (default: 12)")
    parser.add_argument("--trials", type=int, default=512, help="per workload (default: 512)")
    parser.add_argument("--batch", type=int, default=8, help="candidates per proposal (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    options = parser.parse_args()
    options.tuner, options.loss = "xgb", ""
    if options.quick:
        options.models, options.workloads, options.trials = "tiny-cnn", 2, 16
    # Candidates run alone; TVM reads this when it loads.
    os.environ["TVM_NUM_THREADS"] = "1"
    with _machine.only_json() as emit, _machine.scratch():
        emit("first_trials", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    timer = search_efficiency.Timer(options.quick)
    rows = []
    for model, workload in choose(options):
        rows.append({"model": model, "workload": workload.name, **search(options, timer, workload)})
        _machine.say(f"{model} {workload.name}: {rows[-1]}")
    untils = [row["trials_until_within_5_percent"] for row in rows]
    return {
        "workloads": rows,
        "first_over_best": _machine.spread([row["first_over_best"] for row in rows]),
        "first_over_best_worst": max(row["first_over_best"] for row in rows),
        "trials_until_within_5_percent": _machine.spread(untils),
        "search_s_per_candidate": _machine.round_to(statistics.median(row["search_s_per_candidate"] for row in rows)),
    }


def choose(options: Any) -> list[tuple[str, Any]]:
    """Convolutions and matrix products of the models, each once, evenly spread in the order of their work."""
    import _farm

    from farm.search import tvm_env
    from farm.search.target import host_target

    tvm_env.load()
    found: dict[str, tuple[str, Any]] = {}
    for name in options.models.split(","):
        for workload in _farm.read_model(name).prepare(host_target(1)):
            if workload.name.startswith(("conv2d", "depthwise", "matmul", "dense")) and workload.flop <= MOST_FLOP:
                found.setdefault(workload.hash, (name, workload))
    by_work = sorted(found.values(), key=lambda each: (each[1].flop, each[1].hash))
    count = min(options.workloads, len(by_work))
    return [by_work[(2 * index + 1) * len(by_work) // (2 * count)] for index in range(count)]


def search(options: Any, timer: Any, workload: Any) -> dict[str, Any]:
    """One search from nothing."""
    building = timer.seconds
    began = time.process_time()
    latencies, _ = search_efficiency.run_ours(options, timer, workload, options.seed, [])
    spent = time.process_time() - began - (timer.seconds - building)
    best = min(latencies)
    return {
        "gflop": _machine.round_to(workload.flop / 1e9),
        "trials": len(latencies),
        "best_us": _machine.round_to(best * 1e6),
        "first_over_best": _machine.round_to(latencies[0] / best),
        "trials_until_within_5_percent": search_efficiency.trials_until(latencies, WITHIN * best),
        "failed": sum(latency == float("inf") for latency in latencies),
        "search_s_per_candidate": _machine.round_to(spent / len(latencies)),
    }


if __name__ == "__main__":
    main()
