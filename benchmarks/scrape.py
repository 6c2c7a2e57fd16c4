"""How long a scrape of the coordinator takes: a fleet of many boards, and campaigns with many trials, in a store.

    python -m benchmarks.scrape [--boards 500] [--trials 100000] [--campaigns 20]

Prints the bytes, and the CPU time of a scrape and of asking the store, which is done apart, on a thread.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import tempfile
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from farm.metrics.farm_metrics import Exporter, FarmMetrics
from farm.services import telemetry
from farm.settings import Settings
from farm.store import Store, schema
from farm.types.campaigns import Budget, MeasureOrder, ModelOrder, Order, SearchOrder, TypeOrder
from farm.values import Virtual, Workload

_TYPE = "jetson-nano"
# What a Prometheus of today asks for.
_HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
_SCRAPES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=500)
    parser.add_argument("--trials", type=int, default=100_000, help="of the first campaign")
    parser.add_argument("--campaigns", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, Store(Path(home) / "farm.db") as store:
        for number in range(options.boards):
            store.boards.register(f"nano-{number:03}", _TYPE, Virtual(number))
        for number in range(options.campaigns):
            _submit(store, f"campaign-{number}")
        _add_trials(store, options.trials)
        registry = CollectorRegistry()
        metrics = FarmMetrics(registry)
        metrics.observe_boards(store.boards.fetch())
        for number in range(options.boards):
            metrics.observe_link(f"nano-{number:03}", True, 1)
            metrics.observe_probe(f"nano-{number:03}", {"passed": True, "seconds": 1, "median_s": 0.01, "factor": 1.0})
        settings, sums = Settings(home=home), {}
        for what in ("first", "next"):
            began = time.perf_counter()
            sums = telemetry.observe(store, settings, metrics, sums)
            print(f"asking the store, {what} time: {time.perf_counter() - began:.3f} s")
        with Exporter(registry, 20000) as exporter:
            times, cpu, size = [], [], 0
            for _ in range(_SCRAPES):
                began, cpu_began = time.perf_counter(), time.process_time()
                client = http.client.HTTPConnection(*exporter.address)
                client.request("GET", "/metrics", headers=_HEADERS)
                size = len(client.getresponse().read())
                client.close()
                times.append(time.perf_counter() - began)
                cpu.append(time.process_time() - cpu_began)
        print(
            f"{options.boards} boards, {options.campaigns} campaigns, {options.trials} trials: "
            f"{statistics.median(times):.3f} s a scrape ({statistics.median(cpu):.3f} s of CPU), {size} bytes packed"
        )


def _submit(store: Store, name: str) -> None:
    model = ModelOrder(name="mlp", origin="zoo:mlp", sha256="ab" * 32, batch=None)
    of_type = TypeOrder(
        board_type=_TYPE, simulated=True, target={}, threads=1, pipeline="graph/2", points={}, workloads=()
    )
    order = Order(
        name=name,
        owner="benchmark",
        models=(model,),
        types=(of_type,),
        budget=Budget(trials=1000),
        search=SearchOrder(tuner="xgb", loss=None, early_stopping=None, warm_start=True, seed=0),
        measure=MeasureOrder(number=1, repeat=3, min_repeat_s=0.02, timeout_s=10.0, memory_bytes=1 << 30, verify_top=3),
    )
    workload = Workload("w1", "dense", 1.0, 1, (), "{}", {}, "graph/2", board_type=_TYPE)
    number = store.campaigns.submit(order, "benchmark", [workload])
    store.campaigns.note(number, "running", "", {"host": "", "pid": 0, "created": 0.0})
    timed = {"name": "mlp", "board_type": _TYPE, "point": "default", "latency_s": 0.01, "predicted": 0, "workloads": 1}
    boards = [{"name": "nano-000", "board_type": _TYPE, "doing": "measuring", "point": ""}]
    store.campaigns.save_progress(number, {"models": [timed], "boards": boards, "eta_s": 60.0, "wall_clock_s": 60.0})


def _add_trials(store: Store, count: int) -> None:
    """Rows as long as those of a real trial, past the checks of `trials.add_several`, which would take minutes."""
    row = {"campaign": 1, "board_type": _TYPE, "workload": "w1", "operating_point": "default", "purpose": "search"}
    row |= {"attempt": 1, "counted": 1, "status": "ok", "fault_side": None, "median_s": 0.001, "board": "nano-000"}
    row |= {"simulated": True, "library_sha256": "0" * 64, "build_s": 0.5, "held_s": 0.2, "recorded_at": time.time()}
    row |= {"outcome": {"status": "ok", "filler": "0" * 1200}, "trace_json": "0" * 4000}
    with store.session.writing() as connection:
        for first in range(0, count, 5000):
            rows = [row | {"candidate": f"c{number}"} for number in range(first, min(first + 5000, count))]
            connection.execute(schema.trials.insert(), rows)


if __name__ == "__main__":
    main()
