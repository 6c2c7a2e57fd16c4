"""Harm a campaign that runs: which process is killed at which moment, and what holds of its trials all the while."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import random
import select
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator

import psutil

from tests.acceptance.conftest import Home

# What the processes of a campaign are called, as `ps` shows them: `ray::Compiler.build` is a compiler at work.
_TITLES = {"search": "ray::SearchActor", "builder": "ray::Compiler"}
# How long a moment waits for what it wants to be under way; what comes too seldom is not waited for.
_PHASE_S = 1.0
_LOOK_S = 0.005

# How often each is killed, and while what is done (one of them at random; "": at any step). An engine that
# comes again loads Ray, TVM and its compilers, 25 s of a core: what comes again in one second is killed more often.
VICTIMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "engine": (3, ("", "ray::SearchActor.propose", "ray::Compiler.build")),
    "raylet": (1, ("",)),
    "search": (8, ("", "ray::SearchActor.propose", "ray::SearchActor.propose", "ray::SearchActor.observe")),
    "builder": (10, ("ray::Compiler.build", "")),
    "session": (20, ("",)),
    "agent": (4, ("",)),
    "board": (4, ("",)),
    "tracker": (3, ("",)),
}


@dataclasses.dataclass(frozen=True)
class Moment:
    """When `victim` is killed: once so many trials count and, if it comes soon, `phase` is under way."""

    trials: int
    victim: str
    phase: str


def plan_moments(seed: int, budget: int) -> list[Moment]:
    """All moments of a campaign of so many trials, in order; the same for the same seed. Some fall together.

    The last ones come when all trials are made and winners are looked for.
    """
    chance = random.Random(seed)
    victims = [(name, chance.choice(phases)) for name, (count, phases) in VICTIMS.items() for _ in range(count)]
    chance.shuffle(victims)
    trials = sorted(chance.randrange(2, budget - 4) for _ in victims)
    last = [Moment(budget, victim, "") for victim in ("engine", "search", "session")]
    return [*(Moment(at, *victim) for at, victim in zip(trials, victims, strict=True)), *last]


class Scene:
    """The processes of one home's engine and services, found by kinship and by what they call themselves."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._path = pathlib.Path(home.environment["FARM_HOME"])

    def find_engine(self) -> psutil.Process | None:
        """The engine, or None where none takes orders."""
        return self._find("engine.json")

    def is_held(self) -> bool:
        """Whether some process is the engine, be it just starting or ending: it holds the services until it is gone."""
        with (self._path / "engine.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def find(self, victim: str, chance: random.Random) -> psutil.Process | None:
        """One process of a kind; None where there is none just now."""
        engine, services = self.find_engine(), self._find("services.json")
        if victim == "engine":
            return engine
        found = []
        for root in (engine, services):
            for process in _children(root):
                with contextlib.suppress(psutil.Error):
                    if _is(victim, process, services):
                        found.append(process)
        return chance.choice(sorted(found, key=lambda each: each.pid)) if found else None

    def wait_phase(self, title: str) -> None:
        deadline = time.monotonic() + _PHASE_S
        workers = [process for process in _children(self.find_engine()) if _title(process).startswith("ray::")]
        while time.monotonic() < deadline and not any(_title(each).startswith(title) for each in workers):
            select.select([], [], [], _LOOK_S)

    def kill(self, moment: Moment, chance: random.Random) -> bool:
        """Kill with SIGKILL; a board goes with all that runs on it. Returns whether there was something to kill."""
        if moment.phase:
            self.wait_phase(moment.phase)
        process = self.find(moment.victim, chance)
        if process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if moment.victim == "board":
                sessions = _children(process)
                os.killpg(process.pid, signal.SIGKILL)
                for each in sessions:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            else:
                os.kill(process.pid, signal.SIGKILL)
        return True

    def _find(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(OSError, ValueError, LookupError, psutil.Error):
            document = json.loads((self._path / name).read_text())
            process = psutil.Process(int(document["pid"]))
            # Another process may have the number of one that was killed.
            if process.environ().get("FARM_HOME") == str(self._path) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


class TrialTable:
    """A campaign's trials as they were seen so far, held against what the store says now."""

    def __init__(self, home: Home, campaign: str) -> None:
        self._path = pathlib.Path(home.environment["FARM_HOME"]) / "farm.db"
        self._campaign = campaign
        self._seen: dict[int, tuple[object, ...]] = {}

    def count(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT count(*) FROM trials WHERE counted IS NOT NULL").fetchone()[0])

    def state(self) -> str:
        """The campaign's state; "" before it was submitted."""
        with self._reading() as connection:
            query = "SELECT c.state FROM campaigns c JOIN fleet_campaigns f ON f.campaign = c.id WHERE f.name = ?"
            row = connection.execute(query, [self._campaign]).fetchone()
            return str(row[0]) if row else ""

    def list_fallen(self) -> list[str]:
        with self._reading() as connection:
            return [row[0] for row in connection.execute("SELECT name FROM boards WHERE health = 'quarantined'")]

    def check(self) -> dict[str, int]:
        """Fail unless the table is exact; returns how many trials count and how many did not, by fault's side.

        Exact: what was seen before is there and unchanged. No candidate counts twice, and none was tried once more
        after it counted. Attempts are numbered without a gap. The engine's own sum is what was written by then.
        """
        with self._reading() as connection:
            connection.execute("BEGIN")
            progress = connection.execute("SELECT progress FROM campaign_progress").fetchone()
            rows = connection.execute(
                "SELECT id, board_type, workload, operating_point, candidate, purpose, attempt, counted, fault_side,"
                " status, median_s, board, recorded_at, held_s, outcome, trace_json FROM trials ORDER BY id"
            ).fetchall()
        now = {row[0]: row for row in rows}
        for number, row in self._seen.items():
            assert now.get(number) == row, f"trial {number} was lost or changed"
        self._seen = now
        attempts: dict[tuple[object, ...], list[tuple[int, int | None]]] = collections.defaultdict(list)
        searched = [row for row in rows if row[5] == "search"]
        for row in searched:
            attempts[row[1:6]].append((row[6], row[7]))
        for key, tries in attempts.items():
            assert [attempt for attempt, _ in tries] == list(range(1, len(tries) + 1)), (key, tries)
            assert not any(counted for _, counted in tries[:-1]), f"{key} was measured again: {tries}"
        if progress is not None:
            document = json.loads(progress[0])
            written = [row for row in searched if row[12] <= document["at"]]
            counted = sum(row[7] is not None for row in written)
            assert document["counted"] == counted, (document["counted"], counted)
            assert sum(task["counted"] for task in document["tasks"]) == counted, document["tasks"]
            faults = collections.Counter(f"{row[8]}_faults" for row in written if row[8] is not None)
            # Those of winners, which are no trials of the search, count besides.
            assert all(document["faults"][side] >= count for side, count in faults.items()), (document, faults)
        sides = collections.Counter(str(row[8]) for row in searched if row[7] is None)
        return {"counted": sum(row[7] is not None for row in searched), **sides}

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, isolation_level=None, timeout=30.0)
        with contextlib.closing(connection):
            yield connection


def _children(process: psutil.Process | None) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [] if process is None else process.children(recursive=True)
    return []


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        return str(process.cmdline()[0])
    return ""


def _is(victim: str, process: psutil.Process, services: psutil.Process | None) -> bool:
    words = process.cmdline()
    text = " ".join(words)
    if victim in _TITLES:
        return text.startswith(_TITLES[victim]) or _TITLES[victim] in words
    is_board = services is not None and process.ppid() == services.pid
    find: dict[str, Callable[[], bool]] = {
        "raylet": lambda: bool(words) and words[0].endswith("/raylet"),
        "tracker": lambda: "PopenTrackerServerState" in text,
        "agent": lambda: "serve" in words and "--virtual" in words and is_board,
        "session": lambda: "serve" in words and "--virtual" in words and not is_board,
    }
    return find["agent" if victim == "board" else victim]()
