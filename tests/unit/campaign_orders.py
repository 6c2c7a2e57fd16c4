"""Orders of campaigns small enough to read, and a store that holds one, for tests of what becomes of them."""

from __future__ import annotations

from typing import Any

from device_agent.protocol import OperatingPoint
from farm.campaign.order import MeasureOrder, ModelOrder, Order, SearchOrder, TypeOrder, WorkloadOrder
from farm.campaign.scheduler.values import Budget
from farm.store import Store
from farm.values import Workload

TARGET = {"kind": "llvm", "num-cores": 4}


def make_order(name: str = "c", **given: Any) -> Order:
    workloads = (
        WorkloadOrder("w1", "dense 4>4", "dense", 1e6, 2, ("mlp",), (2,)),
        WorkloadOrder("w2", "conv2d 3x3", "conv2d", 2e6, 1, ("mlp",), (1,)),
    )
    values: dict[str, Any] = {
        "name": name,
        "owner": "ana@desk",
        "models": (ModelOrder("mlp", "zoo:mlp", "ab" * 32, None),),
        "types": (TypeOrder("jetson-nano", True, TARGET, 2, "graph/1", {"default": OperatingPoint()}, workloads),),
        "budget": Budget(trials=100),
        "search": SearchOrder("xgb", None, None, True, 0),
        "measure": MeasureOrder(1, 3, 0.02, 10.0, 1 << 30, 3),
    }
    return Order(**(values | given))


def submit(store: Store, order: Order) -> int:
    """Put an order and its workloads into a store; returns the campaign's number."""
    workloads = [
        Workload(
            *(each.hash, each.name, each.flop, each.weight, (), "{}", dict(kind.target), "graph/1"),
            board_type=kind.board_type,
        )
        for kind in order.types
        for each in kind.workloads
    ]
    return store.campaigns.submit(order.to_document(), "campaign run c.yaml", workloads)
