"""Replay sweeps of a real board: its measured tables, with the noise and drift of `_swept_board.py`, many seeds.

    python benchmarks/replayed_sweeps.py --data DIR [--seeds 5]

DIR has `tx2_frames.csv` (network, gpu_hz, memory_hz, frames_per_s) and `tx2_gpu_rails.csv` (gpu_hz, and vdd_in_w of
VGG-19 at the highest memory clock; between its clocks watts are interpolated). One clock: the least energy at a
deadline. Two clocks: all latencies of a network. optuna's sampler is a Gaussian process only where torch is installed.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import pathlib
from collections.abc import Generator, Sequence
from typing import Any

os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
import _machine
import numpy as np
import optuna
import scipy.interpolate
from _swept_board import NoisyBoard

from device_agent.protocol import Clocks, DomainClocks
from farm.points.grid import GridRequest, plan_grid
from farm.points.values import Goal, Objective, PointMeasurement
from farm.sweep.fit.analysis import Analysis
from farm.sweep.fit.pick import pick_point
from farm.sweep.fit.terms import Floats
from farm.sweep.plan.adaptive import Planner, PlannerSettings, Step

MEMORY_HZ = (1_062_400_000, 1_331_200_000, 1_600_000_000, 1_866_000_000)
STEP_W, PER_C = 0.038, 0.01  # one value of the INA3221 on VDD_IN; W per C there
NEAR, KNOWN = 0.01, 0.03
Seconds = dict[tuple[int, int], float]  # by GPU and memory clock
Rows = Generator[int, tuple[float, float] | None, None]  # which to visit; sent the last one's lateness and J
SAMPLER = optuna.samplers.GPSampler if importlib.util.find_spec("torch") else optuna.samplers.TPESampler


def read(folder: pathlib.Path) -> tuple[dict[str, Seconds], dict[int, float]]:
    """Seconds a frame by network; VDD_IN in W by GPU clock."""
    frames: dict[str, Seconds] = {}
    with (folder / "tx2_frames.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of = frames.setdefault(row["network"], {})
            of[int(row["gpu_hz"]), int(row["memory_hz"])] = 1 / float(row["frames_per_s"])
    with (folder / "tx2_gpu_rails.csv").open(encoding="utf-8") as file:
        return frames, {int(row["gpu_hz"]): float(row["vdd_in_w"]) for row in csv.DictReader(file)}


def fill(given: Seconds) -> Seconds:
    """All four memory clocks: between measured ones by the power mean of a GPU's and a memory's time, p of 3."""
    filled = dict(given)
    for gpu in {gpu for gpu, _ in given}:
        known = sorted((memory**-3.0, given[gpu, memory] ** 3) for g, memory in given if g == gpu)
        for memory in MEMORY_HZ if len(known) < len(MEMORY_HZ) else ():
            filled.setdefault((gpu, memory), float(np.interp(memory**-3.0, *zip(*known, strict=True))) ** (1 / 3))
    return dict(sorted(filled.items()))


def make_board(seconds: Seconds, watts: Floats | None, seed: int) -> NoisyBoard:
    """A board whose truth is a table of clocks in rising order."""
    gpus, memories = (tuple(sorted(set(column))) for column in zip(*seconds, strict=True))
    clocks = Clocks((), DomainClocks("gpu", available_hz=gpus), DomainClocks("memory", available_hz=memories))
    grid = plan_grid(clocks, GridRequest(gpu_freqs_hz=(), memory_freqs_hz=() if len(memories) > 1 else None))
    return NoisyBoard(grid, np.array(list(seconds.values())), watts, np.random.default_rng(seed), STEP_W, PER_C)


def by_planner(board: NoisyBoard, goal: Goal, seed: int) -> list[Analysis]:
    """The analysis after each visit until the planner stops."""
    planner, visits, found = Planner(board.grid, goal, PlannerSettings(seed=seed)), list[PointMeasurement](), []
    while (step := planner.decide_next(visits)).step is Step.MEASURE:
        visits.append(board.visit(step.key))
        found.append(planner.analyse(visits))
    return found


def by_choice(board: NoisyBoard, rows: Rows, deadline_s: float) -> list[int | None]:
    """After each of as many visits as points, the row of the least energy measured in time."""
    told: list[tuple[float, float]] = []
    best, picks = None, list[int | None]()
    for _ in board.grid.points:
        row = rows.send(told[-1] if told else None)
        visit = board.visit(board.grid.points[row].key)
        told.append((visit.latency.value / deadline_s - 1, visit.energy.value))
        best = row if min(((j, late) for late, j in told if late <= 0), default=()) == told[-1][::-1] else best
        picks.append(best)
    return picks


def ask_optuna(board: NoisyBoard, seed: int) -> Rows:
    """The rows that optuna's sampler chooses, some of them again."""
    study = optuna.create_study(sampler=SAMPLER(seed=seed, n_startup_trials=3))
    while True:
        trial = study.ask()
        late, energy_j = (yield trial.suggest_int("row", 0, len(board.grid) - 1)) or (0.0, 0.0)
        trial.set_constraint("deadline", late)
        study.tell(trial, energy_j)


def replay(seconds: Seconds, watts: Floats, deadline_s: float, seed: int) -> dict[str, dict[str, Any]]:
    """One deadline: each way's visits, those until its pick was near the best, its last regret (1: late, none)."""
    board, goal = make_board(seconds, watts, seed), Goal(deadline_s=deadline_s)
    truth = np.where(board.latency_s <= deadline_s, board.energy_j, np.inf)

    def score(picks: Sequence[int | None]) -> dict[str, Any]:
        regrets = [1.0 if row is None else min(truth[row] / truth.min() - 1, 1.0) for row in picks]
        near = next((count for count, regret in enumerate(regrets, 1) if regret <= NEAR), len(picks) + 1)
        return {"visits": len(picks), "near": near, "regret": regrets[-1]}

    analyses = by_planner(board, goal, seed)
    bests = [pick_point(each, goal).best for each in analyses]
    analysis, held = analyses[-1], []
    for row in (row for key, row in board.rows.items() if key not in analysis.measured):
        told = analysis.predict(row)
        held += [told.latency.contains(board.latency_s[row]), told.energy.contains(board.energy_j[row])]
    mixed = np.random.default_rng(seed).permutation(truth.size).tolist()
    ways = {"full grid": (row for row in range(truth.size)[::-1]), "random order": (row for row in mixed)}
    ways["optuna"] = ask_optuna(board, seed)
    found = {name: score(by_choice(make_board(seconds, watts, seed), way, deadline_s)) for name, way in ways.items()}
    own = score([best and board.rows[best.point.key] for best in bests])
    return {"planner": own | {"points": len(analysis.measured), "held": held}, **found}


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over deadlines and seeds."""
    found = {key: np.mean([run[key] for run in runs]) for key in ("visits", "points", "near") if key in runs[0]}
    regrets = np.array([run["regret"] for run in runs])
    found |= {"regret_mean": regrets.mean(), "regret_worst": regrets.max(), "within": (regrets <= NEAR).mean()}
    if "held" in runs[0]:
        found["points_most"] = max(run["points"] for run in runs)
        found["predicted_intervals_held"] = np.mean([hit for run in runs for hit in run["held"]])
    return {name: round(float(value), 4) for name, value in found.items()}


def replay_latencies(seconds: Seconds, seed: int) -> dict[str, float]:
    """Two clocks: visits until all latencies are known; visits, points and the worst error when the planner stops."""
    board = make_board(seconds, None, seed)
    analyses = by_planner(board, Goal(Objective.LATENCY), seed)
    means = [each.model.latency.mean if each.model else np.inf for each in analyses]
    errors = [float(np.abs(np.exp(mean) / board.latency_s - 1).max()) for mean in means]
    known = max((count for count, error in enumerate(errors, 1) if error > KNOWN), default=0) + 1
    points = len(analyses[-1].measured)
    return {"until_known": known, "visits": len(errors), "points": points, "worst_error": round(errors[-1], 4)}


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the measured tables")
    parser.add_argument("--seeds", type=int, default=5, help="boards per deadline and network")
    options = parser.parse_args()
    if options.data is None:
        _machine.say("without --data there is nothing to replay")
        return
    if not (options.data / "tx2_frames.csv").is_file():
        parser.error(f"{options.data} has no tx2_frames.csv")
    seeds, deadlines = (1, 2) if options.quick else (options.seeds, 20)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _machine.only_json() as emit:
        frames, rails = read(options.data)
        one = {at: seconds for at, seconds in sorted(frames["vgg19"].items()) if at[1] == max(frames["vgg19"])[1]}
        rows = sorted(rails.items())
        watts = scipy.interpolate.PchipInterpolator(*zip(*rows, strict=True))([gpu for gpu, _ in one])
        deadlines_s = min(one.values()) * np.geomspace(1.05, 2.5, deadlines)
        runs = [replay(one, watts, float(at_s), seed) for at_s in deadlines_s for seed in range(seeds)]
        figures: dict[str, Any] = {name: summarise([run[name] for run in runs]) for name in runs[0]}
        figures["watts"] = {"clocks": len(one), "measured": sum(gpu in rails for gpu, _ in one)}
        for network, given in frames.items():
            found = [replay_latencies(fill(given), seed) for seed in range(seeds)]
            figures[f"{network}, {len(given)} measured"] = found
        emit("replayed_sweeps", {"seeds": seeds, "deadlines": deadlines, "optuna": SAMPLER.__name__}, figures)


if __name__ == "__main__":
    main()
