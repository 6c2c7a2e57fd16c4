"""Compare the farm with stock MetaSchedule: the same two layers, trials, threads, tracker and agent, in one run.

Each side tunes them in the form that its graph has: ours as the farm's pipeline leaves them, stock's as TVM's own
passes do, with convolutions in the farm's layout.

Stock is `ms.tune_tasks` with LocalBuilder, RPCRunner, its XGBoost cost model and its evolutionary search, all with
their defaults but for what `settings` in the output names. It gets as few and as large batches as the trials allow,
because each batch starts build workers anew. Both wall times run from the call to its end. What either side needs once
before (imports, Ray) is said separately. The best of each is measured again, in turns, on an otherwise idle machine.
Default budget: 2 x 32 trials on each side, about 10 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import _machine
import numpy as np
import onnx

import farm.settings
from device_agent.protocol import Limits, MeasureSpec, Status, TensorSpec
from farm.crew.local import LocalFarm
from farm.inventory.board_types import require_board_type
from farm.processes.machine import machine_lock
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.values import SEARCH_TRIAL

KINDS = ("conv2d", "dense")
STOCK_PIPELINE = "stock"
# Long enough for a build worker that first imports every tensor intrinsic while its siblings do the same.
BUILD_TIMEOUT_S = 600.0
SESSION_TIMEOUT_S = 60
LIMIT_S = 3600.0
SEED = 0


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=32, help="per workload and side (default: 32)")
    parser.add_argument(
        "--iteration", type=int, default=0, help="stock's trials per iteration (default: as many as --trials)"
    )
    parser.add_argument(
        "--samples", type=int, default=20, help="measurements of each side's best in the end (default: 20)"
    )
    options = parser.parse_args()
    if options.quick:
        options.trials, options.samples = 4, 4
    options.iteration = options.iteration or options.trials
    with _machine.only_json() as emit, _machine.scratch():
        base = farm.settings.load()
        emit("vs_stock", vars(options) | settings_of(base, options), measure(base, options))


def settings_of(base: Settings, options: Any) -> dict[str, Any]:
    """What is common, and what either side was set to."""
    return {
        "common": {
            "number": base.measure_number,
            "repeat": base.measure_repeat,
            "min_repeat_s": base.measure_min_repeat_s,
            "threads": _machine.cores(),
        },
        "stock": {
            "graph_pipeline": STOCK_PIPELINE,
            "builder": f"LocalBuilder(timeout_sec={BUILD_TIMEOUT_S:g}); the default 30 goes into imports",
            "export": "tar of objects, linked on the board: the default",
            "runner": f"RPCRunner(session_timeout_sec={SESSION_TIMEOUT_S}), one worker: the default",
            "search": "evolutionary, population 512, 4 generations: the defaults",
            "cost_model": "xgb: the default; it ranks at random until it knows 100 candidates",
            "num_trials_per_iter": options.iteration,
            "task_scheduler": "gradient: the default",
        },
        "ours": {
            "graph_pipeline": require_board_type("local").pipeline,
            "population": base.population,
            "generations": base.generations,
            "batch": base.batch,
            "isolation": base.isolation,
            "workloads": "one tuning after the other, so that each gets its trials",
        },
    }


def measure(base: Settings, options: Any) -> dict[str, Any]:
    import _farm

    pipelines.PIPELINES[STOCK_PIPELINE] = pipelines.GraphPipeline(STOCK_PIPELINE, ("NHWC", "HWIO"), prepack=True)
    with tempfile.TemporaryDirectory(prefix="farm-bench-stock-") as name:
        folder = pathlib.Path(name)
        model = make_model(folder / "two.onnx")
        _machine.wait_until_quiet(options.quick)
        read = _farm.read_model(str(model))
        ours = tune_ours(base, read, options)
        quiet = _machine.wait_until_quiet(options.quick)
        theirs = read.prepare(ours["workloads"][0].target, STOCK_PIPELINE)
        stock = tune_stock(base, [find_kind(theirs, kind) for kind in KINDS], options, folder)
        compared = compare(base, ours, stock, options)
    wall_s = {"stock": stock["seconds"], "ours": ours["seconds"]}
    once_s = {"stock": stock["import_s"], "ours": ours["start_s"]}
    total = {side: wall_s[side] + once_s[side] for side in wall_s}
    return {
        "machine_quiet": quiet and compared["quiet"],
        "wall_s": {side: round(seconds, 1) for side, seconds in wall_s.items()},
        "ratio": _machine.round_to(wall_s["stock"] / wall_s["ours"], 3),
        "once_before_s": {side: round(seconds, 1) for side, seconds in once_s.items()},
        "ratio_with_once_before": _machine.round_to(total["stock"] / total["ours"], 3),
        "once_before_is": "stock: import tvm and its tensor intrinsics in the tuning process (its build workers' own "
        "imports are part of its wall time); ours: tracker, agent, Ray, actors and TVM in each",
        "workloads": compared["workloads"],
    }


def make_model(path: pathlib.Path) -> pathlib.Path:
    """A 3x3 convolution and a dense layer, each with bias and ReLU, side by side in one ONNX file."""
    random = np.random.default_rng(SEED)

    def weight(name: str, *shape: int) -> Any:
        return onnx.numpy_helper.from_array((random.standard_normal(shape) / 16).astype("float32"), name)

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["image", "kernel", "offset"], ["c"], pads=[1, 1, 1, 1], name="conv"),
        helper.make_node("Relu", ["c"], ["image_out"], name="conv_relu"),
        helper.make_node("MatMul", ["rows", "matrix"], ["m"], name="dense"),
        helper.make_node("Add", ["m", "bias"], ["a"], name="dense_bias"),
        helper.make_node("Relu", ["a"], ["rows_out"], name="dense_relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [
            helper.make_tensor_value_info("image", kind, [1, 64, 56, 56]),
            helper.make_tensor_value_info("rows", kind, [128, 512]),
        ],
        [
            helper.make_tensor_value_info("image_out", kind, [1, 64, 56, 56]),
            helper.make_tensor_value_info("rows_out", kind, [128, 512]),
        ],
        [weight("kernel", 64, 64, 3, 3), weight("offset", 64), weight("matrix", 512, 512), weight("bias", 512)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def tune_ours(base: Settings, model: Any, options: Any) -> dict[str, Any]:
    """The farm's tuning, workload by workload."""
    import _farm

    from farm.campaign.one_model import OneModelRequest
    from farm.campaign.plan_models import to_variant
    from farm.campaign.tune import tune
    from farm.store import Store

    with tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home, Store(pathlib.Path(home) / "farm.db") as store:
        settings = dataclasses.replace(base, home=home, seed=SEED)
        tuned = []
        for kind in KINDS:
            _machine.say(f"ours: {kind}, {options.trials} trials")
            request = OneModelRequest(
                "benchmark",
                to_variant(model.source, model.inputs),
                require_board_type("local"),
                options.trials,
                ops=(kind,),
                fresh=True,
            )
            tuned.append(tune(request, settings, store, _farm.Notes()))
        workloads = [workload for one in tuned for workload in one.workloads]
        records = {record.workload: record for record in store.records.fetch()}
        latencies = [
            [row["median_s"] for row in store.trials.fetch(one.campaign, purpose=SEARCH_TRIAL)] for one in tuned
        ]
    return {
        "start_s": tuned[0].seconds_starting,
        "seconds": sum(one.seconds_tuning for one in tuned),
        "workloads": workloads,
        "trials": [one.trials for one in tuned],
        "latencies_s": latencies,
        "records": [records.get(workload.hash) for workload in workloads],
    }


def find_kind(workloads: Sequence[Any], kind: str) -> Any:
    """The one workload of a kind."""
    (found,) = [workload for workload in workloads if workload.kind == kind]
    return found


def tune_stock(base: Settings, workloads: Sequence[Any], options: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Stock's tuning, in a process that imports nothing of this project."""
    request, answer = folder / "request.json", folder / "answer.json"
    with machine_lock(), LocalFarm(base.tracker_port, folder / "logs") as local:
        request.write_text(
            json.dumps(
                {
                    "workloads": [{"name": w.kind, "module_json": w.module_json} for w in workloads],
                    "target": dict(workloads[0].target),
                    "trials": options.trials,
                    "trials_per_iteration": options.iteration,
                    "seed": SEED,
                    "work_dir": str(folder / "stock"),
                    "build_timeout_s": BUILD_TIMEOUT_S,
                    "session_timeout_s": SESSION_TIMEOUT_S,
                    "tracker_host": local.tracker.host,
                    "tracker_port": local.tracker.port,
                    "tracker_key": local.key,
                    "number": base.measure_number,
                    "repeat": base.measure_repeat,
                    "min_repeat_ms": round(base.measure_min_repeat_s * 1e3),
                }
            )
        )
        _machine.say(f"stock: {len(workloads)} workloads, {options.trials} trials each; minutes of silence follow")
        script = pathlib.Path(__file__).with_name("_stock.py")
        (folder / "stock").mkdir()
        subprocess.run(
            [sys.executable, str(script), str(request), str(answer)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def compare(base: Settings, ours: Mapping[str, Any], stock: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Measure both sides' best of each workload in turns, by the farm's own measure."""
    import _farm

    from farm.search.build import builder

    rows, contestants = [], []
    for index, workload in enumerate(ours["workloads"]):
        record, other = ours["records"][index], stock["workloads"][index]
        sides: dict[str, tuple[str, Any]] = {}
        if record is not None:
            sides["ours"] = replay(workload, record.trace_json)
        if other["module_json"] is not None:
            sides["stock"] = other["module_json"], other["arguments"]
        built = {
            side: (builder.build_candidate(module_json, workload.target), arguments)
            for side, (module_json, arguments) in sides.items()
        }
        contestants.append(built)
        rows.append(
            {
                "name": workload.name,
                "mflop": round(workload.flop / 1e6, 1),
                "found_us": {
                    "stock": other["best_s"] and _machine.round_to(other["best_s"] * 1e6),
                    "ours": record and _machine.round_to(record.median_s * 1e6),
                },
                "trials": {
                    "stock": {key: other[key] for key in ("trials", "build_failures", "run_failures", "first_error")},
                    "ours": ours["trials"][index],
                    "ours_until_no_slower_than_stocks_best": other["best_s"]
                    and _machine.trials_until(ours["latencies_s"][index], other["best_s"]),
                },
            }
        )
    with _farm.quiet_board(base) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for row, built in zip(rows, contestants, strict=True):
            samples = measure_in_turns(session, base, built, options.samples)
            row["measured_again_us"] = {side: _machine.spread(values, 1e6) for side, values in samples.items()}
            if len(samples) == 2:
                stock_s, ours_s = (float(np.median(samples[side])) for side in ("stock", "ours"))
                row["latency_ratio_stock_to_ours"] = _machine.round_to(stock_s / ours_s, 3)
    return {"quiet": quiet, "workloads": rows}


def replay(workload: Any, trace_json: str) -> tuple[str, Any]:
    """The scheduled function of a record, and its arguments."""
    from farm.search import traces, tvm_env
    from farm.search.target import make_target

    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    item = traces.restore(trace_json, entry, make_target(workload.target))
    arguments = [[[int(d) for d in argument.shape], str(argument.dtype)] for argument in item.args_info]
    return tvm.ir.save_json(item.sch.mod), arguments


def measure_in_turns(
    session: Any, base: Settings, built: Mapping[str, tuple[bytes, Any]], count: int
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {side: [] for side in built}
    for _ in range(count):
        for side, (library, arguments) in built.items():
            spec = MeasureSpec(
                arguments=tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in arguments),
                number=base.measure_number,
                repeat=base.measure_repeat,
                min_repeat_s=base.measure_min_repeat_s,
                limits=Limits(base.measure_timeout_s, base.measure_memory_bytes, _machine.cores()),
            )
            outcome = session.measure(spec, library)
            if outcome.status is Status.OK:
                samples[side].append(float(np.median(outcome.latency_s)))
    return samples


if __name__ == "__main__":
    main()
