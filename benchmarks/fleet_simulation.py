"""What the fleet's scheduler costs, and how well it uses and shares boards: a simulated fleet, in virtual time.

Prints one JSON document. 1,000 boards of two types, four owners with a campaign each, 100 workloads at two operating
points, a million trials; boards fail, leave, come back and straggle. One core is enough. `--trials` makes it shorter;
`--campaigns 100 --trials 30240 --measure-s 20` is a week of board time of a hundred campaigns, 25 of each owner, and
`--trials 90000` half an hour of all boards. `step_ms` is a decision with what the simulation does about it, in
processor time, of which `collector_ms` are Python's garbage collector's; `parts` are five minutes of the fleet's each.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import resource
import time
from collections.abc import Iterator

import _machine
import psutil
from _fleet import Chances, SimulatedFleet, Simulation

from device_agent.protocol import OperatingPoint
from farm.campaign.scheduler import events
from farm.campaign.scheduler.state import CampaignEntry, SchedulerSettings, to_campaign
from farm.types.campaigns import Budget, MeasureOrder, Order, SearchOrder, TypeOrder, WorkloadOrder

BOARDS, WORKLOADS, TRIALS, OWNERS = 1000, 100, 1_000_000, 4
POINTS = ("default", "maxn")
# A fleet in which every kind of fault goes on all the time: a board is lost every 4,000 measurements, and so on.
CHANCES = Chances(
    search_failed=0.0002,
    build_failed=0.01,
    build_lost=0.001,
    candidate=0.02,
    board=0.002,
    leave=0.00025,
    sample=0.005,
    farm=0.001,
    repeated=0.001,
    straggler=0.0005,
)
# Every so many steps a line of progress.
_SAY_STEPS = 200_000
_PART_S = 300.0


def main() -> None:
    """Run the benchmark."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"trials of all campaigns together ({TRIALS})")
    parser.add_argument("--campaigns", type=int, default=OWNERS, help=f"campaigns, shared by the owners ({OWNERS})")
    parser.add_argument("--measure-s", type=float, default=2.0, help="for how long a trial holds a board (2 s)")
    parser.add_argument("--boards", type=int, default=BOARDS, help=f"boards, half of each type ({BOARDS})")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.boards = 2_000, 20
    with _machine.only_json() as emit:
        emit("fleet_simulation", settings(options), play(options))


def settings(options: argparse.Namespace) -> dict[str, object]:
    """What the figures belong to."""
    return {
        "boards": options.boards,
        "workloads": WORKLOADS,
        "operating_points": len(POINTS),
        "owners": OWNERS,
        "campaigns": options.campaigns,
        "trials": options.trials,
        "measure_s": options.measure_s,
    }


def play(options: argparse.Namespace) -> dict[str, object]:
    """One run, and what it took."""
    fleet = SimulatedFleet(
        {"jetson-nano": options.boards // 2, "jetson-tx2": options.boards - options.boards // 2},
        measure_s=options.measure_s,
        chances=CHANCES,
    )
    simulation = Simulation(SchedulerSettings(builders=2 * options.boards), fleet, seed=1)
    for number in range(options.campaigns):
        entry = campaign(number, options.trials // options.campaigns)
        simulation.at(0.0, events.add_campaign, simulation.state, entry)
    before_kb, wall_s, cpu_s = peak_kb(), time.monotonic(), time.process_time()
    steps_s, parts, first = array.array("f"), list[dict[str, object]](), 0
    going = True
    with collector_watched() as pauses_s:
        while going:
            began_s = time.thread_time()
            going = simulation.step()
            steps_s.append(time.thread_time() - began_s)
            if len(steps_s) % _SAY_STEPS == 0:
                _machine.say(f"{simulation.books.counted} trials, {simulation.now_s:.0f} s of virtual time")
            if simulation.now_s >= (len(parts) + 1) * _PART_S:
                parts.append({"step_ms": rank(steps_s[first:]), "memory_mb": memory_mb(steps_s)})
                first = len(steps_s)
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    books = simulation.books
    return {
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "cpu_us_per_trial": round(1e6 * cpu_s / books.counted),
        "cpu_us_per_step": round(1e6 * cpu_s / books.steps),
        "step_ms": rank(steps_s),
        "collector_ms": rank(pauses_s),
        "parts": parts,
        "board_hours": round(books.busy_s / 3600, 1),
        "counted": books.counted,
        "utilisation": _machine.round_to(books.utilisation),
        "furthest_from_a_fair_share": _machine.round_to(books.unfairness),
        "virtual_s": round(books.end_s),
        "discarded": books.discarded,
        "banned": books.banned,
        "doubled": books.doubled,
        "late_answers_ignored": books.late,
        "clock_switches": books.switches,
        "unconcluded": simulation.open,
        "memory_growth_kb": peak_kb() - before_kb,
        "peak_memory_mb": round(peak_kb() / 1024),
    }


@contextlib.contextmanager
def collector_watched() -> Iterator[array.array[float]]:
    """How long each round of the garbage collector in the block takes (s of processor time)."""
    pauses_s, began = array.array("f"), [0.0]

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.thread_time()
        else:
            pauses_s.append(time.thread_time() - began[0])

    gc.callbacks.append(watch)
    try:
        yield pauses_s
    finally:
        gc.callbacks.remove(watch)


def memory_mb(steps_s: array.array[float]) -> float:
    """What the process holds now, without what is kept of its steps."""
    return round((psutil.Process().memory_info().rss - steps_s.itemsize * len(steps_s)) / 2**20, 1)


def rank(steps_s: array.array[float]) -> dict[str, float]:
    """How long steps take (ms): the middle one, those that few are above, the longest; nothing of none."""
    ordered = sorted(steps_s)
    if not ordered:
        return {}
    parts = {"median": 0.5, "99 %": 0.99, "99.9 %": 0.999, "longest": 1.0}
    return {name: _machine.round_to(1e3 * ordered[int(part * (len(ordered) - 1))], 3) for name, part in parts.items()}


def campaign(number: int, trials: int) -> CampaignEntry:
    """One owner's campaign: its part of the workloads, of two kinds and several sizes."""
    names = [f"w{number}-{n:02}" for n in range(WORKLOADS // OWNERS)]
    workloads = tuple(
        WorkloadOrder(
            hash=name,
            name=name,
            kind=("conv2d", "dense")[n % 2],
            weight=1.0 + n % 3,
            flop=1e8 * (1 + n % 7),
            models=(),
            calls=(),
        )
        for n, name in enumerate(names)
    )
    points = dict.fromkeys(POINTS, OperatingPoint())
    types = tuple(
        TypeOrder(
            board_type=each, simulated=True, target={}, threads=1, pipeline="", points=points, workloads=workloads
        )
        for each in ("jetson-nano", "jetson-tx2")
    )
    order = Order(
        name=f"campaign-{number:03}",
        owner=f"owner-{number % OWNERS}",
        models=(),
        types=types,
        budget=Budget(trials=trials),
        search=SearchOrder(tuner="random", loss=None, early_stopping=None, warm_start=False, seed=0),
        measure=MeasureOrder(number=1, repeat=3, min_repeat_s=0.02, timeout_s=10.0, memory_bytes=1 << 30, verify_top=1),
    )
    return to_campaign(order, order.budget)


def peak_kb() -> int:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
