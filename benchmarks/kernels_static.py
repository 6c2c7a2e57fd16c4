"""The innermost loops of compiled kernels for cores that are not here: multiply-adds, spills, cycles as predicted.

Compiles the zoo's dense convolutions for each core and reads the objects with `llvm-objdump` and `llvm-mca` (Debian:
package `llvm`). Cycles are the loop's own with all data in the first-level cache; the share is that of one 128-bit
fused multiply-add per cycle, what the busiest loop comes to. Where LLVM has no model of a core, or does not know its
name, `modelled_as` says whose was taken. Default budget: about 15 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import _farm
import _loops
import _machine

from farm.models import zoo
from farm.search.workloads import Workload


def main() -> None:
    parser = _machine.parser(__doc__)
    names = [model.name for model in zoo.ZOO.values() if len(next(iter(model.input_shapes.values()))) == 4]
    parser.add_argument("--models", default=",".join(names), help=f"(default: {','.join(names)})")
    parser.add_argument(
        "--cores", default=",".join(_loops.MODELLED_AS), help=f"(default: {','.join(_loops.MODELLED_AS)})"
    )
    parser.add_argument("--pipeline", default="graph/1", help="graph pipeline (default: graph/1)")
    parser.add_argument("--least-mflop", type=float, default=0.0, help="leave smaller convolutions out (default: 0)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.cores = "tiny-cnn", "cortex-a57"
    with _machine.only_json() as emit:
        try:
            for tool in _loops.TOOLS:
                _loops.require_tool(tool)
        except RuntimeError as error:
            emit("kernels_static", vars(options), {"cores": None, "reason": str(error)})
            return
        cores = {name: measure_core(name, options) for name in options.cores.split(",")}
        emit("kernels_static", vars(options), {"cores": cores})


def measure_core(core: str, options: Any) -> dict[str, Any]:
    config = {"kind": "llvm", "mtriple": _loops.TRIPLE, "mcpu": core, "mattr": ["+neon"], "num-cores": 4}
    rows: dict[str, dict[str, Any]] = {}
    for name in options.models.split(","):
        for workload in _farm.read_model(name).prepare(config, options.pipeline):
            if workload.kind != "conv2d" or workload.flop < options.least_mflop * 1e6 or workload.hash in rows:
                continue
            rows[workload.hash] = {"model": name, "workload": workload.name} | row(workload, config)
            _machine.say(f"{core} {name} {workload.name}: {rows[workload.hash].get('share')}")
    shares = [one["share"] for one in rows.values() if one.get("share") is not None]
    return {
        "modelled_as": _loops.MODELLED_AS.get(core, core),
        "workloads": len(rows),
        "share": _machine.spread(shares, digits=3),
        "with_spills": sum(bool(one.get("stack_loads") or one.get("stack_stores")) for one in rows.values()),
        "with_vector_spills": sum(bool(one.get("vector_spills")) for one in rows.values()),
        "without_vectors": sum(not one.get("fmas") for one in rows.values()),
        "rows": list(rows.values()),
    }


def row(workload: Workload, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a workload: its busiest loop."""
    loops = _loops.inspect_kernel(_farm.schedule(workload), config)
    result: dict[str, Any] = {"mflop": _machine.round_to(workload.flop / 1e6), "loops": len(loops)}
    if not loops:
        return result | {"error": "no innermost loop with multiply-adds"}
    busiest = dataclasses.asdict(loops[0])
    del busiest["code"], busiest["function"]
    share = loops[0].share
    return result | busiest | {"share": None if share is None else _machine.round_to(share, 3)}


if __name__ == "__main__":
    main()
