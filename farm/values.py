"""Frozen value types that the whole coordinator shares. They hold facts and do nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import Outcome

# The operating point of a board whose clocks nobody set.
DEFAULT_POINT = "default"


@dataclasses.dataclass(frozen=True)
class Board:
    """One machine that runs an agent. `key` is its name at the tracker: `<board type>/<board name>`."""

    name: str
    board_type: str
    simulated: bool
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def key(self) -> str:
        return f"{self.board_type}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate measured, or failed, on one board at one operating point.

    The first five fields and `attempt` are its identity: the store refuses a second one. `build_s` is the compiler's
    time, `held_s` the time for which the board's session was busy with it.
    """

    campaign: int
    workload: str
    candidate: str
    operating_point: str
    attempt: int
    outcome: Outcome
    trace_json: str = dataclasses.field(repr=False)
    library_sha256: str | None = None
    build_s: float | None = None
    held_s: float | None = None

    @property
    def median_s(self) -> float | None:
        """Median latency sample in seconds, or None where the trial is not ok."""
        samples = sorted(self.outcome.latency_s)
        if self.outcome.status.fault_side is not None or not samples:
            return None
        middle = len(samples) // 2
        return samples[middle] if len(samples) % 2 else (samples[middle - 1] + samples[middle]) / 2


@dataclasses.dataclass(frozen=True)
class Record:
    """The best verified trial of a workload for a board type and operating point.

    `max_abs_error` and `max_rel_error` are against the unscheduled function on the same inputs.
    """

    workload: str
    workload_name: str
    board_type: str
    operating_point: str
    pipeline: str
    candidate: str
    median_s: float
    flop: float
    max_abs_error: float
    max_rel_error: float
    simulated: bool
    trace_json: str = dataclasses.field(repr=False)
    verified_at: float = 0.0
