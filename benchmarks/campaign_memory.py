"""What a campaign's coordinator costs per trial: growth of its memory, and its own processor time.

The engine, its scheduler, journal and store are the product's. What it talks to is not: boards, compilers and searches
here answer at once, with answers as big as real ones, so that some thousand trials take a minute. So what Ray's client
in the engine's process keeps is not in these figures; `--real N` adds a campaign of N trials with everything real, on
virtual boards that measure for a moment, whose slope over so few trials says no more than that nothing big is kept.
Default: 6,000 trials, about a minute.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import pathlib
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import _campaigns
import _machine
import psutil

from farm.values import Workload

GOAL_BYTES_PER_TRIAL = 1024
# Of a convolution's candidate: its scheduled function, its trace, its library.
MODULE_BYTES, TRACE_BYTES, LIBRARY_BYTES = 40_000, 8_000, 20_000
TYPE = "jetson-nano"
KINDS = ("conv", "depthwise", "dense")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=6000, help="counted (default: 6000)")
    parser.add_argument("--boards", type=int, default=16, help="boards at once (default: 16)")
    parser.add_argument("--real", type=int, default=0, help="trials of a campaign with everything real (default: 0)")
    options = parser.parse_args()
    if options.quick:
        options.trials = 600
    with _machine.only_json() as emit, _machine.scratch() as folder:
        figures = measure(options) | (measure_real(options, folder) if options.real else {})
        emit("campaign_memory", vars(options), figures)


def measure(options: Any) -> dict[str, Any]:
    from farm.campaign.engine import engine as engine_module
    from farm.settings import Settings
    from farm.store import Store

    # The loop waits for Ray's references; what stands in for the parts has none, and always has an answer.
    engine_module.ray = types.SimpleNamespace(wait=lambda *args, **kwargs: None)
    engine_module.searches.Searches = Searches
    with tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home, Store(pathlib.Path(home) / "farm.db") as store:
        for index in range(options.boards):
            register(store, f"nano-{index + 1}")
        submit(store)
        crew, compilers, meter = Crew(options.boards), Compilers(), Meter(options.trials)
        engine = engine_module.CampaignEngine(Settings(home=home), store, crew, compilers, lambda text: None)
        crew.told = meter.look
        cpu_s, began = time.process_time(), time.monotonic()
        engine.run(lambda: crew.measured >= options.trials)
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        counted = sum(row["counted"] is not None for row in store.trials.fetch())
        engine.close()
    return {
        "counted": counted,
        "goal_bytes_per_trial": GOAL_BYTES_PER_TRIAL,
        "bytes_per_trial": round(slope(meter.second_half)),
        "bytes_per_trial_is": "slope of the resident size over the second half of the trials",
        "resident_mb": {trials: round(size / 1e6, 2) for trials, size in meter.sizes},
        "engine_cpu_ms_per_trial": _machine.round_to(1e3 * cpu_s / crew.measured, 3),
        "trials_per_s": _machine.round_to(crew.measured / wall_s, 3),
        "stands_in": "boards, compilers and searches; see the benchmark's docstring",
    }


def measure_real(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    with _campaigns.rack(2) as rack:
        rack.set_timing(0.05)
        carried = _campaigns.run_campaign(
            "small", _campaigns.make_model(folder / "small.onnx", 8, ("dense",)), 2, options.real,
            search={"tuner": "random", "seed": 0, "ops": _campaigns.KINDS},
            measure={"repeat": 1, "min_repeat": 0.02, "verify_top": 1},
        )  # fmt: skip
    seen = carried.engine_rss
    return {
        "real": {
            "trials": len(carried.trials),
            "bytes_per_trial": round(slope(seen[len(seen) // 2 :])),
            "resident_mb": {trials: round(size / 1e6, 2) for trials, size in seen[:: max(1, len(seen) // 12)]},
        }
    }


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes per trial, by least squares."""
    if len(points) < 2:
        return float("nan")
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread


class Meter:
    """The resident size of this process now and then."""

    def __init__(self, trials: int) -> None:
        self._step = max(1, trials // 24)
        self._process = psutil.Process(os.getpid())
        self.sizes: list[tuple[int, int]] = []

    def look(self, trials: int) -> None:
        if not self.sizes or trials >= self.sizes[-1][0] + self._step:
            gc.collect()
            self.sizes.append((trials, self._process.memory_info().rss))

    @property
    def second_half(self) -> list[tuple[int, int]]:
        return self.sizes[len(self.sizes) // 2 :]


def register(store: Any, name: str) -> None:
    from farm.values import Virtual

    store.boards.register(name, TYPE, Virtual())


def submit(store: Any) -> None:
    """A campaign without an end, of three workloads."""
    from device_agent.protocol import OperatingPoint
    from farm.types.campaigns import Budget, MeasureOrder, ModelOrder, Order, SearchOrder, TypeOrder, WorkloadOrder

    target = {"kind": "llvm", "num-cores": 4}
    works = tuple(
        WorkloadOrder(hash=f"w-{kind}", name=kind, kind=kind, flop=1e7, weight=1, models=("m",), calls=(1,))
        for kind in KINDS
    )
    order = Order(
        name="long",
        owner="benchmark",
        models=(ModelOrder(name="m", origin="m.onnx", sha256="ab" * 32, batch=None),),
        types=(
            TypeOrder(
                board_type=TYPE,
                simulated=True,
                target=target,
                threads=4,
                pipeline="graph/2",
                points={"default": OperatingPoint()},
                workloads=works,
            ),
        ),
        budget=Budget(trials=10_000_000),
        search=SearchOrder(tuner="random", loss=None, early_stopping=None, warm_start=False, seed=0),
        measure=MeasureOrder(number=1, repeat=3, min_repeat_s=0.02, timeout_s=10.0, memory_bytes=1 << 30, verify_top=1),
    )
    workloads = [
        Workload(each.hash, each.name, each.flop, 1, (), "{}", target, "graph/2", board_type=TYPE) for each in works
    ]
    store.campaigns.submit(order, "benchmark", workloads)


def text_of(size: int, number: int) -> str:
    """A text of its own, not shared with others."""
    return f"{number:08d}" + "x" * (size - 8)


class Searches:
    """Stands in for the searches: always has new candidates."""

    def __init__(self, note: Any, logs: Any) -> None:
        self._answers: list[Any] = []
        self.pending: list[Future[None]] = []
        self._number = 0

    def open(self, *search: Any) -> None: ...
    def close(self, campaign: str) -> None: ...
    def close_all(self) -> None: ...
    def prepare(self) -> None: ...
    def get_busy_s(self, campaign: str) -> float:
        return 0.0

    def observe(self, task: Any, results: Any) -> None: ...
    def forget(self, task: Any, candidate: str) -> None: ...
    def replay(self, token: str, task: Any, trace_json: str) -> None: ...

    def ask(self, request: int, task: Any, count: int) -> None:
        from farm.campaign.engine.searches import SearchAnswer
        from farm.search.tuners.tasks import Candidate

        made = []
        for _ in range(count):
            self._number += 1
            number, name = self._number, hashlib.sha256(str(self._number).encode()).hexdigest()
            made.append(Candidate(task.workload, name, (), text_of(TRACE_BYTES, number), text_of(MODULE_BYTES, number)))
        self._answers.append(SearchAnswer(request, made, False))
        self.pending = [over()]

    def poll(self) -> list[Any]:
        answers, self._answers, self.pending = self._answers, [], []
        return answers


class Compilers:
    """Stands in for the compilers."""

    workers = 16

    pending: tuple[()] = ()

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def submit(self, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> Future[Any]:
        from device_agent.protocol import Status
        from farm.search.build.build_pool import BuildResult

        library = text_of(LIBRARY_BYTES, next(self._numbers)).encode()
        return over(BuildResult(Status.OK, "", library, hashlib.sha256(library).hexdigest(), 0.3))

    def poll(self) -> None: ...


def over(result: Any = None) -> Future[Any]:
    """A call that is done."""
    call: Future[Any] = Future()
    call.set_result(result)
    return call


class Crew:
    """Stands in for the boards: each measurement has ended when it is next asked for."""

    reference_s = 0.0

    def __init__(self, count: int) -> None:
        from farm.campaign.engine.boards import Arrived
        from farm.campaign.engine.engine_board import Bell

        self.bell = Bell()
        self._events: list[Any] = [
            Arrived(f"nano-{index + 1}", TYPE, {}, {"simulated": True}) for index in range(count)
        ]
        self.measured = 0
        self.told: Any = lambda trials: None

    def want(self, asked: Any) -> None: ...
    def want_host(self, wanted: bool) -> str:
        return ""

    def priorities(self) -> dict[str, int]:
        return {}

    def ask_reference_kernels(self, board_types: Any) -> None: ...
    def is_settling(self, board_types: Any) -> bool:
        return False

    def offer_reference_kernel(self, *kernel: Any) -> None: ...

    def busy(self, board: str) -> bool:
        return False

    def measure(self, board: str, point: Any, spec: Any, library: bytes) -> Future[Any]:
        from device_agent.protocol import Outcome, Status
        from farm.crew.held_board import Ended

        self.measured += 1
        latency_s = 1e-3 + 1e-9 * self.measured
        outcome = Outcome(
            Status.OK,
            latency_s=(latency_s,) * 3,
            calls_per_sample=10,
            timing_s=2.0,
            started_at=time.time(),
            board=board,
        )
        return over(Ended(outcome, 2.1))

    def poll(self) -> list[Any]:
        events, self._events = self._events, []
        self.told(self.measured)
        return events


if __name__ == "__main__":
    main()
