"""Compare a campaign with stock MetaSchedule: the same workloads, trials, boards and tracker, wall time in one run.

Virtual boards take a set time per candidate, so only the host differs. Stock is `ms.tune_tasks` with LocalBuilder,
RPCRunner (one worker per board), evolutionary search and XGBoost, with the settings in `settings`. Ours runs from
submission, with the start of engine and Ray, to the last counted trial; stock's is its whole process. Verification,
which stock lacks, is reported separately. `search_efficiency.py` compares the quality of results. Stock's libraries
are linked on the board, which is this machine. Default: 3 workloads x 16 trials on 2 boards, about 10 minutes on two
idle cores; `--boards 2,4` takes twice as long.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import _campaigns
import _machine

GOALS = {2: 0.4, 4: 0.28}

# Long enough for a build worker that first imports every tensor intrinsic while its siblings do the same.
BUILD_TIMEOUT_S = 600.0
SESSION_TIMEOUT_S = 60
LIMIT_S = 3600.0
SEED = 0


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", default="2", help="numbers of boards to compare on (default: 2)")
    parser.add_argument("--trials", type=int, default=16, help="per workload and side (default: 16)")
    parser.add_argument("--iteration", type=int, default=0, help="stock's per iteration (default: as many as --trials)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a board times a candidate (default: 2)")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.seconds = 4, 1.0
    options.iteration = options.iteration or options.trials
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("vs_metaschedule", vars(options) | settings_of(), measure(options, folder))


def settings_of() -> dict[str, Any]:
    return {
        "stock": {
            "builder": f"LocalBuilder(timeout_sec={BUILD_TIMEOUT_S:g}); the default 30 goes into imports",
            "export": "tar of objects, linked on the board: the default",
            "runner": "RPCRunner, a worker per board; each board has its own key, so that f_create_session names it",
            "search": "evolutionary, population 512, 4 generations: the defaults",
            "cost_model": "xgb: the default; it ranks at random until it knows 100 candidates",
            "task_scheduler": "gradient: the default",
        },
        "ours": "a campaign with its defaults; records are verified afterwards (verify_top 1)",
    }


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    counts = [int(text) for text in options.boards.split(",")]
    rows = []
    with _campaigns.rack(max(counts)) as rack:
        rack.set_timing(options.seconds)
        quiet = _machine.wait_until_quiet(options.quick)
        for index, count in enumerate(counts):
            model = _campaigns.make_model(folder / f"layers-{index}.onnx", 28 + 2 * index)
            rows.append(compare_on(rack, model, count, options, folder / str(count)))
    return {
        "machine_quiet": quiet,
        "ratio_is": "ours / stock, wall time; without_imports: less what stock's compilers spend on importing",
        "runs": rows,
    }


def compare_on(
    rack: _campaigns.Rack, model: pathlib.Path, count: int, options: Any, folder: pathlib.Path
) -> dict[str, Any]:
    """Both sides on `count` boards, ours first."""
    loads = [os.getloadavg()[0]]
    _machine.say(f"ours: {count} boards")
    carried = _campaigns.run_campaign(
        f"boards-{count}", model, count, {"trials": 3 * options.trials, "per_workload": options.trials},
        search={"seed": SEED, "ops": _campaigns.KINDS},
        measure={"repeat": 3, "min_repeat": options.seconds / 3, "timeout": options.seconds + 30, "verify_top": 1},
    )  # fmt: skip
    loads.append(os.getloadavg()[0])
    folder.mkdir()
    stock = run_stock(rack, carried.workloads, count, options, folder)
    loads.append(os.getloadavg()[0])
    searched_s = carried.searched_at - carried.submitted_at
    batches = sum(-(-each["trials"] // options.iteration) for each in stock["workloads"])
    imports_s = batches * stock["import_s"]
    row = {
        "boards": count,
        "goal": GOALS.get(count),
        "trials": {"ours": len(carried.trials), "stock": sum(each["trials"] for each in stock["workloads"])},
        "wall_s": {"ours": round(searched_s, 1), "stock": round(stock["wall_s"], 1)},
        "ratio": _machine.round_to(searched_s / stock["wall_s"], 3),
        "of_which": {
            "ours_until_first_trial_s": round(carried.first_at - carried.submitted_at, 1),
            "stock_tuning_s": round(stock["seconds"], 1),
            "stock_import_s": round(stock["import_s"], 1),
            "stock_batches": batches,
        },
        "ratio_without_imports": _machine.round_to(searched_s / max(1.0, stock["seconds"] - imports_s), 3),
        "ours_with_winners_checked_s": round(carried.ended_at - carried.submitted_at, 1),
        "ratio_with_winners_checked": _machine.round_to((carried.ended_at - carried.submitted_at) / stock["wall_s"], 3),
        "failures": {
            "ours": sum(t["status"] != "ok" for t in carried.trials),
            "stock": sum(each["build_failures"] + each["run_failures"] for each in stock["workloads"]),
        },
        "load_1min": {"before": round(loads[0], 1), "between": round(loads[1], 1), "after": round(loads[2], 1)},
    }
    _machine.say(f"  {row}")
    return row


def run_stock(
    rack: _campaigns.Rack, workloads: Sequence[Any], count: int, options: Any, folder: pathlib.Path
) -> dict[str, Any]:
    """Stock's tuning, in a process that imports nothing of this project."""
    request, answer = folder / "request.json", folder / "answer.json"
    (folder / "stock").mkdir()
    request.write_text(
        json.dumps(
            {
                "workloads": [{"name": f"w{i}", "module_json": each.module_json} for i, each in enumerate(workloads)],
                "target": dict(workloads[0].target),
                "trials": options.trials,
                "trials_per_iteration": options.iteration,
                "seed": SEED,
                "work_dir": str(folder / "stock"),
                "build_timeout_s": BUILD_TIMEOUT_S,
                "session_timeout_s": SESSION_TIMEOUT_S,
                "tracker_host": rack.tracker[0],
                "tracker_port": rack.tracker[1],
                "tracker_key": rack.key(rack.boards[0]),
                "tracker_keys": [rack.key(board) for board in rack.boards[:count]],
                "number": 1,
                "repeat": 3,
                "min_repeat_ms": round(options.seconds / 3 * 1e3),
            }
        )
    )
    _machine.say(f"stock: {count} boards; minutes of silence follow")
    script = pathlib.Path(__file__).with_name("_stock.py")
    began = time.monotonic()
    subprocess.run(
        [sys.executable, str(script), str(request), str(answer)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(answer.read_text())
    return found | {"wall_s": time.monotonic() - began}


if __name__ == "__main__":
    main()
