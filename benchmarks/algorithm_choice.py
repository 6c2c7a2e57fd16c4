"""How well the algorithm of 3x3 convolutions is chosen on this machine's core, before anything is measured.

For each convolution: the best predicted plans of a direct one and of Winograd's F(2, 3), F(4, 3) and F(6, 3), all
timed; and the time of what the graph pipeline would choose over the fastest of all. One thread, processor time, weights
from memory as in a model. Default budget: about 6 minutes on one core.
"""

from __future__ import annotations

import os
from typing import Any

import _machine
import plan_ranking
import search_efficiency

# Sizes of zoo models, and some between them.
CONVOLUTIONS = (
    "56x56x64>64,28x28x128>128,14x14x256>256,7x7x512>512,55x55x16>64,27x27x32>128,13x13x48>192,13x13x64>256,"
    "28x28x64>96,14x14x96>128,20x20x128>128,40x40x64>64"
)
_PADDING = (1, 1, 1, 1)
# More than any cache of one core's share.
_COLD_BYTES = 150 << 20


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--convolutions", default=CONVOLUTIONS, help="3x3 ones, as HEIGHTxWIDTHxIN>OUT,...")
    parser.add_argument("--plans", type=int, default=6, help="of each algorithm, the best predicted (default: 6)")
    options = parser.parse_args()
    if options.quick:
        options.convolutions, options.plans = "7x7x16>16", 1
    # Candidates run alone; TVM reads this when it loads.
    os.environ["TVM_NUM_THREADS"] = "1"
    with _machine.only_json() as emit, _machine.scratch():
        emit("algorithm_choice", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    from farm.search import tvm_env

    tvm_env.load()
    timer = search_efficiency.Timer(options.quick, _COLD_BYTES)
    rows = [choose(options, timer, text) for text in options.convolutions.split(",")]
    for row in rows:
        _machine.say(f"{row['convolution']}: {row['chosen']}, {row['chosen_over_best']} of {row['best']}")
    return {"chosen_over_best": _machine.spread([row["chosen_over_best"] for row in rows]), "convolutions": rows}


def choose(options: Any, timer: search_efficiency.Timer, text: str) -> dict[str, Any]:
    """Time what each algorithm's best predicted plans take, and what the pipeline's choice does."""
    from farm.search import cores
    from farm.search.graph import algorithms
    from farm.search.target import host_target

    target = host_target(1)
    size, _, channels = text.partition(">")
    height, width, depth = map(int, size.split("x"))
    shape = 1, height, width, depth
    chosen = algorithms.choose_winograd(cores.core_of(target))(shape, int(channels), _PADDING, "float32")
    timed = {
        m: plan_ranking.rank(options, timer, make_workload(shape, int(channels), m, target), []) for m in (0, 2, 4, 6)
    }
    known = {m: row for m, row in timed.items() if row is not None}
    best = min(known, key=lambda m: known[m]["fastest"][0]["us"])
    return {
        "convolution": text,
        "chosen": name(chosen),
        "best": name(best),
        "chosen_over_best": _machine.round_to(known[chosen]["first_us"] / known[best]["fastest"][0]["us"], 3),
        "algorithms": {
            name(m): {"first_us": row["first_us"], "fastest": row["fastest"][0]} for m, row in known.items()
        },
    }


def name(m: int) -> str:
    return f"F({m}, 3)" if m else "direct"


def make_workload(shape: tuple[int, int, int, int], channels: int, m: int, target: Any) -> Any:
    """The convolution alone, directly or as F(m, 3), its weights free to be packed."""
    import tvm

    from farm.search import cores, workloads
    from farm.search.graph import algorithms, channel_padding, winograd
    from farm.search.workloads import list_arguments
    from farm.values import Workload

    if m:
        function = winograd.make_function(shape, channels, _PADDING, m)
    else:
        function = channel_padding.pad(
            algorithms.make_direct(shape, channels, _PADDING, "float32"), cores.core_of(target)
        )
    module = tvm.IRModule({"main": function.with_attr("layout_free_buffers", [1])})
    key = workloads.workload_hash(module, target, "graph/2")
    return Workload(
        key, f"{name(m)} {shape}", 1.0, 1, list_arguments(module), tvm.ir.save_json(module), target, "graph/2"
    )


if __name__ == "__main__":
    main()
