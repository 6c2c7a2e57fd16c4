"""Candidates ranked by the instructions that they execute on an emulated Cortex-A57, twice: how alike the rankings are.

Fifty schedules of each of three workloads of mobilenet_v2, drawn from all that their families offer, compiled for a
Jetson Nano as trials are. Each ranking is a process of its own with one thread. Also told: how far apart the counts
are, and how the family's prediction ranks the same candidates. Default budget: about 3 minutes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import _emulated
import _farm
import _machine

from device_agent.protocol import Engine
from farm.errors import UnavailableError
from farm.inventory.board_types import require_board_type
from farm.search import builder, tvm_env
from farm.search.schedule_space import ScheduleSpace
from farm.search.warm_start import spearman
from farm.search.workloads import Workload

# One of each: a matrix product in pixels, one with few of them, a depthwise convolution.
WORKLOADS = (
    "conv2d_add_clip 1x1 14x14x64>384",
    "conv2d_add 1x1 28x28x144>32",
    "depthwise_conv2d_add_clip 3x3 14x14x384>384",
)


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--candidates", type=int, default=50, help="of each workload (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which candidates are drawn (default: 0)")
    options = parser.parse_args()
    if options.quick:
        options.candidates = 3
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("emulated_ranking", vars(options), measure(options, folder))


def measure(options: Any, folder: Path) -> dict[str, Any]:
    try:
        _emulated.require_board()
    except UnavailableError as error:
        return {"workloads": None, "reason": str(error)}
    tvm_env.load()
    board_type = require_board_type(_emulated.BOARD_TYPE)
    assert board_type.target is not None
    model = _farm.read_model("mobilenet_v2")
    target = board_type.target.to_tvm()
    found = {workload.name: workload for workload in model.prepare(target, board_type.pipeline)}
    rows = [rank(found[name], options, folder) for name in WORKLOADS]
    return {"correlation_is": "Spearman's, of two counts of the same candidates", "workloads": rows}


def rank(workload: Workload, options: Any, folder: Path) -> dict[str, Any]:
    """Count the workload's candidates twice."""
    space = ScheduleSpace(workload)
    order = list(enumerate(space.ranked))
    random.Random(options.seed).shuffle(order)
    jobs: dict[str, _emulated.Job] = {}
    predicted: list[float] = []
    for place, genome in order:
        if len(jobs) == options.candidates:
            break
        (evaluated,) = space.evaluate([(genome, 0)])
        if evaluated is None or evaluated.hash in jobs:
            continue
        candidate = space.describe(evaluated)
        library = folder / f"{candidate.hash}.so"
        library.write_bytes(builder.build_candidate(candidate.module_json, workload.target))
        jobs[candidate.hash] = _emulated.Job(Engine.KERNEL.value, (library,), candidate.arguments)
        predicted.append(place)
    first, second = ([one.instructions for one in _emulated.count(list(jobs.values()))] for _ in range(2))
    _machine.say(f"{workload.name}: {len(jobs)} candidates, {min(first):.0f} to {max(first):.0f} instructions")
    return {
        "name": workload.name,
        "candidates": len(jobs),
        "correlation": _machine.round_to(spearman(first, second), 6),
        "largest_difference": max(abs(a - b) / a for a, b in zip(first, second, strict=True)),
        "million_instructions": _machine.spread([one / 1e6 for one in first]),
        "correlation_with_prediction": _machine.round_to(spearman(predicted, first), 3),
    }


if __name__ == "__main__":
    main()
