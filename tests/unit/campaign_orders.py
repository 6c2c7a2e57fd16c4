"""Orders of campaigns small enough to read, and a store that holds one, for tests of what becomes of them."""

from __future__ import annotations

from typing import Any

from device_agent.protocol import OperatingPoint
from farm.store import Store
from farm.types.campaigns import Budget, MeasureOrder, ModelOrder, Order, SearchOrder, TypeOrder, WorkloadOrder
from farm.values import Workload

TARGET = {"kind": "llvm", "num-cores": 4}
SEARCH = SearchOrder(tuner="xgb", loss=None, early_stopping=None, warm_start=True, seed=0)
MEASURE = MeasureOrder(number=1, repeat=3, min_repeat_s=0.02, timeout_s=10.0, memory_bytes=1 << 30, verify_top=3)


def make_type(board_type: str, workloads: tuple[WorkloadOrder, ...] = (), **given: Any) -> TypeOrder:
    values = {"target": TARGET, "threads": 2, "pipeline": "graph/2", "points": {"default": OperatingPoint()}} | given
    return TypeOrder(**({"board_type": board_type, "simulated": True, "workloads": workloads} | values))


def make_model(name: str, batch: int | None = None) -> ModelOrder:
    return ModelOrder(name=name, origin=f"zoo:{name}", sha256="ab" * 32, batch=batch)


def make_order(name: str = "c", **given: Any) -> Order:
    workloads = (
        WorkloadOrder(hash="w1", name="dense 4>4", kind="dense", flop=1e6, weight=2, models=("mlp",), calls=(2,)),
        WorkloadOrder(hash="w2", name="conv2d 3x3", kind="conv2d", flop=2e6, weight=1, models=("mlp",), calls=(1,)),
    )
    values: dict[str, Any] = {
        "name": name,
        "owner": "ana@desk",
        "models": (make_model("mlp"),),
        "types": (make_type("jetson-nano", workloads),),
        "budget": Budget(trials=100),
        "search": SEARCH,
        "measure": MEASURE,
    }
    return Order(**(values | given))


def submit(store: Store, order: Order) -> int:
    """Put an order and its workloads into a store; returns the campaign's number."""
    workloads = [
        Workload(
            *(each.hash, each.name, each.flop, each.weight, (), "{}", dict(kind.target), "graph/2"),
            board_type=kind.board_type,
        )
        for kind in order.types
        for each in kind.workloads
    ]
    return store.campaigns.submit(order, "campaign run c.yaml", workloads)
