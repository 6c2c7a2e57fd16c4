"""Stock MetaSchedule in a process of its own: `python _stock.py REQUEST.json ANSWER.json`; used by
vs_metaschedule.py.

Imports nothing of this project, so that nothing here is sped up by it.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
import time
from typing import Any


def main() -> None:
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    import tvm

    # TuneContext does this import on first use; here, so that it is timed by itself.
    import tvm.s_tir.tensor_intrin

    import_s = time.perf_counter() - began
    answer = tune(tvm, request)
    pathlib.Path(sys.argv[2]).write_text(json.dumps(answer | {"import_s": import_s}))


def tune(tvm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Tune all workloads with one call of `tune_tasks`."""
    import tvm.s_tir.meta_schedule as ms

    logging.basicConfig(level=logging.WARNING)
    names = [workload["name"] for workload in request["workloads"]]
    modules = [tvm.ir.load_json(workload["module_json"]) for workload in request["workloads"]]
    target = tvm.target.Target(request["target"])
    counter, counts = make_counter(ms, len(names))
    work_dir = request["work_dir"]
    began = time.perf_counter()
    tasks = [
        # As ms.relax_integration.extracted_tasks_to_tune_contexts makes them.
        ms.TuneContext(
            mod=module,
            target=target,
            space_generator="post-order-apply",
            search_strategy="evolutionary",
            task_name=name,
            logger=logger,
            rand_state=seed,
            num_threads="physical",
        ).clone()
        for name, module, logger, seed in zip(
            names,
            modules,
            ms.logging.get_loggers_from_work_dir(work_dir, names),
            ms.utils.fork_seed(request["seed"], n=len(names)),
            strict=True,
        )
    ]
    database = ms.tune_tasks(
        tasks=tasks,
        task_weights=[1.0] * len(tasks),
        work_dir=work_dir,
        max_trials_global=request["trials"] * len(tasks),
        max_trials_per_task=request["trials"],
        num_trials_per_iter=request["trials_per_iteration"],
        builder=ms.builder.LocalBuilder(timeout_sec=request["build_timeout_s"]),
        runner=ms.runner.RPCRunner(
            rpc_config=ms.runner.RPCConfig(
                tracker_host=request["tracker_host"],
                tracker_port=request["tracker_port"],
                tracker_key=request["tracker_key"],
                session_timeout_sec=request["session_timeout_s"],
            ),
            evaluator_config=ms.runner.EvaluatorConfig(
                number=request["number"],
                repeat=request["repeat"],
                min_repeat_ms=request["min_repeat_ms"],
                enable_cpu_cache_flush=False,
            ),
            f_create_session=share_out(request["tracker_keys"], work_dir) if "tracker_keys" in request else None,
            max_workers=len(request.get("tracker_keys", "1")),
        ),
        cost_model="xgb",
        measure_callbacks=[*ms.measure_callback.MeasureCallback.create("default"), counter],
    )
    seconds = time.perf_counter() - began
    workloads = []
    for index, (name, module) in enumerate(zip(names, modules, strict=True)):
        schedule = database.query_schedule(module, target, name)
        record = database.query_tuning_record(module, target, name)
        workloads.append(
            {
                **counts[index],
                "best_s": None if record is None else sum(map(float, record.run_secs)) / len(record.run_secs),
                "module_json": None if schedule is None else tvm.ir.save_json(schedule.mod),
                "arguments": None if schedule is None else arguments_of(ms, schedule.mod),
            }
        )
    return {"seconds": seconds, "workloads": workloads}


def share_out(keys: list[str], folder: str) -> Any:
    """For RPCRunner: how each of its workers gets a board of its own, where every board has a key of its own."""

    def connect(config: Any) -> Any:
        import fcntl
        import os

        if "STOCK_BOARD" not in os.environ:
            for number, key in enumerate(keys):
                descriptor = os.open(f"{folder}/board-{number}", os.O_RDWR | os.O_CREAT)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as this worker lives
                except BlockingIOError:
                    os.close(descriptor)
                else:
                    os.environ["STOCK_BOARD"] = key
                    break
        return config._replace(tracker_key=os.environ["STOCK_BOARD"]).connect_server()

    return connect


def make_counter(ms: Any, tasks: int) -> tuple[Any, list[dict[str, Any]]]:
    """A measure callback, and what it counts per task."""
    from tvm.ir.utils import derived_object

    counts: list[dict[str, Any]] = [
        {"trials": 0, "build_failures": 0, "run_failures": 0, "first_error": ""} for _ in range(tasks)
    ]

    @derived_object
    class Counter(ms.measure_callback.PyMeasureCallback):
        def apply(self, scheduler: Any, task: int, candidates: Any, builds: Any, results: Any) -> None:
            mine = counts[task]
            for build, result in zip(builds, results, strict=True):
                mine["trials"] += 1
                if build.error_msg:
                    mine["build_failures"] += 1
                elif result.error_msg:
                    mine["run_failures"] += 1
                if not mine["first_error"]:
                    mine["first_error"] = str(build.error_msg or result.error_msg or "")[-300:]

    return Counter(), counts


def arguments_of(ms: Any, module: Any) -> list[Any]:
    """Shapes and types of what the scheduled function takes, its weights packed as it wants them."""
    found = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
    return [[[int(d) for d in argument.shape], str(argument.dtype)] for argument in found]


if __name__ == "__main__":
    main()
