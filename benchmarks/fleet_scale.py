"""Many boards that measure at once in one engine: memory, trials a second, processor time a trial, start.

The engine, its scheduler, leases, queue, store, sessions and the tracker are the product's; boards are played on
loopback behind real sockets (`_played_boards.py`), compilers and searches answer at once.
"""

from __future__ import annotations

import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from typing import Any

import _machine
import _played_campaign
import psutil

_PLAYED = pathlib.Path(__file__).with_name("_played_boards.py")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", type=int, default=200, help="boards at once (default: 200)")
    parser.add_argument("--trials", type=int, default=10000, help="counted (default: 10000)")
    parser.add_argument("--measure-s", type=float, default=0.0, help="how long a measurement takes (default: 0 s)")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.trials = 50, 500
    with _machine.only_json() as emit:
        emit("fleet_scale", vars(options), measure(options) | time_silence())


def measure(options: Any) -> dict[str, Any]:
    from farm.campaign.engine import boards as boards_module
    from farm.campaign.engine import engine as engine_module
    from farm.campaign.engine import host as host_module
    from farm.connectivity.tracker import Tracker
    from farm.crew.health import HealthLimits, Kind, Observation, decide_by
    from farm.settings import Settings
    from farm.store import Store

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    engine_module.searches.Searches = _played_campaign.Searches
    with tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home, Store(pathlib.Path(home) / "farm.db") as store:
        for index in range(options.boards):
            name = f"nano-{index + 1}"
            _played_campaign.register(store, name)
            for kind in (Kind.BACK, Kind.PROBE_PASSED):
                store.boards.observe(name, kind, "benchmark", decide_by(Observation(kind), HealthLimits()))
        _played_campaign.submit(store)
        tracker = Tracker.start(19190, pathlib.Path(home) / "tracker.log")
        played = subprocess.Popen(
            [sys.executable, _PLAYED, *map(str, (tracker.host, tracker.port, options.boards, options.measure_s))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            within = type("Within", (), {"tracker": tracker})()
            settings = Settings(home=home)
            process, before = psutil.Process(), psutil.Process().memory_info().rss
            host = host_module.HostBoard(settings, store, lambda text: None)
            with boards_module.EngineBoards(within, store, lambda text: None, host) as held:
                engine = engine_module.CampaignEngine(
                    settings, store, held, _played_campaign.Compilers(), lambda text: None
                )
                first, measure = Firsts(), held.measure
                held.measure = lambda *about: first.follow(about[0], measure(*about))  # type: ignore[method-assign]
                deadline = time.monotonic() + 900.0
                engine.run(lambda: first.trials >= options.trials or time.monotonic() > deadline)
                figures = first.report(options.boards) | {
                    "resident_mb": round(process.memory_info().rss / 1e6),
                    "resident_before_mb": round(before / 1e6),
                    "threads": threading.active_count(),
                    "processes_of_the_engine": 1 + sum(
                        each.pid != played.pid and "tracker" not in " ".join(each.cmdline())
                        for each in process.children()
                    ),
                }  # fmt: skip
                engine.close()
        finally:
            played.kill()
            played.wait()
            tracker.stop()
    return figures


def time_silence(count: int = 20, deadline_s: float = 0.2) -> dict[str, Any]:
    """How long after its deadline a board that says nothing is given up, in ms; `count` times."""
    import anyio

    from farm.errors import DeadlineError
    from farm.measure import session

    session.CONNECT_TIMEOUT_S = deadline_s
    late = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = session.AgentAddress(*silent.getsockname())
        for _ in range(count):
            began = time.perf_counter()
            try:
                anyio.run(session.BoardSession.open, where, "jetson-nano/silent")
            except DeadlineError:
                late.append(time.perf_counter() - began - deadline_s)
    return {"silent_board_given_up_late_ms": _machine.spread(late, 1e3)}


class Firsts:
    """When each board's first trial came, and the pace from then on."""

    def __init__(self) -> None:
        self._began, self._boards, self._all_at = time.monotonic(), set[str](), 0.0
        self._cpu_s, self._mark = time.process_time(), (0, 0.0, 0.0)
        self.trials = 0

    def follow(self, board: str, measured: Future[Any]) -> Future[Any]:
        """Count a measurement once it has ended."""
        measured.add_done_callback(lambda ended: None if ended.cancelled() else self._note(board))
        return measured

    def _note(self, board: str) -> None:
        self.trials += 1
        if board not in self._boards:
            self._boards.add(board)
            self._all_at = time.monotonic()
            self._mark = (self.trials, self._all_at, time.process_time())

    def report(self, boards: int) -> dict[str, Any]:
        """All figures: the pace is that after the last board's first trial."""
        trials, wall_s, cpu_s = self._mark
        count = max(1, self.trials - trials)
        return {
            "boards_that_measured": len(self._boards),
            "first_trial_of_the_last_board_s": _machine.round_to(self._all_at - self._began),
            "trials": self.trials,
            "trials_per_s": _machine.round_to(count / (time.monotonic() - wall_s), 3),
            "engine_cpu_ms_per_trial": _machine.round_to(1e3 * (time.process_time() - cpu_s) / count, 3),
        }


if __name__ == "__main__":
    main()
