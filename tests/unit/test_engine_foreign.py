"""What trials elsewhere in the store a search is shown: whose code its boards could have run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from device_agent.protocol import Outcome, Status
from farm.campaign.engine.progress import fetch_foreign
from farm.campaign.scheduler.state import to_campaign
from farm.store import Store
from farm.types.campaigns import Order
from farm.values import Trial
from tests.unit.campaign_orders import make_order, submit

BOARDS_OWN = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}
HOSTS = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 1}


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as opened:
        yield opened


def order_for(target: Mapping[str, Any], name: str, **of_type: Any) -> Order:
    order = make_order(name)
    return order.model_copy(update={"types": (order.types[0].model_copy(update={"target": target, **of_type}),)})


def try_virtually(store: Store, target: Mapping[str, Any]) -> None:
    campaign = submit(store, order_for(target, "virtual"))
    for candidate, median_s in (("fast", 0.1), ("slow", 0.2)):
        outcome = Outcome(Status.OK, latency_s=(median_s,), board="sim-1", simulated=True)
        trial = Trial(
            campaign=campaign,
            workload="w2",
            board_type="jetson-nano",
            operating_point="default",
            candidate=candidate,
            trace_json="[]",
            attempt=1,
            outcome=outcome,
        )
        assert store.trials.add(trial)


def show(store: Store, target: Mapping[str, Any], **of_type: Any) -> list[str]:
    """The candidates that the search for a campaign's convolution is shown."""
    order = order_for(target, "real", **({"simulated": False} | of_type))
    submit(store, order)
    [task] = (task for task in to_campaign(order, order.budget).tasks if task.key.workload == "w2")
    return [each.candidate for each in fetch_foreign(store, task)]


def test_a_real_board_begins_with_what_its_emulated_code_was_priced_at(store: Store) -> None:
    """The very same task on a virtual board counts as one elsewhere: it teaches, and decides nothing."""
    try_virtually(store, BOARDS_OWN)
    assert sorted(show(store, BOARDS_OWN)) == ["fast", "slow"]


def test_what_ran_as_another_processors_code_teaches_a_real_board_nothing(store: Store) -> None:
    """Virtual boards of before ran this machine's code."""
    try_virtually(store, HOSTS)
    assert show(store, BOARDS_OWN) == []


def test_this_machine_learns_from_no_virtual_board(store: Store) -> None:
    """What a virtual board took of it was stretched."""
    try_virtually(store, HOSTS)
    assert show(store, HOSTS, is_host=True) == []
