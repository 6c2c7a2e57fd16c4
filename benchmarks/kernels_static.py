"""Read the innermost loops of kernels compiled for other cores: FMAs, spills, predicted cycles.

Compiles the zoo's dense convolutions for each core and reads the objects with `llvm-objdump` and `llvm-mca` (Debian:
package `llvm`). Cycles are the loop's own with all data in L1d. The share is the busiest loop's, of one 128-bit FMA per
cycle; on x86-64, of full vectors at the core's rate. If LLVM has no model of a core, `modelled_as` names the one taken.
`--against` names the output of an earlier run: losses above 3 % are listed, and the exit code is 1. Default budget:
about 40 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _farm
import _loops
import _machine

from farm.models import zoo
from farm.values import Workload

# Changes of a share that are no loss.
_TOLERATED = 0.03


def main() -> None:
    parser = _machine.parser(__doc__)
    names = [model.name for model in zoo.ZOO.values() if len(next(iter(model.input_shapes.values()))) == 4]
    parser.add_argument("--models", default=",".join(names), help=f"(default: {','.join(names)})")
    parser.add_argument(
        "--cores", default=",".join(_loops.MODELLED_AS), help=f"(default: {','.join(_loops.MODELLED_AS)})"
    )
    parser.add_argument("--pipeline", default="graph/2", help="graph pipeline (default: graph/2)")
    parser.add_argument("--least-mflop", type=float, default=0.0, help="leave smaller convolutions out (default: 0)")
    parser.add_argument("--against", type=Path, help="output of an earlier run, to compare with")
    options = parser.parse_args()
    if options.quick:
        options.models, options.cores = "tiny-cnn", "cortex-a57"
    earlier = None if options.against is None else json.loads(options.against.read_text())
    settings = vars(options) | {"against": options.against and str(options.against)}
    with _machine.only_json() as emit:
        try:
            for tool in _loops.TOOLS:
                _loops.require_tool(tool)
        except RuntimeError as error:
            emit("kernels_static", settings, {"cores": None, "reason": str(error)})
            return
        cores = {name: measure_core(name, options) for name in options.cores.split(",")}
        lost = [] if earlier is None else compare(earlier, cores)
        emit("kernels_static", settings, {"lost": lost, "cores": cores})
    for each in lost:
        _machine.say(f"lost: {each}")
    sys.exit(1 if lost else 0)


def compare(earlier: Mapping[str, Any], cores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List workloads whose share of the core's FMAs fell by more than 3 %, or that now spill."""
    lost = []
    for core, now in cores.items():
        before = {each["workload"]: each for each in earlier["cores"].get(core, {}).get("rows", ())}
        for each in now["rows"]:
            was = before.get(each["workload"], {})
            slower = (each.get("share") or 0.0) < (was.get("share") or 0.0) * (1 - _TOLERATED)
            if slower or (each.get("vector_spills") and was and not was.get("vector_spills")):
                lost.append({"core": core, "workload": each["workload"], "was": _told(was), "is": _told(each)})
    return lost


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in ("share", "fmas", "instructions", "vector_spills")}


def measure_core(core: str, options: Any) -> dict[str, Any]:
    config = _loops.make_config(core, 4)
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
        return result | {"error": "no innermost loop with FMAs"}
    busiest = dataclasses.asdict(loops[0])
    del busiest["code"], busiest["function"]
    share = loops[0].share
    return result | busiest | {"share": None if share is None else _machine.round_to(share, 3)}


if __name__ == "__main__":
    main()
