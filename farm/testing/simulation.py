"""A whole farm that a seed decides: engines, boards, a store, users, and what goes wrong in the field.

The engine, its scheduler, verification, searches, builds, leases, queue, sessions, wire and store are the product's.
Played are time, network, boards, tracker, services, Ray and what runs there. `Watch` says what must hold.

    python -m farm.testing.simulation --seeds 1000        --seed N replays one and prints its story
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import anyio

from device_agent.protocol import Outcome, Status
from device_agent.protocol.interpreters import python_command
from farm.campaign.engine import boards, builds, control, engine, host, process
from farm.campaign.scheduler.state import Assignment
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.errors import DeadlineError, FarmError, UsageError
from farm.settings import Settings
from farm.store import Store, database
from farm.testing.played_boards import PlayedBoard
from farm.testing.played_parts import ARGUMENTS, PlayedDatabase, replaced
from farm.testing.watch import _POINTS, Watch
from farm.testing.world import BEGIN_S, HOST, PlayedHost, World
from farm.types.campaigns import Order
from farm.types.states import CampaignState
from farm.values import Health, Virtual, Workload

_TYPE, _PORT = "jetson-nano", 9090
_FAULTS = ("switch", "cable", "power", "kill", "kill", "freeze", "store", "disk", "clock", "pause", "force")
# Faults begin in the first of these and end within the second, in s, but for a host that is frozen for longer; all is
# over within the third of that. Then leases expire.
_FAULTS_S, _FAULT_S, _END_S, _LEASES_END_S = 25.0, 90.0, 500.0, 90.0


class PlayedTracker:
    """In place of `Tracker`: agents that are within reach have registered."""

    host, port = "10.1.0.1", 9190

    def __init__(self, farm: Farm) -> None:
        self._farm = farm

    async def fetch_summary(self, timeout_s: float) -> dict[str, Any]:
        found = [board for board in self._farm.boards.values() if self._farm.is_up(board.name)]
        return {"server_info": [{"key": f"server:{each.key}", "addr": [_address(each.name), _PORT]} for each in found]}

    async def request(self, key: str, timeout_s: float) -> tuple[str, int, str]:
        """Wait for a board to be free."""
        board = self._farm.boards[key.partition("/")[2]]
        with anyio.move_on_after(timeout_s):
            while board.is_busy or not self._farm.is_up(board.name):
                await asyncio.sleep(0.1)
            return _address(board.name), _PORT, board.offer()
        raise DeadlineError(f"no board {key!r} became free within {timeout_s:g} s")


class Farm:
    """One seed's farm."""

    def __init__(self, seed: int, home: Path) -> None:
        self.world = World(seed)
        draw = self.world.random
        self.watch, self.story = Watch(self.world.failures), list[str]()
        self._home, self.database = home, PlayedDatabase(home / "farm.db", self.world)
        # Small farms fail more often for their time than large ones: both these numbers spread by their logarithm.
        names = [f"nano-{number + 1}" for number in range(int(12.99 ** draw.random()))]
        self.boards = {name: PlayedBoard(name, _TYPE) for name in names}
        self._engines, self._campaigns = draw.randint(1, 3), draw.randint(1, 2)
        self._trials = int(4 * 15.1 ** draw.random())
        self._faults = [(draw.uniform(1.0, _FAULTS_S), draw.choice(_FAULTS)) for _ in range(draw.randint(0, 6))]
        # How long measurements take, how often one goes wrong, and how often a call of Ray's kills its process.
        chances = (0.5, 1, 2), (0.0, 0.01, 0.05), (0.0, 0.02)
        self._pace, self._chance, self.dies = map(draw.choice, chances)
        self.space = draw.randint(20, 60)
        self._calm_s = BEGIN_S + max((at_s for at_s, _ in self._faults), default=_FAULTS_S) + _FAULT_S
        self.hosts: dict[str, PlayedHost] = {}
        self._threads: dict[str, asyncio.Task[Any]] = {}

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        host = HOST.get(None)
        self.story.append(f"{self.world.time() - BEGIN_S:9.3f} {host.name if host else '':9} {text}")

    async def play(self) -> None:
        """Play until every campaign is over, and check what must hold then."""
        store, services = Store("played"), PlayedHost("services")
        self.tell(f"boards {len(self.boards)}, engines {self._engines}, campaigns {self._campaigns} x {self._trials}")
        for name, board in self.boards.items():
            store.boards.register(name, _TYPE, Virtual(), {})
            board.on_act = functools.partial(self.watch.on_act, board)
            board.behave = functools.partial(self._behave, name)
            self._boot(name)
        self.world.start_thread(services, self._serve)
        for number in range(self._campaigns):
            self._submit(store, f"campaign-{number}")
        for number in range(self._engines):
            self.world.start(services, functools.partial(self._keep_engine, f"pc-{number + 1}"))
        for at_s, kind in self._faults:
            self.world.start(services, functools.partial(self._go_wrong, at_s, kind))
        while self.world.time() < self._calm_s + _END_S and not self.watch.failures:
            if not self._needs_engine(True) and all(each.done() for each in self._threads.values()):
                break
            await asyncio.sleep(5.0)
        if any(row.lease is not None for row in store.boards.fetch()):
            await asyncio.sleep(_LEASES_END_S)
        self.watch.check_end(store)

    def _needs_engine(self, otherwise: bool, name: str = "") -> bool:
        """Whether a campaign is not over; with a name, one of that host or of none, and one time in ten any."""
        with contextlib.suppress(FarmError):
            rows = Store("played").campaigns.fetch(over=False)
            engines = [dict(row.engine or {}).get("host", name) for row in rows]
            return bool(engines) and (not name or name in engines or self.world.random.random() < 0.1)
        return otherwise

    # Boards and services

    def _boot(self, name: str) -> None:
        """Start a board's agent."""
        board, self.hosts[name] = self.boards[name], PlayedHost(name)
        board.forget()
        self.world.start(self.hosts[name], lambda: asyncio.start_server(board.accept, _address(name), _PORT))

    async def _behave(self, name: str, outcome: Outcome) -> Outcome:
        """Take the time that a measurement takes; now and then something goes wrong."""
        draw = self.world.random
        await asyncio.sleep(self._pace * draw.uniform(0.3, 2.0))
        if self.world.time() > self._calm_s or draw.random() > self._chance:
            return outcome
        what = draw.choice(("noisy", "throttled", "hangs up", "is silent", "answers late", "loses its power"))
        self.tell(f"{name} {what}")
        if what in ("noisy", "throttled"):
            return dataclasses.replace(outcome, status=Status(what), message="it is said to", latency_s=())
        if what == "hangs up":
            raise ConnectionResetError
        if what == "loses its power":
            self._cut_power(name)
        await asyncio.sleep(draw.uniform(5.0, 90.0) if what == "answers late" else 3600.0)
        return outcome

    def _cut_power(self, name: str) -> None:
        """Nothing comes from a board, and what is sent to it is lost, until it boots again."""
        link, self.hosts[name].is_dead = self.world.find_link(_address(name)), True

        def boot() -> None:
            link.is_off = False
            self._boot(name)

        if not link.is_off:
            link.is_off = True
            self.world.call_later(self.world.random.uniform(5.0, 60.0), boot, context=contextvars.Context())

    def is_up(self, name: str) -> bool:
        """Whether a board is within reach."""
        link = self.world.find_link(_address(name))
        return not (link.is_off or link.is_cut)

    def _serve(self) -> None:
        """The services: say which boards are within reach, and probe those in doubt."""
        store, up = Store("played"), dict[str, bool]()
        while True:
            time.sleep(2.0)
            with contextlib.suppress(FarmError):
                store.leases.expire("services")
                for row in store.boards.fetch():
                    is_up = self.is_up(row.name)
                    if is_up != up.get(row.name):
                        kind = Kind.BACK if is_up else Kind.LOST
                    elif is_up and row.lease is None and row.health in (Health.SUSPECT, Health.QUARANTINED):
                        kind = Kind.PROBE_PASSED
                    else:
                        continue
                    store.boards.observe(row.name, kind, "services", decide_by(Observation(kind), HealthLimits()))
                    up[row.name] = is_up

    # Campaigns and engines

    def _submit(self, store: Store, name: str) -> None:
        draw, target = self.world.random, {"kind": "llvm", "num-cores": 4}
        hashes = [f"w{number}-{name}" for number in range(draw.choice((1, 1, 2, 3)))]
        of_type = {
            "board_type": _TYPE, "simulated": True, "target": target, "threads": 4, "pipeline": "graph/2",
            "points": dict(itertools.islice(_POINTS.items(), draw.randint(1, 2))),
            "workloads": [
                {"hash": each, "name": each, "kind": "conv", "flop": 1e7, "weight": 1, "models": (), "calls": ()}
                for each in hashes
            ],
        }  # fmt: skip
        order = Order.model_validate({
            "name": name, "owner": draw.choice(("ann", "bob")), "budget": {"trials": self._trials}, "types": [of_type],
            "models": [{"name": "m", "origin": "m.onnx", "sha256": "ab" * 32, "batch": None}],
            "search": {"tuner": "random", "loss": None, "early_stopping": None, "warm_start": False, "seed": 0},
            "measure": {
                "number": 1, "repeat": 3, "min_repeat_s": 0.02, "timeout_s": 10.0, "memory_bytes": 1 << 30,
                "verify_top": 2,
            },
        })  # fmt: skip
        about = ARGUMENTS, '{"latency_s": 0.01}', target, "graph/2"
        works = [Workload(each, each, 1e7, 1, *about, board_type=_TYPE) for each in hashes]
        store.campaigns.submit(order, "simulation", works)

    async def _keep_engine(self, name: str) -> None:
        """A user of a coordinator, who starts its engine when one is needed."""
        while True:
            await asyncio.sleep(self.world.random.uniform(1.0, 10.0))
            is_gone = name not in self._threads or self._threads[name].done() or self.hosts[name].is_dead
            if is_gone and self._needs_engine(False, name):
                host = self.hosts[name] = PlayedHost(name)
                self._threads[name] = self.world.start_thread(host, self._run_engine)

    def _run_engine(self) -> None:
        """An engine's process, after its user has resumed what was interrupted."""
        home = self._home / HOST.get().name
        home.mkdir(exist_ok=True)
        settings = Settings(home=str(home), store="played", build_workers=2)
        try:
            with Store("played") as store:
                for row in store.campaigns.fetch(over=False):
                    if row.state is CampaignState.INTERRUPTED:
                        control.resume(store, row.name, "user")
                process.serve(settings, store, self._work)
                if not self._faults:
                    self.watch.check_leases(store, f"pid {HOST.get().pid}")
        except FarmError as error:
            self.tell(f"its engine ends: {error}")
        except Exception as error:  # noqa: BLE001  a bug
            self.watch.failures.append(f"an engine failed: {error!r}")

    def _work(self, settings: Settings, store: Store, stopping: Any, note: Any) -> None:
        """`engine.run_engine`, with what is played."""
        within: Any = types.SimpleNamespace(tracker=PlayedTracker(self))
        with contextlib.ExitStack() as stack:
            here = host.HostBoard(settings, store, self.tell)
            held = stack.enter_context(boards.EngineBoards(within, store, self.tell, here))
            compilers = stack.enter_context(builds.BuildFarm(settings, settings.builds_path, 2, self.tell))
            running = engine.CampaignEngine(settings, store, held, compilers, self.tell)
            stack.callback(running.close)
            send = running.measure

            def measure(assignment: Assignment) -> None:
                self.watch.on_measure(store, running, assignment)
                send(assignment)

            running.measure = measure  # type: ignore[method-assign]
            running.run(stopping)

    # What goes wrong

    async def _go_wrong(self, after_s: float, kind: str) -> None:
        await asyncio.sleep(after_s)
        draw, board = self.world.random, self.world.random.choice(list(self.boards))
        host = self.hosts.get(draw.choice([f"pc-{number + 1}" for number in range(self._engines)]), PlayedHost("none"))
        self.tell(f"fault: {kind} of {board if kind in ('cable', 'power', 'force') else host.name}")
        match kind:
            case "switch" | "cable":
                cut_off = self.boards if kind == "switch" else [board]
                links = [self.world.find_link(_address(each)) for each in cut_off]
                for cut in (True, False):
                    for link in links:
                        link.is_cut = cut
                    await asyncio.sleep(40.0 if kind == "switch" else draw.uniform(1.0, 40.0))
            case "power":
                self._cut_power(board)
            case "kill":
                self.world.kill(host)
            case "freeze":
                host.frozen_until_s = self.world.time() + draw.choice((10.0, 20.0, 90.0, 90.0, 3600.0))
                self._calm_s = max(self._calm_s, host.frozen_until_s)
            case "store":
                self.database.away_until_s = self.world.time() + 30.0
            case "disk":
                self.database.full_until_s = self.world.time() + draw.uniform(1.0, 60.0)
            case "clock":
                host.skew_s += draw.choice((-120.0, 120.0))
            case "force":
                with contextlib.suppress(FarmError):
                    Store("played").leases.force_release(board, "operator", "wants it")
            case "pause":
                name = f"campaign-{draw.randrange(self._campaigns)}"
                await self._ask(lambda store: store.campaigns.want(name, control.PAUSE, "operator"))
                await asyncio.sleep(draw.uniform(1.0, 30.0))
                await self._ask(lambda store: control.resume(store, name, "operator"))

    async def _ask(self, work: Any) -> None:
        """Ask the store until it answers; what is over cannot be changed."""
        while True:
            try:
                with contextlib.suppress(UsageError):
                    work(Store("played"))
                return
            except FarmError:
                await asyncio.sleep(5.0)


def _address(board: str) -> str:
    return f"10.2.0.{board.rpartition('-')[2]}"


def play(seed: int) -> Farm:
    """Play one seed. For a process of its own: its time and threads are replaced meanwhile."""
    PlayedHost.numbers = itertools.count(100)
    home = Path(tempfile.mkdtemp(prefix="farm-simulation-"))
    os.environ["FARM_HOME"] = str(home)
    farm = Farm(seed, home)
    log, handler = logging.getLogger("farm"), logging.Handler()
    handler.emit = lambda record: farm.tell(f"{record.module}: {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        database._make(farm.database)
        asyncio.set_event_loop(farm.world)
        with replaced(farm.world, farm.hosts, farm.database, farm.space, farm.dies):
            farm.world.run_until_complete(farm.play())
    except Exception as error:  # noqa: BLE001  reported with its seed
        farm.watch.failures.append(f"the simulation failed: {error!r}")
    finally:
        log.removeHandler(handler)
        shutil.rmtree(home, ignore_errors=True)
    return farm


def find_failures(seed: int) -> tuple[int, list[str]]:
    """Play a seed; return it, and what did not hold."""
    return seed, play(seed).watch.failures


def main() -> int:
    """Play seeds, or one with its story; the exit code is 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many to play (default: 100)")
    parser.add_argument("--seed", type=int, help="play this one and print its story")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have an order, which the seed decides too
        os.environ["PYTHONHASHSEED"] = "0"
        command = python_command("-m", "farm.testing.simulation", *sys.argv[1:])
        os.execv(command[0], command)  # noqa: S606
    logging.getLogger("farm").setLevel(logging.INFO)
    if options.seed is not None:
        farm = play(options.seed)
        print("\n".join(farm.story))
        print("\n".join(farm.watch.failures) or "everything held")
        return bool(farm.watch.failures)
    began, broken = time.monotonic(), 0
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for seed, failures in pool.map(find_failures, range(options.seeds)):
            if failures:
                broken += 1
                print(f"seed {seed}: {failures[0]}", flush=True)
    print(f"{options.seeds} seeds, {broken} broken, {time.monotonic() - began:.1f} s")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
