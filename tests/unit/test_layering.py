"""What each function of a model takes: watched call by call, and told as the board's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from device_agent.protocol import Outcome, RunDetails, Status
from device_agent.worker import engines


class Machine:
    """A machine that tells of three calls in a run, one of them within another and one its own."""

    def set_instrument(self, watch: Callable[..., None]) -> None:
        self._watch = watch

    def run(self) -> None:
        for name, before in (
            ("conv", True), ("inner", True), ("inner", False), ("conv", False), ("vm.builtin.reshape", True),
            ("vm.builtin.reshape", False), ("dense", True), ("dense", False), ("conv", True), ("conv", False),
        ):  # fmt: skip
            self._watch(None, name, before, None)


def test_calls_are_counted_and_told_in_the_boards_time() -> None:
    """In the order of first calls; what a function calls in turn is its own, the machine's own work counts for none.
    What takes half of a run here takes half of it there; names and numbers are bounded, and survive the wire.
    """
    machine: Any = Machine()
    found = engines.profile(machine, machine.run)
    assert [(name, calls) for name, (calls, _) in found.items()] == [("conv", 2), ("dense", 1)]
    assert all(seconds > 0 for _, seconds in found.values())
    layers = engines.to_layers({"a" * 999: (3, 0.5), "b": (1, 0.25)}, latency_s=2.0, host_s=1.0)
    assert [(len(each.name), each.calls, each.latency_s) for each in layers] == [(200, 3, 1.0), (1, 1, 0.5)]
    assert engines.to_layers({"a": (1, 0.5)}, 1.0, 0.0)[0].latency_s == pytest.approx(0.5)
    outcome = Outcome(Status.OK, latency_s=(2.0,), details=RunDetails(2.5, 1 << 20, layers))
    assert Outcome.from_json(outcome.to_json()) == outcome
