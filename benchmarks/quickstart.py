"""Run the installed `farm quickstart --json --fresh` a few times, each in a FARM_HOME of its own, against its goals.

A goal is met where every run meets it. Default budget: 2 runs, each of two and a half minutes if the goals hold.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import _machine

# What the project promises of a 2-core machine: (figure, at most or at least, bound).
GOALS = (
    ("seconds_to_first_trial", "at_most", 30.0),
    ("seconds_total", "at_most", 150.0),
    ("speedup_vs_untuned", "at_least", 15.0),
    ("ratio_to_onnxruntime", "at_most", 0.85),
    ("overhead_per_trial_ms", "at_most", 20.0),
)
FIGURES = (
    "seconds_to_first_trial",
    "seconds_total",
    "seconds_wall",
    "speedup_vs_untuned",
    "ratio_to_onnxruntime",
    "overhead_per_trial_ms",
)
LIMIT_S = 1800.0
# Of the sweep of a simulated board: untuned and tuned.
VARIANTS = 2


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--times", type=int, default=2, help="how often (default: 2)")
    parser.add_argument("--model", default="squeezenet1.1", help="zoo name or ONNX file (default: squeezenet1.1)")
    parser.add_argument("--trials", type=int, default=128, help="of each run (default: 128)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it (default: 0); goals are for none")
    options = parser.parse_args()
    if options.quick:
        options.times, options.trials = 1, 16
    with _machine.only_json() as emit:
        emit("quickstart", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    quiet, documents = [], []
    for number in range(options.times):
        _machine.say(f"quickstart {number + 1} of {options.times}")
        quiet.append(_machine.wait_until_quiet(options.quick or options.load > 0))
        with _machine.busy(options.load):
            documents.append(run_once(options.model, options.trials))
        _machine.say(f"{documents[-1]['seconds_wall']:.0f} s, picks of its sweep: {count_picks(documents[-1])}")
    figures = {name: [d[name] for d in documents if d.get(name) is not None] for name in FIGURES}
    goals = {}
    for name, kind, bound in GOALS:
        values = figures[name]
        worst = (max if kind == "at_most" else min)(values) if values else None
        met = worst is not None and (worst <= bound if kind == "at_most" else worst >= bound)
        goals[name] = {kind: bound, "worst": worst and _machine.round_to(worst), "met": met}
    return {
        "machine_quiet": all(quiet),
        "figures": {name: _machine.spread(values) for name, values in figures.items()},
        "latency_ms": {
            name: _machine.spread([d["latency_ms"][name]["median"] for d in documents if d["latency_ms"][name]])
            for name in ("untuned", "predicted", "tuned", "onnxruntime")
        },
        "trials": [d["trials"] for d in documents],
        "outputs_match": [d["outputs_match"] for d in documents],
        "runs_with_a_pick_for_both": sum(count_picks(d) == VARIANTS for d in documents),
        "goals": goals,
        "all_goals_met": all(goal["met"] for goal in goals.values()),
    }


def count_picks(document: dict[str, Any]) -> int:
    """For how many variants the sweep at its end has found the best point."""
    return sum(series["pick"] is not None for series in (document["sweep"] or {"series": []})["series"])


def run_once(model: str, trials: int) -> dict[str, Any]:
    """The document of one run; `seconds_wall` is the whole command's, the interpreter's start included."""
    command = [str(pathlib.Path(sys.executable).with_name("farm")), "quickstart", "--json", "--fresh"]
    with _machine.scratch() as folder:
        home = folder / "home"
        # The linker's cache belongs to FARM_HOME here: a new user's is empty.
        environment = {key: value for key, value in os.environ.items() if key != "FARM_ZIG_CACHE"}
        environment["FARM_HOME"] = str(home)
        command += ["--model", model, "--trials", str(trials), "--out", str(folder / "report")]
        began = time.monotonic()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
        seconds = time.monotonic() - began
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document | {"seconds_wall": seconds}


if __name__ == "__main__":
    main()
