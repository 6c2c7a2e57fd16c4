"""What the store costs a fleet: listing its boards with their leases, taking, renewing and giving back leases.

One process, a store in a temporary folder, 500 boards of which every second is leased. Default budget: some seconds.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _machine

from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.store import Store
from farm.values import Board, GoldenSample

LIMITS = HealthLimits()


def fill(store: Store, boards: int, events: int, golden: int) -> None:
    """A fleet with some past: `events` faults and as many recoveries, and `golden` runs, of every board."""
    description = {
        "cpu_model": "cortex-a57",
        "cores_online": list(range(4)),
        "agent_version": "0.1.0",
        "notes": "x" * 2000,
    }
    for number in range(boards):
        name = f"nano-{number:03d}"
        store.boards.save(Board(name, "jetson-nano", simulated=True, description=description))
        for _ in range(events):
            observe(store, name, Kind.THROTTLED)
            observe(store, name, Kind.PROBE_PASSED)
        for _ in range(golden):
            store.golden.add(GoldenSample(name, "golden/1", "default", 1e-3, (1e-3,) * 5, simulated=True))
        if number % 2:
            store.leases.acquire(name, "user@host", "a campaign", ttl_s=3600)


def observe(store: Store, name: str, kind: Kind) -> None:
    store.boards.observe(name, kind, "benchmark", decide_by(Observation(kind), LIMITS))


def timed(work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Milliseconds per call, over so many."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return _machine.spread(seconds, 1e3)


def time_command(home: pathlib.Path, rounds: int, *arguments: str) -> dict[str, Any]:
    """Milliseconds of a whole farm command, process included."""
    command = [sys.executable, "-c", "from farm.cli.main import main; main()", *arguments]
    environment = os.environ | {"FARM_HOME": str(home), "PYTHONPATH": str(_machine.ROOT)}

    def work() -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)

    return timed(work, rounds)


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", type=int, default=500, help="boards in the store (default: 500)")
    parser.add_argument("--events", type=int, default=5, help="faults and recoveries per board (default: 5)")
    parser.add_argument("--golden", type=int, default=20, help="golden-kernel runs per board (default: 20)")
    parser.add_argument("--rounds", type=int, default=20, help="repeats of each figure (default: 20)")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.rounds = 20, 3
    with _machine.only_json() as emit, _machine.scratch() as folder, contextlib.ExitStack() as stack:
        quiet = _machine.wait_until_quiet(options.quick)
        store = stack.enter_context(Store(folder / "farm.db"))
        started = time.perf_counter()
        fill(store, options.boards, options.events, options.golden)
        fill_s = time.perf_counter() - started

        def lease_cycle() -> None:
            lease = store.leases.acquire("nano-000", "benchmark", "timing")
            store.leases.renew(lease)
            store.leases.release(lease)

        figures = {
            "machine_quiet": quiet,
            "fill_s": round(fill_s, 2),
            "list_ms": timed(store.boards.fetch, options.rounds),
            "list_command_ms": time_command(folder, min(options.rounds, 10), "board", "list", "--json"),
            "empty_command_ms": time_command(folder, min(options.rounds, 10), "--version"),
            "lease_cycle_ms": timed(lease_cycle, options.rounds * 5),
            "observe_ms": timed(lambda: observe(store, "nano-000", Kind.PROBE_PASSED), options.rounds * 5),
            "golden_of_type_ms": timed(
                lambda: store.golden.fetch("jetson-nano", "golden/1", "default", simulated=True), options.rounds
            ),
            "expire_ms": timed(store.leases.expire, options.rounds),
        }
        emit("fleet_store", vars(options), figures)


if __name__ == "__main__":
    main()
