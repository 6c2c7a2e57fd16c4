"""Replay sweeps of a real board: its measured tables, with a simulated board's noise and drift (`_swept_board.py`).

    python benchmarks/replayed_sweeps.py --data DIR [--seeds 5] [--deadlines 20]

DIR has `tx2_frames.csv` (network, gpu_hz, memory_hz, frames_per_s) and `tx2_gpu_rails.csv` (gpu_hz, vdd_in_w and
vdd_sys_gpu_w of VGG-19 at the highest memory clock). One clock: the least energy of an inference at a deadline, found by
the planner, by a full grid, in a random order, and by optuna (a Gaussian process where torch is installed, else TPE).
Two clocks: how many visits tell the latencies of a network at all points.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

# Before NumPy is imported: threads on small matrices only cost time.
os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
import _machine
import numpy as np
import scipy.interpolate
import scipy.optimize
from _swept_board import NoisyBoard

from device_agent.protocol import Clocks, DomainClocks
from farm.points.grid import GridRequest, plan_grid
from farm.points.values import Goal, Objective, PointMeasurement
from farm.sweep.fit.pick import pick_point
from farm.sweep.fit.terms import Floats, Knee
from farm.sweep.plan.adaptive import Planner, PlannerSettings, Step

NETWORK, MEMORY_HZ = "vgg19", (1_062_400_000, 1_331_200_000, 1_600_000_000, 1_866_000_000)
# One value of the INA3221 on VDD_IN, and what leaks there.
STEP_W, PER_C = 0.038, 0.01
DEADLINES = (1.02, 2.5)  # times the shortest latency, in equal ratios
NEAR, KNOWN, MOST = 0.01, 0.03, 40
Visits = list[PointMeasurement]


def read_frames(folder: pathlib.Path) -> dict[str, dict[tuple[int, int], float]]:
    """Seconds a frame by network, GPU and memory clock."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    with (folder / "tx2_frames.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            at = int(row["gpu_hz"]), int(row["memory_hz"])
            found.setdefault(row["network"], {})[at] = 1 / float(row["frames_per_s"])
    return found


def read_watts(folder: pathlib.Path, clocks: Sequence[int]) -> tuple[Floats, int]:
    """VDD_IN at each clock, and at how many it was measured; the others are filled in.

    The GPU's rail by s V + c f V^2, V a floor and then a line; the rest, which is smooth, by interpolation.
    """
    with (folder / "tx2_gpu_rails.csv").open(encoding="utf-8") as file:
        rows = sorted((int(r["gpu_hz"]), float(r["vdd_in_w"]), float(r["vdd_sys_gpu_w"])) for r in csv.DictReader(file))
    hz, total, gpu = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))

    def rail(values: Floats, at_hz: Floats) -> Floats:
        static, dynamic, at, rise = values
        volt = Knee(at, rise).voltage(at_hz / max(clocks))
        return np.asarray(static * volt + dynamic * at_hz / max(clocks) * volt**2)

    bounds = ([0, 0, 0.1, 0], [5, 20, 0.9, 1])
    fitted = scipy.optimize.least_squares(lambda v: rail(v, hz) / gpu - 1, (0.2, 5, 0.5, 0.3), bounds=bounds).x
    asked = np.array(clocks, dtype=np.float64)
    rest = scipy.interpolate.PchipInterpolator(hz, total - gpu)(asked)
    known = dict(zip(hz, total, strict=True))
    local = np.interp(asked, hz, gpu / rail(fitted, hz))
    filled = [known.get(f, watt) for f, watt in zip(asked, local * rail(fitted, asked) + rest, strict=True)]
    return np.array(filled), sum(f in known for f in asked)


def fill_frames(seconds: dict[tuple[int, int], float]) -> tuple[dict[tuple[int, int], float], int]:
    """All 52 points, and how many of them were measured: others by a power mean of two times, less its local errors."""
    at = np.array(list(seconds), dtype=np.float64)
    logs = np.log(list(seconds.values()))

    def form(v: Floats, at_hz: Floats) -> Floats:
        gpu, memory = np.exp(v[0]) / (at_hz[:, 0] / 1e9), np.exp(v[1]) / (at_hz[:, 1] / 1e9)
        return np.asarray(np.log(gpu ** v[2] + memory ** v[2]) / v[2])

    fitted = scipy.optimize.least_squares(lambda v: form(v, at) - logs, (-3, -3, 3), bounds=(-15, [5, 5, 9])).x
    errors = dict(zip(seconds, logs - form(fitted, at), strict=True))
    filled = {}
    for gpu in sorted({gpu for gpu, _ in seconds}):
        given = sorted(memory for g, memory in seconds if g == gpu)
        for memory in sorted({*MEMORY_HZ, *given}):
            error = np.interp(memory, given, [errors[gpu, m] for m in given])
            filled[gpu, memory] = float(np.exp(form(fitted, np.array([[gpu, memory]]))[0] + error))
    return filled, len(seconds)


def make_board(seconds: dict[tuple[int, int], float], watts: Floats | None, seed: int) -> NoisyBoard:
    """A board whose truth is a table of clocks."""
    gpus, memories = (tuple(sorted(set(column))) for column in zip(*seconds, strict=True))
    clocks = Clocks((), DomainClocks("gpu", available_hz=gpus), DomainClocks("memory", available_hz=memories))
    grid = plan_grid(clocks, GridRequest(gpu_freqs_hz=(), memory_freqs_hz=() if len(memories) > 1 else None))
    hz = [[d.freq_hz for d in point.domains if d.held] for point in grid.points]
    latency = np.array([seconds[at[0], (at[1:] or memories)[0]] for at in hz])  # type: ignore[index]
    return NoisyBoard(grid, latency, watts, np.random.default_rng(seed), STEP_W, PER_C)


def best_of(board: NoisyBoard, visits: Visits, deadline_s: float) -> int | None:
    """The row of the least energy measured at the deadline: what an order without a fit picks."""
    fits = [visit for visit in visits if visit.latency.value <= deadline_s and visit.energy]
    best = min(fits, key=lambda visit: visit.energy.value if visit.energy else 0, default=None)
    return None if best is None else board.rows[best.key]


def by_order(board: NoisyBoard, order: Sequence[int], deadline_s: float) -> list[int | None]:
    """The pick after each visit."""
    visits: Visits = []
    picks = []
    for row in order:
        visits.append(board.visit(board.grid.points[row].key))
        picks.append(best_of(board, visits, deadline_s))
    return picks


def by_optuna(board: NoisyBoard, seed: int, deadline_s: float) -> list[int | None]:
    """The pick after each visit of optuna's sampler, which may visit a point again."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kind = optuna.samplers.GPSampler if importlib.util.find_spec("torch") else optuna.samplers.TPESampler
    late: dict[int, float] = {}
    sampler = kind(seed=seed, n_startup_trials=3, constraints_func=lambda trial: (late[trial.number],))
    study, visits, picks = optuna.create_study(sampler=sampler), list[PointMeasurement](), []
    for _ in range(len(board.grid)):
        trial = study.ask()
        visit = board.visit(board.grid.points[trial.suggest_int("row", 0, len(board.grid) - 1)].key)
        visits.append(visit)
        late[trial.number] = visit.latency.value / deadline_s - 1
        study.tell(trial, visit.energy.value if visit.energy else 0.0)
        picks.append(best_of(board, visits, deadline_s))
    return picks


def by_planner(
    board: NoisyBoard, goal: Goal, seed: int, look: Callable[[Planner, Visits], Any]
) -> tuple[list[Any], Planner, Visits, str]:
    """What `look` sees after each visit, until the planner stops."""
    planner, visits, seen = Planner(board.grid, goal, PlannerSettings(seed=seed)), list[PointMeasurement](), []
    while (step := planner.decide_next(visits)).step is Step.MEASURE and len(visits) < MOST:
        visits.append(board.visit(step.key))
        seen.append(look(planner, visits))
    return seen, planner, visits, f"{step.step}: {step.reason}"


def replay_deadline(make: Callable[[int], NoisyBoard], deadline_s: float, seed: int) -> dict[str, dict[str, Any]]:
    """One deadline by all four: the pick after each visit; of the planner also what its predictions hold."""
    board, goal = make(seed), Goal(deadline_s=deadline_s)
    truth = np.where(board.latency_s <= deadline_s, board.energy_j, np.inf)

    def look(planner: Planner, visits: Visits) -> int | None:
        best = pick_point(planner.analyse(visits), goal).best
        return None if best is None else board.rows[best.point.key]

    def score(picks: Sequence[int | None]) -> dict[str, Any]:
        regrets = [float("inf") if row is None else float(truth[row] / truth.min() - 1) for row in picks]
        near = next((count for count, regret in enumerate(regrets, 1) if regret <= NEAR), None)
        return {"visits": len(picks), "near": near, "regret": regrets[-1]}

    picks, planner, visits, reason = by_planner(board, goal, seed, look)
    analysis = planner.analyse(visits)
    held = []
    for row in range(len(board.grid)):
        told = analysis.predict(row) if board.grid.points[row].key not in analysis.measured else None
        if told is not None and told.energy is not None:
            held += [told.latency.contains(board.latency_s[row]), told.energy.contains(board.energy_j[row])]
    orders = {"grid": list(range(len(board.grid)))[::-1], "random": np.random.default_rng(seed).permutation(len(truth))}
    return {
        "planner": score(picks) | {"points": len(analysis.measured), "held": held, "reason": reason},
        **{name: score(by_order(make(seed), order, deadline_s)) for name, order in orders.items()},
        "optuna": score(by_optuna(make(seed), seed, deadline_s)),
    }


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over deadlines and seeds; one that never came near counts as all its visits and one more."""
    regrets = [run["regret"] for run in runs]
    found = {
        "visits_mean": statistics.mean(run["visits"] for run in runs),
        "visits_until_near_mean": statistics.mean(run["near"] or run["visits"] + 1 for run in runs),
        "never_near": sum(run["near"] is None for run in runs),
        "regret_median": statistics.median(regrets),
        "regret_mean": statistics.mean(regret for regret in regrets if np.isfinite(regret)),
        "regret_within_1_percent": statistics.mean(regret <= NEAR for regret in regrets),
        "no_pick_or_late": sum(not np.isfinite(regret) for regret in regrets),
    }
    if held := [hit for run in runs for hit in run.get("held", ())]:
        points = [run["points"] for run in runs]
        found |= {"points_mean": statistics.mean(points), "points_most": max(points)}
        found |= {"visits_most": max(run["visits"] for run in runs), "predicted_intervals_held": statistics.mean(held)}
    return {name: round(value, 4) for name, value in found.items()}


def replay_latencies(seconds: dict[tuple[int, int], float], seeds: int) -> dict[str, Any]:
    """Two clocks, latency alone: the visits until every latency is known, and when the planner stops."""
    known, ended, worst = [], [], []
    for seed in range(seeds):
        board = make_board(seconds, None, seed)

        def look(planner: Planner, visits: Visits, board: NoisyBoard = board) -> float:
            model = planner.analyse(visits).model
            return float(np.abs(np.exp(model.latency.mean) / board.latency_s - 1).max()) if model else np.inf

        errors, planner, visits, _ = by_planner(board, Goal(Objective.LATENCY), seed, look)
        unknown = [count for count, error in enumerate(errors, 1) if error > KNOWN]
        known.append(max(unknown, default=0) + 1)
        ended.append((len(visits), len({visit.key for visit in visits})))
        worst.append(errors[-1])
    return {
        "visits_until_all_known": known,
        "visits_and_points_when_stopped": ended,
        "worst_error_when_stopped": [round(error, 4) for error in worst],
    }


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the measured tables")
    parser.add_argument("--seeds", type=int, default=5, help="boards per deadline and network (default: 5)")
    parser.add_argument("--deadlines", type=int, default=20, help="deadlines (default: 20)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.deadlines = 1, 2
    with _machine.only_json() as emit:
        frames = read_frames(options.data)
        one = {at: s for at, s in sorted(frames[NETWORK].items()) if at[1] == MEMORY_HZ[-1]}
        watts, measured = read_watts(options.data, [gpu for gpu, _ in one])
        runs = []
        for deadline_s in min(one.values()) * np.geomspace(*DEADLINES, options.deadlines):
            for seed in range(options.seeds):
                runs.append(replay_deadline(lambda s: make_board(one, watts, s), float(deadline_s), seed))
                _machine.say(f"{deadline_s * 1e3:.1f} ms, {seed}: {runs[-1]}")
        figures: dict[str, Any] = {
            "one_clock": {"points": len(one), "watts_measured": measured, "watts_filled": len(one) - measured}
            | {name: summarise([run[name] for run in runs]) for name in runs[0]}
        }
        for network, given in frames.items():
            seconds, count = fill_frames(given)
            found = {"points": len(seconds), "measured": count, "filled": len(seconds) - count}
            figures[network] = found | replay_latencies(seconds, options.seeds)
            _machine.say(f"{network}: {figures[network]}")
        emit("replayed_sweeps", {"seeds": options.seeds, "deadlines": options.deadlines}, figures)


if __name__ == "__main__":
    main()
