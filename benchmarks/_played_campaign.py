"""What stands in for searches and compilers of a campaign: they answer at once, with answers as big as real ones."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from farm.values import Workload

# Of a convolution's candidate: its scheduled function, its trace, its library.
MODULE_BYTES, TRACE_BYTES, LIBRARY_BYTES = 40_000, 8_000, 20_000
TYPE = "jetson-nano"
KINDS = ("conv", "depthwise", "dense")


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
        from farm.search.tuners.decisions import Candidate

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
        from farm.search.codegen.build_pool import BuildResult

        library = text_of(LIBRARY_BYTES, next(self._numbers)).encode()
        return over(BuildResult(Status.OK, "", library, hashlib.sha256(library).hexdigest(), 0.3))

    def poll(self) -> None: ...


def over(result: Any = None) -> Future[Any]:
    """A call that is done."""
    call: Future[Any] = Future()
    call.set_result(result)
    return call
