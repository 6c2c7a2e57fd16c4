"""Documents of campaigns as the store and its engine make them, for tests of what is drawn and written from them."""

from __future__ import annotations

import random
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.report.campaign_document import draw_curves, list_gains
from farm.store.totals import CountedTrial
from farm.types.campaigns import WorkloadOrder
from tests.unit.campaign_orders import make_order, make_type

PLACES = (("jetson-nano", "default"), ("jetson-nano", "a57=1428MHz"), ("jetson-tx2", "default"))
MODELS = {"resnet18": 9, "detector batch 4": 5, "mlp": 3}


def make_document(
    seed: int = 0, trials: int = 900, places: tuple[tuple[str, str], ...] = PLACES, simulated: bool = True
) -> dict[str, Any]:
    """What `farm campaign show --json` prints of a finished campaign; equal arguments give equal documents."""
    random_ = random.Random(seed)
    workloads = _make_workloads(random_)
    kinds = list(dict.fromkeys(kind for kind, _ in places))
    models = [{"name": name, "origin": f"zoo:{name}", "sha256": "ab" * 32, "batch": None} for name in MODELS]
    works = tuple(WorkloadOrder(**each) for each in workloads)
    types = [
        make_type(kind, works).model_copy(
            update={
                "simulated": simulated,
                "points": {point: OperatingPoint() for other, point in places if other == kind},
            }
        )
        for kind in kinds
    ]
    order = make_order("vision-q4", models=models, types=types)
    tasks = [(kind, point, each) for kind, point in places for each in workloads]
    course: list[CountedTrial] = []
    best: dict[Any, float] = {}
    for _ in range(trials):
        kind, point, workload = random_.choice(tasks)
        least_s = workload["flop"] / (9e9 if "tx2" in kind else 5e9) * (0.8 if "MHz" in point else 1.0)
        median_s = least_s * (1 + random_.expovariate(0.35)) if random_.random() > 0.1 else None
        key = (kind, point, workload["hash"])
        if median_s is not None:
            best[key] = min(median_s, best.get(key, median_s))
        course.append(CountedTrial(kind, workload["hash"], point, median_s))
    return {
        "campaign": 3,
        "name": "vision-q4",
        "owner": "ana@desk",
        "priority": 0,
        "state": "finished",
        "reason": f"{trials:,} trials are spent",
        "wanted": "run",
        "command": "campaign run vision.yaml",
        "started_at": 1_700_000_000.0,
        "finished_at": 1_700_012_000.0,
        "models": models,
        "types": [
            {"type": each.board_type, "simulated": simulated, "points": list(each.points)}
            | {"workloads": len(workloads), "pipeline": "graph/2"}
            for each in order.types
        ],
        "labels": {"site": "lab"},
        "search": {"tuner": "xgb", "loss": "rank", "early_stopping": 200, "warm_start": True, "seed": 7},
        "measure": {"number": 3, "repeat": 3, "min_repeat_s": 0.1, "timeout_s": 10.0, "verify_top": 3},
        "budget": {"trials": trials, "wall_clock_s": 21600.0, "board_s": None, "per_workload": None},
        "progress": _make_progress(trials, tasks, best),
        "trials": {
            "by_side": {"ok": trials - 90, "candidate": 70, "board": 9, "sample": 11},
            "by_status": {"ok": trials - 90, "run_timeout": 40, "crashed": 30, "board_lost": 9, "noisy": 11},
            "by_purpose": {"search": trials, "winner": 240},
        },
        "boards": [
            {"board": f"{kind.removeprefix('jetson-')}-{number}", "board_type": kind, "trials": 300 - 40 * number}
            | {"ok": 260 - 40 * number, "board_hours": 1.4 / number}
            | {"faults": {"candidate": 24, "board": 9 if number == 2 else 0, "sample": 7}}
            for kind in kinds
            for number in (1, 2, 3)
        ],
        "winners": [_make_winner(random_, *task, best, simulated) for task in tasks],
        "curves": draw_curves(order, list_gains(course)),
        "events": [{"at": 1_700_000_000.0, "kind": "campaign_submitted", "message": "by ana@desk"}],
    }


def _make_workloads(random_: random.Random) -> list[dict[str, Any]]:
    found = []
    for model, count in MODELS.items():
        for number in range(count):
            size = 2 ** random_.randint(3, 7)
            kind = "dense" if model == "mlp" else random_.choice(["conv2d", "depthwise_conv2d"])
            found.append(
                {
                    "hash": f"{model[:2]}{number:02}",
                    "name": f"{kind}_add_relu 3x3 {size}x{size}x{512 // size * 4}>64 #{number}",
                    "kind": kind,
                    "flop": size * (1e4 if model == "mlp" else 2e6),
                    "weight": random_.randint(1, 4),
                    "models": [model],
                }
            )
    return [each | {"calls": [each["weight"]]} for each in found]


def _make_progress(trials: int, tasks: list[Any], best: dict[Any, float]) -> dict[str, Any]:
    return {
        "at": 1_700_012_000.0,
        "phase": "done",
        "counted": trials,
        "faults": {"candidate_faults": 70, "board_faults": 9, "farm_faults": 0, "sample_faults": 11},
        "board_s": 14_400.0,
        "wall_clock_s": 12_000.0,
        "eta_s": None,
        "boards": [
            {"name": "nano-1", "board_type": "jetson-nano", "doing": "measuring", "point": "default"},
            {"name": "tx2-1", "board_type": "jetson-tx2", "doing": "idle", "point": "default"},
        ],
        "tasks": [
            {
                "workload": each["hash"],
                "name": each["name"],
                "kind": each["kind"],
                "board_type": kind,
                "point": point,
                "threads": 1,
                "clocks": "a57=1479MHz",
                "weight": each["weight"],
                "flop": each["flop"],
                "counted": trials // len(tasks),
                "best_s": best.get((kind, point, each["hash"])),
                "ended": "early stopping" if each["kind"] == "dense" else "",
            }
            for kind, point, each in tasks
        ],
        "models": [
            {"name": name, "board_type": kind, "point": point, "latency_s": 0.0123}
            for kind, point in dict.fromkeys(task[:2] for task in tasks)
            for name in MODELS
        ],
        "history": [],
        "warm_start": {
            f"{tasks[0][2]['hash']} on jetson-nano at default": "the search begins with 412 "
            "trials of other tasks, 0 are left out: taught by some of them, the cost model ranks the others "
            "(rank correlation 0.71, needed 0.3)"
        },
        "verdict": {"records": len(tasks) - 2, "held": 2, "ties": 9, "rejected": 1}
        | {"undecided": [], "contradictions": ["nano-1 and nano-2 do not agree on which of two is faster"]}
        | {
            "finals": [
                _make_final(*place, name) for place in dict.fromkeys(task[:2] for task in tasks) for name in MODELS
            ]
        },
    }


def _make_final(kind: str, point: str, model: str) -> dict[str, Any]:
    found = {"model": model, "board_type": kind, "point": point, "simulated": True}
    if model == "mlp":
        return found | {
            "taken": None,
            "latency_s": None,
            "gain": None,
            "said": "not timed as a whole: its file is gone",
        }
    gained = model == "resnet18"
    predicted_s, taken_s = 0.0131, 0.0122 if gained else 0.0131
    recorded = {"median": 0.0122 if gained else 0.0135, "p90": 0.0124, "p99": 0.0153, "first_s": 0.0311}
    return found | {
        "taken": "recorded" if gained else "predicted",
        "latency_s": taken_s,
        "board": "nano-1",
        "threads": 4,
        "clocks": "a57=1479MHz",
        "runs": "60 timed runs",
        "left_out": [] if gained else ["conv2d 3x3 8x8x8>8"],
        "in_place": [{"workload": "w1", "name": "conv2d 3x3 8x8x8>8", "value": 0.91, "low": 0.89, "high": 1.03}],
        "variants": {
            "predicted": {"median": predicted_s},
            "recorded": recorded | {"peak_memory_bytes": 181 << 20, "bytes": 46 << 20},
        },
        "gain": {"value": predicted_s / taken_s, "low": 1.06, "high": 1.09} if gained else None,
        "said": "1.07 times as fast as the untuned prediction"
        if gained
        else "tuning found no speedup: with its records the model takes 1.03 times as long as by prediction",
    }


def _make_winner(
    random_: random.Random, kind: str, point: str, each: dict[str, Any], best: dict[Any, float], simulated: bool
) -> dict[str, Any]:
    """A task's record with evidence of two boards; none where nothing of it ran."""
    best_s = best.get((kind, point, each["hash"]))
    found = {"board_type": kind, "point": point, "workload": each["hash"], "name": each["name"]}
    found |= {"weight": each["weight"], "flop": each["flop"], "since": best_s is not None, "simulated": simulated}
    nothing = {"candidate": None, "median_s": None, "max_rel_error": None, "verified_at": None, "evidence": None}
    if best_s is None:
        return found | nothing
    short = kind.removeprefix("jetson-")
    return found | {
        "candidate": f"c-{each['hash']}",
        "median_s": best_s,
        "max_rel_error": 2.5e-6,
        "verified_at": 1_700_011_000.0,
        "evidence": {
            "campaign": 3,
            "decided": random_.choice(["parted", "tie"]),
            "rounds": 8,
            "boards": {f"{short}-{n}": {"median_s": best_s * n, "latency_s": [best_s * n] * 4} for n in (1, 2)},
            "rivals": [_make_rival(random_, number) for number in (1, 2)],
            "contradictions": [],
            "confidence": 0.95,
            "band": 0.01,
        },
    }


def _make_rival(random_: random.Random, number: int) -> dict[str, Any]:
    ratio = 1.0 + random_.expovariate(18.0) * number
    width = random_.uniform(0.005, 0.03)
    return {
        "candidate": f"r{number}",
        "ratio": ratio,
        "low": ratio - width,
        "high": ratio + width,
        "rounds": 8,
        "verdict": "slower" if ratio - width > 1.0 else "tied",
    }
