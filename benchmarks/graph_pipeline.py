"""Compare the graph pipelines: the same model, trials and seeds through each, then the compiled models in turns.

Every tuning goes through the agent, in a store of its own. The board type is `local` with its pipeline replaced. The
compiled models are timed afterwards, all in one session on an otherwise idle machine.
Default budget: 3 pipelines x 2 seeds x 96 trials, about 15 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import _machine

import farm.settings
from device_agent.protocol import Engine
from farm.inventory.board_types import require_board_type

BASE = "graph/2"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--model", default="squeezenet1.1", help="zoo name or ONNX file (default: squeezenet1.1)")
    parser.add_argument("--trials", type=int, default=96, help="per pipeline and seed (default: 96)")
    parser.add_argument("--seeds", type=int, default=2, help="tunings per pipeline (default: 2)")
    parser.add_argument("--runs", type=int, default=60, help="timed runs of each compiled model (default: 60)")
    parser.add_argument(
        "--pipelines", nargs="+", default=[BASE, "graph/2-nchw", "graph/2-plain"], help="which, the first is the base"
    )
    options = parser.parse_args()
    if options.quick:
        options.trials, options.seeds, options.runs = 16, 1, 8
    with _machine.only_json() as emit, _machine.scratch():
        emit("graph_pipeline", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    import _farm  # after only_json: it loads libraries that may print

    base = farm.settings.load()
    model = _farm.read_model(options.model)
    board_type = require_board_type("local")
    runs: dict[tuple[str, int], Any] = {}
    # Seed by seed, so that a machine that changes over the minutes changes for all pipelines alike.
    for seed in range(options.seeds):
        for name in options.pipelines:
            _machine.say(f"{name}, seed {seed}: {options.trials} trials")
            kind = board_type.model_copy(update={"pipeline": name})
            settings = dataclasses.replace(base, seed=seed)
            runs[name, seed] = _farm.tune(model, settings, kind, options.trials)
    threads = int(next(iter(runs.values())).target["num-cores"])
    programs = {
        f"{name} {seed}": _farm.Program(Engine.RELAX_VM, run.library, threads) for (name, seed), run in runs.items()
    }
    programs["onnxruntime"] = _farm.Program(Engine.ONNXRUNTIME, model.source.onnx_bytes, threads)
    _machine.say(f"timing {len(programs)} programs in turns")
    timed = _farm.time_programs(base, model, programs, options.runs, options.quick)
    latency = {key: statistics.median(timed[f"{key[0]} {key[1]}"].samples) for key in runs}
    first = options.pipelines[0]
    pipelines = {}
    for name in options.pipelines:
        mine = [runs[name, seed] for seed in range(options.seeds)]
        medians = [latency[name, seed] for seed in range(options.seeds)]
        ratios = [latency[name, seed] / latency[first, seed] for seed in range(options.seeds)]
        pipelines[name] = {
            "used": sorted({run.pipeline for run in mine}),
            "latency_ms": _machine.spread(medians, 1e3),
            f"ratio_to_{first}": _machine.spread(ratios),
            "start_s": _machine.spread([run.tuned.seconds_starting for run in mine], digits=3),
            "compile_s": _machine.spread([run.compile_s for run in mine], digits=3),
            "outputs_match": all(
                _farm.matches(timed[f"{name} {seed}"], timed["onnxruntime"]) for seed in range(options.seeds)
            ),
            "seeds": [
                run.summary | {"latency_ms": _machine.spread(timed[f"{name} {seed}"].samples, 1e3)}
                for seed, run in enumerate(mine)
            ],
        }
    return {
        "threads": threads,
        "machine_quiet": timed.quiet,
        "target": dict(next(iter(runs.values())).target),
        "latency_is": "median over seeds of the median run; min and max are over seeds",
        "pipelines": pipelines,
        "onnxruntime_latency_ms": _machine.spread(timed["onnxruntime"].samples, 1e3),
    }


if __name__ == "__main__":
    main()
