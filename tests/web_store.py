"""A store as the page meets it: boards in every state, a campaign under way with many trials, sweeps, records, events.

Written straight into the tables, for the tests of the page and its benchmark; what boards and trials look like is what
the farm writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import OperatingPoint
from farm.points.values import DomainSetting, Estimate, Goal, Grid, GridPoint, PointMeasurement
from farm.processes.machine import process_identity
from farm.store import Store, schema
from farm.sweep import stored
from farm.sweep.plan.order import SweepOrder
from farm.types.campaigns import Budget, Order, WorkloadOrder
from farm.values import Workload
from tests.unit import sweep_documents
from tests.unit.campaign_orders import SEARCH, make_model, make_type
from tests.unit.campaign_orders import make_order as make_campaign_order

CAMPAIGN = "vision-nightly"
OWNER = "vision@rack-a"
TYPES = ("jetson-nano", "jetson-tx2")
TARGET = {"kind": "llvm", "mcpu": "cortex-a57", "num-cores": 4}
MODELS = {"resnet18": 14, "mobilenet-v2": 18, "mlp": 4}
KERNEL = "golden/3"
_HZ = {"jetson-nano": "a57=1428MHz", "jetson-tx2": "a57=2035.2MHz"}
_FAULTS = (("probe_failed", "no answer within 20 s"), ("throttled", "97 °C, clocks were cut"), ("fault", "board_lost"))


def fill(store: Store, *, boards: int = 24, trials: int = 3000, minutes: float = 90.0, seed: int = 7) -> None:
    """All of it; the campaign has been under way for so many minutes."""
    rng, now = random.Random(seed), time.time()
    names = fill_boards(store, boards, rng, now)
    order = make_order()
    submit(store, order)
    fill_trials(store, order, names, trials, now, minutes * 60, rng)
    for simulated in (True, True):
        fill_sweep(store, simulated=simulated)
    for latency_s in (0.0224, 0.0201):
        fill_result(store, latency_s)


def fill_result(store: Store, latency_s: float) -> None:
    """Keep a comparison of ours with ONNX Runtime on a simulated board."""
    figures = (("tvm-farm", "tvm-farm", latency_s), ("onnxruntime", "ONNX Runtime", 0.0315))
    variants = {
        name: {"label": label, "latency_s": {"median": each, "ci_low": each * 0.99, "ci_high": each * 1.01}}
        for name, label, each in figures
    }
    board = {"board": "nano-01", "board_type": "jetson-nano", "simulated": True, "device": "cpu", "by": OWNER}
    store.results.add("bench", {"models": [{"variants": variants}]}, model="squeezenet1.1", **board)


def fill_boards(store: Store, count: int, rng: random.Random, now: float) -> list[str]:
    """Boards of two types: most at work for the campaign, a few in every other state. Returns those at work."""
    clock = store.session.clock()
    rows, leases, events, golden, working = [], [], [], [], []
    for number in range(count):
        board_type = TYPES[number % len(TYPES)]
        name = f"{board_type.removeprefix('jetson-')}-{number // len(TYPES) + 1:02}"
        health, why, reachable = "good", "3 probes passed", True
        if number % 12 == 5:
            health, why = "quarantined", "3 board-side faults within 10 min: board_lost"
        elif number % 12 == 7:
            health, why = "suspect", "golden kernel +4.1 % against its own history"
        elif number % 25 == 11:
            reachable = False
        elif number % 31 == 13:
            health, why = "maintenance", "new heat sink"
        busy = health == "good" and reachable and number % 9 != 3
        rows.append(
            {
                "name": name,
                "board_type": board_type,
                "simulated": True,
                "labels": {"rack": "ab"[number % 2]},
                "transport": {"kind": "virtual", "seed": number},
                "description": {"cpu_model": "Cortex-A57", "agent_version": "0.1.0", "board_type": board_type},
                "reachable": reachable,
                "state_reason": "back" if reachable else "the way to it is cut: no answer within 5 s",
                "state_since": now - rng.uniform(60, 9e4),
                "health": health,
                "health_reason": why,
                "health_since": now - rng.uniform(60, 9e4),
                "history": {},
                "history_clock": clock.clock,
                "added_at": now - 30 * 86400,
                "seen_at": now - rng.uniform(1, 500),
            }
        )
        if busy:
            working.append(name)
            mine = number % 11 != 8
            who = (OWNER, f"campaign {CAMPAIGN}") if mine else ("audio@rack-b", "sweep mobilenet-v2")
            leases.append(
                {"board": name, "owner": who[0], "purpose": who[1], "ttl_s": 1e6, "acquired_at": now - 3000.0}
                | {"expires_at": now + 1e6, "clock": clock.clock, "expires_s": clock.seconds + 1e6, "nonce": ""}
            )
        events.append(_event(name, now - 86400, "registered", "not probed yet", None, "suspect"))
        if health != "good" or number % 6 == 1:
            kind, reason = _FAULTS[number % len(_FAULTS)]
            events.append(_event(name, now - rng.uniform(60, 8e4), kind, reason, "good", health))
        drift = 1.045 if health == "suspect" else rng.uniform(0.995, 1.005)
        for run in range(20):
            median_s = 1.7e-3 * rng.uniform(0.998, 1.002) * (drift if run >= 15 else 1.0)
            golden.append(
                {"board": name, "kernel": KERNEL, "operating_point": "default", "median_s": median_s}
                | {"samples_s": [median_s] * 3, "simulated": True, "at": now - (20 - run) * 600}
            )
    with store.session.writing() as connection:
        connection.execute(schema.boards.insert(), rows)
        connection.execute(schema.leases.insert(), leases)
        connection.execute(schema.board_events.insert(), sorted(events, key=lambda each: each["at"]))
        connection.execute(schema.golden_samples.insert(), golden)
    return working


def _event(board: str, at: float, kind: str, reason: str, before: str | None, after: str) -> dict[str, Any]:
    return {
        "board": board,
        "at": at,
        "kind": kind,
        "before": before,
        "after": after,
        "reason": reason,
        "by": "services",
    }


def make_order(name: str = CAMPAIGN) -> Order:
    """Three models on two board types at one operating point each."""
    workloads = tuple(
        WorkloadOrder(
            hash=f"{model[:2]}{number:02}" + "e" * 12,
            name=f"{kind} {size}x{size}x{512 // size * 4}>64 k3 relu #{number}",
            kind=kind,
            flop=size * 2e6,
            weight=1 + number % 4,
            models=(model,),
            calls=(1 + number % 4,),
            predicted_s=size * 2e6 / 9e9,
        )
        for model, count in MODELS.items()
        for number in range(count)
        for kind in (("dense",) if model == "mlp" else (("conv2d", "depthwise_conv2d")[number % 2],))
        for size in ((8, 16, 32, 64, 128)[number % 5],)
    )
    about = {"target": TARGET, "threads": 4, "pipeline": "graph/2"}
    return make_campaign_order(
        name,
        owner=OWNER,
        models=tuple(map(make_model, MODELS)),
        types=tuple(make_type(kind, workloads, **about, points={_HZ[kind]: OperatingPoint()}) for kind in TYPES),
        budget=Budget(trials=120_000, wall_clock_s=8 * 3600.0),
        search=SEARCH.model_copy(update={"early_stopping": 200}),
    )


def submit(store: Store, order: Order, module_json: str = "{}") -> int:
    """Put the order and its workloads into the store."""
    arguments = (((1, 64, 56, 56), "float32"),)
    workloads = [
        Workload(
            *(each.hash, each.name, each.flop, each.weight, arguments, module_json, dict(kind.target), "graph/2"),
            board_type=kind.board_type,
        )
        for kind in order.types
        for each in kind.workloads
    ]
    number = store.campaigns.submit(order, "campaign run vision-nightly.yaml", workloads)
    store.campaigns.note(number, "running", "", process_identity())
    return number


def fill_trials(
    store: Store, order: Order, boards: Sequence[str], count: int, now: float, seconds: float, rng: random.Random
) -> None:
    """Trials of the first campaign, its progress and records, as if it had begun `seconds` ago."""
    best: dict[tuple[str, str], float] = {}
    counted: dict[tuple[str, str], int] = {}
    faults = {"candidate": 0, "board": 0, "sample": 0}
    rows = _make_trials(order, boards, count, now, seconds, rng, best, counted, faults)
    with store.session.writing() as connection:
        while chunk := [row for row, _ in zip(rows, range(5000), strict=False)]:
            connection.execute(schema.trials.insert(), chunk)
        connection.execute(schema.campaigns.update().values(started_at=now - seconds))
        records = [
            {"workload": key, "board_type": kind, "operating_point": _HZ[kind], "simulated": True, "candidate": "c1"}
            | {"median_s": median_s, "max_abs_error": 1e-5, "max_rel_error": 2.1e-6, "trace_json": "[]"}
            | {"verified_at": now - 60, "evidence": None, "origin": None}
            for (kind, key), median_s in best.items()
        ]
        if records:
            connection.execute(schema.records.insert(), records)
    tasks = [
        {"workload": each.hash, "name": each.name, "kind": each.kind, "board_type": kind.board_type}
        | {"point": _HZ[kind.board_type], "threads": 4, "clocks": "", "weight": each.weight, "flop": each.flop}
        | {"counted": counted.get((kind.board_type, each.hash), 0), "best_s": best.get((kind.board_type, each.hash))}
        | {"predicted_s": None, "ended": "", "from": "trial"}
        for kind in order.types
        for each in kind.workloads
    ]
    share = count / (order.budget.trials or count)
    progress = {
        "at": now, "phase": "search", "counted": sum(counted.values()), "board_s": count * 1.1, "wall_clock_s": seconds,
        "eta_s": min(seconds * (1 - share) / max(share, 1e-3), 8 * 3600.0 - seconds),
        "winners": None, "tasks": tasks, "models": [], "history": [],
        "faults": {f"{side}_faults": number for side, number in faults.items()},
        "boards": [
            {"name": name, "board_type": _type_of(name), "doing": "measuring" if index % 7 else "idle"}
            | {"point": _HZ[_type_of(name)]}
            for index, name in enumerate(boards)
        ],
        "warm_start": {}, "verdict": None,
    }  # fmt: skip
    store.campaigns.save_progress(1, progress)


def _type_of(board: str) -> str:
    return f"jetson-{board.partition('-')[0]}"


def _make_trials(
    order: Order, boards: Sequence[str], count: int, now: float, seconds: float, rng: random.Random,
    best: dict[tuple[str, str], float], counted: dict[tuple[str, str], int], faults: dict[str, int],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    by_type = {kind: [name for name in boards if _type_of(name) == kind] for kind in TYPES}
    workloads = order.types[0].workloads
    held_s = 0.8 * seconds * len(boards) / count
    for number in range(count):
        kind = TYPES[number % len(TYPES)]
        each = workloads[(number // len(TYPES)) % len(workloads)]
        names = by_type[kind]
        board = names[(number // len(TYPES)) % len(names)]
        at = now - seconds + seconds * (number + 1) / count
        if int(at) % 5400 < 260 and board == names[0]:  # it stood still for a while
            board = names[-1]
        status, side, median_s = "ok", None, None
        if rng.random() < 0.07:
            status, side = rng.choice((("run_timeout", "candidate"), ("crashed", "candidate"), ("noisy", "sample")))
        else:
            least_s = each.flop / (9e9 if "tx2" in kind else 5e9)
            median_s = least_s * (1 + 3 * math.exp(-4.0 * number / count) * rng.expovariate(1.0) + rng.random() * 0.2)
        key = (kind, each.hash)
        if side in (None, "candidate"):
            counted[key] = counted.get(key, 0) + 1
        if side:
            faults[side] += 1
        if median_s is not None:
            best[key] = min(median_s, best.get(key, median_s))
        warm_c = 52 + 14 * rng.random() + (20 if board.endswith("01") else 0)
        outcome = {
            "status": status,
            "latency_s": [median_s] * 3 if median_s else [],
            "board": board,
            "after": {"cpu_freq_hz": {"0": 1_428_000_000}, "gpu_freq_hz": 921_600_000, "memory_freq_hz": 1_600_000_000}
            | {"temperature_c": {"CPU-therm": warm_c}},
            "power": {"total": {"power_w": 4.2 + rng.random()}},
        }
        yield {
            "campaign": 1, "board_type": kind, "workload": each.hash, "operating_point": _HZ[kind],
            "candidate": f"c{number}", "purpose": "search", "attempt": 1,
            "counted": 1 if side in (None, "candidate") else None, "status": status, "fault_side": side,
            "median_s": median_s, "board": board, "simulated": True, "library_sha256": None, "build_s": 0.3,
            "held_s": held_s, "recorded_at": at, "outcome": outcome, "trace_json": "x" * 400,
        }  # fmt: skip


def fill_sweep(store: Store, *, simulated: bool = True, points: int = 15, seed: int = 3) -> int:
    """A finished sweep over a Nano's clocks, tuned and untuned, all of it measured."""
    rng = random.Random(seed)
    keys = [f"a57={hz / 1e6:.9g}MHz" for hz in sweep_documents.NANO_HZ[-points:]]
    grid = Grid(
        tuple(
            GridPoint(key, OperatingPoint(cpu_freq_hz={"a57": hz}), (DomainSetting("a57", hz, 4),))
            for key, hz in zip(keys, sweep_documents.NANO_HZ[-points:], strict=True)
        ),
        (),
    )
    order = SweepOrder("squeezenet1.1", variants=("untuned", "tuned"), exhaustive=True)
    sweep = store.sweeps.start(
        command="sweep run squeezenet1.1", model="squeezenet1.1", model_sha256="0" * 64, board_type="jetson-nano",
        simulated=simulated, request=dataclasses.asdict(order), goal=stored.goal_to_dict(Goal()),
        grid=stored.grid_to_dict(grid), settings={"notes": [], "environment": {"farm": "0"}},
    )  # fmt: skip
    for variant, work in (("untuned", 98e6), ("tuned", 41e6)):
        for visit, (key, hz) in enumerate(zip(keys, sweep_documents.NANO_HZ[-points:], strict=True)):
            row = sweep_documents.row(key, [("a57", hz, 4, True)], work, seed=rng.randint(0, 99))
            made = PointMeasurement(
                key, Estimate(**row["latency_s"]), at_s=float(visit), power=Estimate(**row["power_w"]),
                energy=Estimate(**row["energy_j"]), rail_power_w=row["rail_power_w"], board="nano-01",
                simulated=simulated, idle_power=Estimate(**row["idle_power_w"]),
            )  # fmt: skip
            store.sweeps.add_point(
                sweep, variant=variant, batch=1, key=key, visit=visit, board="nano-01",
                measurement=stored.measurement_to_dict(made), outcome={},
            )  # fmt: skip
    store.sweeps.finish(sweep, "finished", {"reason": "all points are measured"})
    return sweep


def add_trial_now(store: Store) -> None:
    """One more trial, as the engine writes it, so that the page has something to say."""
    [last] = store.session.rows(sa.select(schema.trials).order_by(schema.trials.c.id.desc()).limit(1))
    row = {key: last[key] for key in last if key != "id"}
    outcome = json.loads(json.dumps(row["outcome"]))
    with store.session.writing() as connection:
        connection.execute(
            schema.trials.insert().values(
                **row | {"candidate": f"n{last['id']}", "recorded_at": time.time()} | {"outcome": outcome}
            )
        )
