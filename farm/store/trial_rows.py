"""What the store returns of trials, as named tuples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farm.values import Workload


class CandidateKey(NamedTuple):
    """A candidate of a task."""

    board_type: str
    workload: str
    operating_point: str
    candidate: str


class KnownCandidate(NamedTuple):
    """A candidate that was tried on a board type, and `board`, one that measured it.

    `median_s` is None if the candidate itself failed. `doubted`: all trials were measured on boards that drifted then.
    """

    candidate: str
    trace_json: str
    board: str | None
    median_s: float | None
    doubted: bool = False


class TrialOutcome(NamedTuple):
    """What a board answered about a trial."""

    board: str
    recorded_at: float
    operating_point: str
    outcome: Mapping[str, Any]


class SimilarTrial(NamedTuple):
    """A good trial that another search learns from, and its workload; `median_s` in seconds."""

    workload: Workload
    board_type: str
    operating_point: str
    candidate: str
    trace_json: str
    median_s: float
