"""Eight coordinators and 200 boards on one PostgreSQL store, without boards: what the store alone is asked for.

Each coordinator is a process that does what services and engine ask of a store, by the farm's own calls: it keeps ways,
waits in the queue, takes and gives back boards as it is its turn, renews leases, and writes a trial for each board that
it has every `--trial-s`. Then one is killed, and the others' taking its boards' ways is timed. PostgreSQL is a server
of its own on this machine, with fsync as it comes.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _machine
import psycopg
from store_scale import begin, make_trial, open_server

from farm.campaign.engine.board_keeping import BoardsAsked, TrialQueue
from farm.crew.choice import plan_choice
from farm.crew.health import Kind, Observation, decide_by
from farm.crew.leased_board import name_owner
from farm.errors import FarmError, TransientError
from farm.processes.machine import name_coordinator
from farm.services.routes import RouteLeases
from farm.store import Store
from farm.store.leases import LEASE_TTL_S
from farm.values import Lease, Ssh, WorkKind

BOARD_TYPE = "jetson-nano"
# As the services' and the engine's own loops have it.
_KEEPER_S, _LOOK_S, _QUEUE_S = 1.0, 0.5, 30.0


class Coordinator:
    """One of them: its two loops in turn, on one thread; what a call takes is noted under its name."""

    def __init__(self, store: Store, number: int, names: list[str], trial_s: float) -> None:
        self.store, self.number, self.names, self.trial_s = store, number, names, trial_s
        self.me = name_coordinator()
        self.ways = RouteLeases(store, self.me)
        self.queue = TrialQueue(store)
        campaign = f"campaign-{number}"
        self.queue.ask([BoardsAsked(campaign, f"trials of {campaign}", BOARD_TYPE, frozenset(names))])
        self.held: dict[str, tuple[Lease, float, float]] = {}
        # Of each call wall time, and what of it was this process's own computing.
        self.seconds: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        self.trials = self.failures = 0
        self.kept_at = 0.0

    def timed(self, what: str, work: Callable[[], Any]) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            return work()
        finally:
            self.seconds[what].append((time.perf_counter() - began, time.process_time() - cpu))

    def turn(self) -> None:
        now = time.monotonic()
        if now - self.kept_at >= _KEEPER_S:
            self.kept_at = now
            self.timed("ways", lambda: self.ways.look(dict.fromkeys(self.names, "")))
            if asked := {name: (to, "") for name, to in self.ways.list_asked().items()}:
                self.timed("hand ways", lambda: self.ways.hand(asked))
        rows = self.timed("boards", self.store.boards.fetch)
        self.timed("decision", lambda: self.queue.look(rows, ()))
        for name in self.queue.asked_back(self.held):
            lease, _, _ = self.held.pop(name)
            self.timed("give back", lambda lease=lease: self.store.leases.release(lease))
        for name in plan_choice(rows, self.names).free:
            if self.queue.may_take(name):
                self.take(name)
        for name, (lease, renew_at, trial_at) in list(self.held.items()):
            now = time.monotonic()
            if now >= renew_at:
                lease = self.timed("renew", lambda lease=lease: self.store.leases.renew(lease))
                renew_at = now + LEASE_TTL_S / 3
            if now >= trial_at:
                self.trials += 1
                trial = make_trial(self.number, self.trials)
                self.timed("trial", lambda trial=trial: self.store.trials.add(trial))
                trial_at = max(trial_at, now - self.trial_s) + self.trial_s
            self.held[name] = (lease, renew_at, trial_at)

    def take(self, name: str) -> None:
        def acquire() -> Lease:
            return self.store.leases.acquire(
                *(name, name_owner(), f"trials of {self.number}"), kind=WorkKind.TRIALS, through=self.me
            )

        try:
            lease = self.timed("lease", acquire)
        except TransientError:  # another was faster
            return
        now = time.monotonic()
        self.held[name] = (lease, now + LEASE_TTL_S / 3, now + self.trial_s * (self.number + 1) / 9)


def coordinate(url: str, home: str, number: int, names: list[str], options: Any, ready: Any, results: Any) -> None:
    """Be one of them until the time is over, and tell what each call took."""
    os.environ["FARM_HOME"] = home
    with Store(url) as store:
        one = Coordinator(store, number, names, options.trial_s)
        ready.wait()
        end = time.monotonic() + options.seconds
        loops = 0
        while (began := time.monotonic()) < end:
            try:
                one.turn()
            except FarmError as error:
                one.failures += 1
                print(f"{number}: {error}", file=sys.stderr)
            loops += 1
            time.sleep(max(0.0, began + _LOOK_S - time.monotonic()))
        results.put(
            {
                "seconds": dict(one.seconds),
                "trials": one.trials,
                "boards": len(one.held),
                "ways": sum(one.ways.is_mine(name) for name in names),
                "failures": one.failures,
                "loops": loops,
            }
        )


def fill(store: Store, count: int) -> list[str]:
    """Boards in reach and good."""
    begin(store)
    names = [f"board-{number:03}" for number in range(count)]
    for name in names:
        store.boards.register(name, BOARD_TYPE, Ssh("board.invalid", "farm"))
    store.boards.observe_several(names, Kind.BACK, "benchmark", decide_by(Observation(Kind.BACK)))
    store.boards.observe_several(names, Kind.PROBE_PASSED, "benchmark", decide_by(Observation(Kind.PROBE_PASSED)))
    return names


def watch_locks(url: str, until: Callable[[], bool]) -> dict[str, Any]:
    """How many connections wait for the store's write lock, looked at ten times a second."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'tvm-farm%'"
    waiting = []
    with psycopg.connect(url, autocommit=True) as connection:
        while not until():
            waiting.append(connection.execute(query).fetchone()[0])
            time.sleep(0.1)
    return {"mean": round(statistics.mean(waiting), 2), "most": max(waiting)}


def time_take_over(url: str, gone: str, names: list[str]) -> float:
    """Seconds until the ways that a dead coordinator kept are others'."""
    began = time.monotonic()
    with Store(url) as store:
        while len(kept := store.routes.fetch()) < len(names) or gone in kept.values():
            if time.monotonic() - began > 60:
                raise SystemExit("its ways were not taken over within 60 s")
            time.sleep(0.1)
    return time.monotonic() - began


def measure(url: str, options: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with Store(url) as store:
        names = fill(store, options.boards)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="farm-coordinators-"))
    homes = [str(folder / str(number)) for number in range(options.coordinators)]
    ready, results = context.Barrier(options.coordinators + 1), context.Queue()
    processes = [
        context.Process(target=coordinate, args=(url, home, number, names, options, ready, results))
        for number, home in enumerate(homes)
    ]
    for process in processes:
        process.start()
    ready.wait(240)
    began = time.monotonic()
    locks = watch_locks(url, lambda: time.monotonic() - began > options.seconds - 1)
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(60)
    calls: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for each in found:
        for what, seconds in each["seconds"].items():
            calls[what] += seconds
    return {
        "seconds": options.seconds,
        "calls": {
            what: {
                "per_second": round(len(seconds) / options.seconds, 1),
                "ms": _machine.spread([wall for wall, _ in seconds], 1e3),
                "p99_ms": round(sorted(seconds)[int(len(seconds) * 0.99)][0] * 1e3, 1),
                "longest_ms": round(max(seconds)[0] * 1e3, 1),
                "own_cpu_ms": round(statistics.median(cpu for _, cpu in seconds) * 1e3, 2),
            }
            for what, seconds in sorted(calls.items())
        },
        "trials_per_second": round(sum(each["trials"] for each in found) / options.seconds, 1),
        "loops_per_second_each": round(sum(each["loops"] for each in found) / options.seconds / len(found), 2),
        "boards_of_each": sorted(each["boards"] for each in found),
        "ways_of_each": sorted(each["ways"] for each in found),
        "failures": sum(each["failures"] for each in found),
        "waiting_for_the_lock": locks,
    }


def measure_take_over(url: str, options: Any) -> float:
    """Two coordinators that keep all ways, one of which is killed."""
    context = multiprocessing.get_context("spawn")
    with Store(url) as store:
        names = fill(store, options.boards)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="farm-coordinators-"))
    ready, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=keep_routes, args=(url, str(folder / str(number)), names, ready)) for number in range(2)
    ]
    for process in processes:
        process.start()
    try:
        ready.wait(120)
        with Store(url) as store:
            deadline = time.monotonic() + 60
            while len(kept := store.routes.fetch()) < len(names) and time.monotonic() < deadline:
                time.sleep(0.05)
        gone = next(iter(kept.values()))
        number = next(number for number in range(2) if gone.endswith(str(folder / str(number))))
        processes[number].kill()
        return time_take_over(url, gone, names)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        results.close()


def keep_routes(url: str, home: str, names: list[str], ready: Any) -> None:
    """Keep ways until killed."""
    os.environ["FARM_HOME"] = home
    with Store(url) as store:
        ways = RouteLeases(store, name_coordinator())
        ready.wait()
        while True:
            ways.look(dict.fromkeys(names, ""))
            time.sleep(_KEEPER_S)


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", type=int, default=200, help="default: 200")
    parser.add_argument("--coordinators", type=int, default=8, help="default: 8")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they work (default: 60)")
    parser.add_argument("--trial-s", type=float, default=2.0, help="seconds of a board per trial (default: 2)")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.coordinators, options.seconds = 12, 3, 8.0
    with _machine.only_json() as emit:
        figures: dict[str, Any] = {"machine_quiet": _machine.wait_until_quiet(options.quick)}
        with open_server() as url:
            figures["work"] = measure(str(url), options)
        with open_server() as url:
            figures["ways_taken_over_s"] = round(measure_take_over(str(url), options), 1)
        figures["load_1min_after"] = round(os.getloadavg()[0], 2)
        emit("coordinators", vars(options), figures)


if __name__ == "__main__":
    main()
