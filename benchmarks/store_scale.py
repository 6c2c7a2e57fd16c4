"""What a store of a million trials costs, in a file and on PostgreSQL: the best of a workload, batches, eight writers.

The trials are made by the database itself; what is timed goes through the farm's own calls. PostgreSQL is a server of
its own on this machine, with fsync as it comes. Default budget: some two minutes for each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import _machine
import sqlalchemy as sa

from device_agent.protocol import Outcome, Status
from farm.settings import StoreLocation
from farm.store import Store
from farm.values import Trial

BOARD_TYPES = ("jetson-nano", "jetson-tx2", "jetson-agx-xavier", "raspberry-pi-4")
WORKLOADS = 200
TRACE_BYTES = 400

_FILL = """
INSERT INTO trials (campaign, board_type, workload, operating_point, candidate, purpose, attempt, counted, status,
  median_s, board, simulated, build_s, held_s, recorded_at, outcome, trace_json)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {count})
SELECT 1, CASE i / {workloads} % 4 WHEN 0 THEN '{types[0]}' WHEN 1 THEN '{types[1]}' WHEN 2 THEN '{types[2]}'
  ELSE '{types[3]}' END, 'w' || (i % {workloads}), 'default', 'c' || i, 'search', 1, 1, 'ok',
  0.0001 + (CAST(i AS BIGINT) * 7919 % 1000003) * 1e-9, 'board-' || (i % 50), false, 0.3, 1.5, 1700000000.0 + i,
  '{{"status": "ok", "latency_s": [0.001, 0.001, 0.001]}}', '{trace}' FROM n
"""


def begin(store: Store) -> None:
    row = {"flop": 1e9, "arguments": [], "target": {}, "pipeline": "graph/2", "module_json": "{}", "weight": 1}
    number = store.start_campaign("farm tune", "m", "", "", 1, {})
    store.save_workloads(number, [row | {"hash": f"w{n}", "name": f"conv2d {n}"} for n in range(WORKLOADS)])


def make_trial(writer: int, number: int) -> Trial:
    outcome = Outcome(Status.OK, latency_s=(1e-3, 1.1e-3, 1.2e-3), board=f"board-{writer}")
    workload, board_type = f"w{number % WORKLOADS}", BOARD_TYPES[writer % 4]
    return Trial(1, workload, f"{writer}-{number}", "default", 1, outcome, "x" * TRACE_BYTES, board_type=board_type)


def insert_batches(store: Store, writer: int, count: int, batch: int) -> float:
    """Trials per second."""
    started = time.perf_counter()
    for first in range(0, count, batch):
        assert store.add_trials([make_trial(writer, number) for number in range(first, first + batch)]) == batch
    return count / (time.perf_counter() - started)


def write(place: StoreLocation, writer: int, count: int, ready: Any, results: Any) -> None:
    """One of several processes that write at once, one trial after another."""
    with Store(place) as store:
        ready.wait()
        waits = []
        for number in range(count):
            started = time.perf_counter()
            assert store.add_trial(make_trial(1000 + writer, number))
            waits.append(time.perf_counter() - started)
        results.put(waits)


def write_at_once(place: StoreLocation, writers: int, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(writers + 1), context.Queue()
    processes = [context.Process(target=write, args=(place, n, count, ready, results)) for n in range(writers)]
    for process in processes:
        process.start()
    ready.wait(120)
    started = time.perf_counter()
    waits = [wait for _ in processes for wait in results.get(timeout=240)]
    seconds = time.perf_counter() - started
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * writers
    return {
        "writers": writers,
        "errors": 0,
        "trials_per_second": round(len(waits) / seconds),
        "wait_ms": _machine.spread(waits, 1e3),
        "longest_wait_ms": round(max(waits) * 1e3, 1),
    }


def measure(place: StoreLocation, options: Any) -> dict[str, Any]:
    with Store(place) as store:
        begin(store)
        started = time.perf_counter()
        text = _FILL.format(count=options.trials, workloads=WORKLOADS, types=BOARD_TYPES, trace="x" * TRACE_BYTES)
        with store._writing() as connection:
            connection.execute(sa.text(text))
        fill_s = time.perf_counter() - started
        if isinstance(place, str):  # autovacuum would within a minute
            engine = store._engine.execution_options(isolation_level="AUTOCOMMIT")
            with engine.connect() as connection:
                connection.exec_driver_sql("VACUUM ANALYZE trials")
        seconds = []
        for number in range(options.rounds):
            started = time.perf_counter()
            board_type = BOARD_TYPES[number // WORKLOADS % 4]
            best = store.fetch_best_trials(f"w{number * 7 % WORKLOADS}", board_type, "default", simulated=False)
            seconds.append(time.perf_counter() - started)
            assert len(best) == min(10, options.trials // WORKLOADS // 4), best
        rate = insert_batches(store, 0, options.inserts, 100)
    return {
        "fill_s": round(fill_s, 1),
        "best_ms": _machine.spread(seconds, 1e3),
        "slowest_best_ms": round(max(seconds) * 1e3, 2),
        "batched_inserts_per_second": round(rate),
        "at_once": write_at_once(place, 8, options.at_once),
    }


@contextlib.contextmanager
def open_server() -> Iterator[StoreLocation]:
    from tests import postgresql

    with postgresql.running(fsync="on", full_page_writes="on", shared_buffers="128MB") as cluster:
        yield cluster.make(empty=True)


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=1_000_000, help="trials in the store (default: 1,000,000)")
    parser.add_argument("--rounds", type=int, default=100, help="questions for the best (default: 100)")
    parser.add_argument("--inserts", type=int, default=10_000, help="trials in batches of 100 (default: 10,000)")
    parser.add_argument("--at-once", type=int, default=250, help="trials of each of 8 writers (default: 250)")
    parser.add_argument("--only", choices=("sqlite", "postgresql"), help="one of both")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.rounds, options.inserts, options.at_once = 20_000, 5, 300, 10
    with _machine.only_json() as emit, _machine.scratch() as folder:
        figures: dict[str, Any] = {"machine_quiet": _machine.wait_until_quiet(options.quick)}
        if options.only != "postgresql":
            figures["sqlite"] = measure(pathlib.Path(folder) / "farm.db", options)
        if options.only != "sqlite":
            with open_server() as place:
                figures["postgresql"] = measure(place, options)
        figures["load_1min_after"] = round(os.getloadavg()[0], 2)
        emit("store_scale", vars(options), figures)


if __name__ == "__main__":
    main()
