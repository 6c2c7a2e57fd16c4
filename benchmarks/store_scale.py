"""What a store of a million trials of 200 campaigns costs, in a file and on PostgreSQL: batches, eight writers, what
people ask of it: lists, pages, reports, records, a campaign that goes on, what can be forgotten.

The trials are made by the database itself, as long as those of a small campaign are on average (outcome 790 bytes,
trace 1,800); what is timed goes through the farm's own calls and commands, each also on a store with the same campaigns
and a hundredth of their trials, which separates the cost of trials from start-up. The first campaign has a tenth of
all. PostgreSQL is a server of its own on this machine, with fsync as it comes. Some fifteen minutes for both.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import _machine
import psutil
import sqlalchemy as sa
import web_pages

from device_agent.protocol import Outcome, Status
from farm.settings import StoreLocation
from farm.store import Store, schema
from farm.types.campaigns import Order, WorkloadOrder
from farm.values import Trial
from tests import web_store

CAMPAIGNS, WORKLOADS, OF_EACH = 200, 200, 36
TRACE_BYTES, OUTCOME_BYTES, MODULE_BYTES = 1800, 790, 50_000
BOARDS, EVENTS = 500, 60
DAY_S = 86400.0
POINTS = web_store._HZ

# Of 220 trials 21 are the first campaign's, and one is each other's.
_FILL = """
INSERT INTO trials (campaign, board_type, workload, operating_point, candidate, purpose, attempt, counted, status,
  fault_side, median_s, board, simulated, library_sha256, build_s, held_s, recorded_at, outcome, trace_json)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {count}),
c(i, c, k) AS (SELECT i, CASE WHEN i % 220 < 200 THEN 1 + i % 220 ELSE 1 END,
  CASE WHEN i % 220 BETWEEN 1 AND 199 THEN i / 220 ELSE i / 21 END FROM n)
SELECT c, CASE k / {of_each} % 2 WHEN 0 THEN '{types[0]}' ELSE '{types[1]}' END,
  'w' || (1000 + (c * 5 + k % {of_each}) % {workloads}),
  CASE k / {of_each} % 2 WHEN 0 THEN '{points[0]}' ELSE '{points[1]}' END,
  'c' || (100000000000000 + i), CASE WHEN i % 50 = 49 THEN 'winner' ELSE 'search' END, 1,
  CASE WHEN i % 50 <> 49 AND i % 97 <> 0 THEN 1 END,
  CASE WHEN i % 97 = 0 THEN 'noisy' WHEN i % 14 = 0 AND i % 50 <> 49 THEN 'run_timeout' ELSE 'ok' END,
  CASE WHEN i % 97 = 0 THEN 'sample' WHEN i % 14 = 0 AND i % 50 <> 49 THEN 'candidate' END,
  CASE WHEN i % 97 <> 0 AND (i % 14 <> 0 OR i % 50 = 49) THEN 0.0001 + (CAST(i AS BIGINT) * 7919 % 1000003) * 1e-9 END,
  'nano-' || (10 + i % 50), false, 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855', 0.3, 1.5,
  {now} - ({count} - i) * {step}, '{outcome}', '{trace}' FROM c
"""


def begin(store: Store) -> None:
    """The campaigns, all but the first over, and what they have besides trials; boards; the newest records."""
    rng, now = random.Random(3), time.time()
    web_store.fill_boards(store, BOARDS, rng, now)
    for number in range(1, CAMPAIGNS + 1):
        order = make_order(number)
        assert web_store.submit(store, order, "{" + "x" * MODULE_BYTES + "}") == number
        store.campaigns.save_progress(number, make_progress(order))
        if number > 1:
            store.campaigns.note(number, "finished", "its trials are made")
        with store.session.writing() as connection:
            told = {"kind": "warm_start", "subject": order.name, "message": "begins with 120 candidates", "at": now}
            connection.execute(schema.events.insert(), [told] * EVENTS)


def finish(store: Store) -> None:
    """What follows from the trials: their counts, and a record of every workload's best."""
    with store.session.writing() as connection:
        table = schema.trials
        best = sa.func.min(table.c.median_s)
        counts = sa.select(table.c.status, sa.func.count()).group_by(table.c.status)
        connection.execute(schema.trial_counts.insert().from_select(["status", "trials"], counts))
        key = (table.c.workload, table.c.board_type, table.c.operating_point)
        for row in connection.execute(sa.select(*key, best.label("median_s")).group_by(*key)).mappings().all():
            where = [column == row[column.name] for column in key]
            one = sa.select(table.c.candidate, table.c.trace_json).where(*where, table.c.median_s == row["median_s"])
            candidate, trace = connection.execute(one.limit(1)).one()
            made = {"candidate": candidate, "trace_json": trace, "simulated": False, "verified_at": time.time()}
            errors = {"max_abs_error": 1e-5, "max_rel_error": 2e-6, "evidence": None, "origin": None}
            connection.execute(schema.records.insert().values(**row, **made, **errors))


def make_order(number: int) -> Order:
    """A campaign of some of the workloads on both types."""
    base = web_store.make_order(f"campaign-{number:03}")
    workloads = tuple(
        WorkloadOrder(
            hash=f"w{1000 + (number * 5 + each) % WORKLOADS}",
            name=f"conv2d 56x56x{number * 5 + each}>64 k3 relu",
            kind="conv2d",
            flop=1e8,
            weight=1.0,
            models=(base.models[each % 3].name,),
            calls=(1,),
            predicted_s=0.01,
        )
        for each in range(OF_EACH)
    )
    types = tuple(kind.model_copy(update={"simulated": False, "workloads": workloads}) for kind in base.types)
    return base.model_copy(update={"types": types})


def make_progress(order: Order) -> dict[str, Any]:
    """How far it is, as long as an engine's."""
    tasks = [
        {"workload": each.hash, "name": each.name, "kind": each.kind, "board_type": kind.board_type}
        | {"point": POINTS[kind.board_type], "threads": 4, "clocks": "", "weight": each.weight, "flop": each.flop}
        | {"counted": 60, "best_s": 1e-4, "predicted_s": None, "ended": "", "from": "trial"}
        for kind in order.types
        for each in kind.workloads
    ]
    about = {"at": 0.0, "phase": "done", "counted": 4500, "board_s": 5e3, "wall_clock_s": 600.0, "eta_s": None}
    more = {"winners": None, "models": [], "history": [], "faults": {}, "boards": [], "warm_start": {}, "verdict": None}
    return about | more | {"tasks": tasks}


def fill(store: Store, count: int) -> None:
    """So many trials, the newest of this minute, the oldest of 200 days ago."""
    outcome = '{"status": "ok", "board": "nano-10", "latency_s": [0.001, 0.001, 0.001], "notes": "'
    outcome += "x" * (OUTCOME_BYTES - len(outcome) - 2) + '"}'
    kinds = web_store.TYPES
    text = _FILL.format(
        count=count, workloads=WORKLOADS, of_each=OF_EACH, types=kinds, points=[POINTS[kind] for kind in kinds],
        now=time.time(), step=200 * DAY_S / count, outcome=outcome.replace(":", "\\:"), trace="x" * TRACE_BYTES,
    )  # fmt: skip
    with store.session.writing() as connection:
        connection.execute(sa.text(text))
    finish(store)


def make_trial(writer: int, number: int) -> Trial:
    outcome = Outcome(Status.OK, latency_s=(1e-3, 1.1e-3, 1.2e-3), board=f"board-{writer}")
    workload, board_type = f"w{1000 + number % WORKLOADS}", web_store.TYPES[writer % 2]
    return Trial(1, workload, f"{writer}-{number}", "default", 1, outcome, "x" * TRACE_BYTES, board_type=board_type)


def insert_batches(store: Store, writer: int, count: int, batch: int) -> float:
    """Trials per second."""
    started = time.perf_counter()
    for first in range(0, count, batch):
        assert store.trials.add_several([make_trial(writer, number) for number in range(first, first + batch)]) == batch
    return count / (time.perf_counter() - started)


def write(place: StoreLocation, writer: int, count: int, ready: Any, results: Any) -> None:
    """One of several processes that write at once, one trial after another."""
    with Store(place) as store:
        ready.wait()
        waits = []
        for number in range(count):
            started = time.perf_counter()
            assert store.trials.add(make_trial(1000 + writer, number))
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


def commands(folder: pathlib.Path) -> dict[str, list[str]]:
    """What people ask."""
    large, usual = "campaign-001", "campaign-100"
    return {
        "campaign list": ["campaign", "list", "--json"],
        "campaign show": ["campaign", "show", usual, "--json"],
        "campaign show, the largest": ["campaign", "show", large, "--json"],
        "campaign report": ["campaign", "show", "--out", "report", usual, "--out", str(folder / "report")],
        "campaign report, the largest": ["campaign", "show", "--out", "report", large, "--out", str(folder / "report")],
        "record list": ["record", "list", "--json"],
        "record list --campaign": ["record", "list", "--campaign", large, "--json"],
        "record best": ["record", "show", "--top", "5", "w1007", "--json"],
        "queue": ["queue", "--json"],
    }


def run_command(home: pathlib.Path, place: StoreLocation, arguments: list[str]) -> None:
    """A whole command, its start included."""
    program = [str(pathlib.Path(sys.executable).with_name("farm")), *arguments]
    subprocess.run(program, env=environment(home, place), check=True, capture_output=True, timeout=300)


def environment(home: pathlib.Path, place: StoreLocation) -> dict[str, str]:
    return os.environ | {"FARM_HOME": str(home)} | ({"FARM_STORE": place} if isinstance(place, str) else {})


def spent_s() -> float:
    """Processor time so far: this process's, that of commands which ended, and the server's, if one is ours."""
    total = sum(os.times()[:4])
    for server in [each for each in psutil.Process().children() if "postgres" in each.name()]:
        total += sum(server.cpu_times()[:4])
        for child in server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:2])
    return total


def calls(store: Store) -> dict[str, Callable[[], Any]]:
    """What an engine, services and programs ask."""

    def resume(number: int) -> None:
        """What an engine reads of a campaign that goes on, and of one of its tasks."""
        store.totals.fetch_course(number)
        store.trials.fetch_attempts(number)
        store.trials.count(number, purpose="search")
        store.trials.fetch_board_breakers(number, 3)
        store.trials.fetch_board_seconds(number)
        store.workloads.fetch(number)

    task, others = ("w1007", "jetson-nano", POINTS["jetson-nano"]), [f"w{1000 + number}" for number in range(OF_EACH)]
    return {
        "resume": lambda: resume(100),
        "resume, the largest": lambda: resume(1),
        "recall a task": lambda: store.trials.fetch_known_candidates(*task, False),
        "trials like a task's": lambda: store.trials.fetch_similar(others, simulated=False),
        "best of a workload": lambda: store.records.fetch_best_trials(*task, simulated=False),
        "forget events": store.pruning.prune_events,
        "what can be forgotten": lambda: store.pruning.plan(time.time() - 90 * DAY_S),
        "figures for Prometheus": lambda: store.totals.sum_trials(1),
    }


def measure_each(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Of each the median, and its processor time, the server's included (s)."""
    figures: dict[str, tuple[float, float]] = {}
    for name, call in calls.items():
        seconds, before = [], spent_s()
        for _ in range(rounds):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        figures[name] = (_machine.spread(seconds)["median"], _machine.round_to((spent_s() - before) / rounds))
    return figures


def measure_reading(folder: pathlib.Path, place: StoreLocation, rounds: int) -> dict[str, Any]:
    """Commands, calls and pages on one store."""
    asked = {
        name: functools.partial(run_command, folder, place, arguments) for name, arguments in commands(folder).items()
    }
    found: dict[str, Any] = {"commands_s": measure_each(asked, rounds)}
    with Store(place) as store:
        found["calls_s"] = measure_each(calls(store), rounds)
    pages = {"now": "/", "campaigns": "/campaigns", "campaign": "/campaigns/campaign-001", "records": "/records"}
    with web_pages.serving(folder, place) as (host, port, _):
        first = {name: web_pages.fetch(host, port, path) for name, path in pages.items()}
        again = {
            name: _machine.spread([web_pages.fetch(host, port, path) for _ in range(rounds)])["median"]
            for name, path in pages.items()
        }
    return found | {"pages_first_s": {name: _machine.round_to(each) for name, each in first.items()}, "pages_s": again}


def fetch_bytes(store: Store) -> int:
    """How much room the whole store takes."""
    with store.session.engine.connect() as connection:
        if isinstance(store.location, str):
            return int(connection.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one())
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one())


def measure(make: Callable[[str], StoreLocation], folder: pathlib.Path, options: Any) -> dict[str, Any]:
    """Everything on one database: first small, then with all trials."""
    figures: dict[str, Any] = {}
    for size, count in (("small", options.trials // 100), ("million", options.trials)):
        home = folder / size
        home.mkdir(exist_ok=True)
        place = make(size)
        with Store(place) as store:
            begin(store)
            empty = fetch_bytes(store)
            started = time.perf_counter()
            fill(store, count)
            figures[f"fill_{size}_s"] = round(time.perf_counter() - started, 1)
            if isinstance(place, str):  # autovacuum would within a minute
                with store.session.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                    connection.exec_driver_sql("VACUUM ANALYZE")
            figures["bytes_per_trial"] = round((fetch_bytes(store) - empty) / count)
        figures[size] = measure_reading(home, place, options.rounds)
        _machine.say(f"{size}: {figures}")
    if options.reading:
        return figures
    with Store(place) as store:
        figures["batched_inserts_per_second"] = round(insert_batches(store, 0, options.inserts, 100))
    figures["at_once"] = write_at_once(place, 8, options.at_once)
    return figures


@contextlib.contextmanager
def open_server(durable: bool) -> Iterator[Callable[[str], StoreLocation]]:
    from tests import postgresql

    sync = "on" if durable else "off"
    with postgresql.running(fsync=sync, full_page_writes=sync, shared_buffers="128MB") as cluster:
        yield lambda size: cluster.make(empty=True)


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=1_000_000, help="trials in the store (default: 1,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is asked (default: 3)")
    parser.add_argument("--inserts", type=int, default=10_000, help="trials in batches of 100 (default: 10,000)")
    parser.add_argument("--at-once", type=int, default=250, help="trials of each of 8 writers (default: 250)")
    parser.add_argument("--reading", action="store_true", help="time no writing: the server then does without fsync")
    parser.add_argument("--only", choices=("sqlite", "postgresql"), help="one of both")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.rounds, options.inserts, options.at_once = 20_000, 1, 300, 10
    with _machine.only_json() as emit, _machine.scratch() as folder:
        figures: dict[str, Any] = {"machine_quiet": _machine.wait_until_quiet(options.quick)}
        if options.only != "postgresql":
            figures["sqlite"] = measure(lambda size: folder / size / "farm.db", folder, options)
        if options.only != "sqlite":
            with open_server(durable=not options.reading) as make:
                figures["postgresql"] = measure(make, folder, options)
        figures["load_1min_after"] = round(os.getloadavg()[0], 2)
        emit("store_scale", vars(options), figures)


if __name__ == "__main__":
    main()
