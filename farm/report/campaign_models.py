"""What each model gained on each board type at each operating point, from a campaign's document. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gain:
    """Latencies in seconds, None where not known. `first_s`: with the first schedule that ran of every workload, after
    `first_trials` counted trials. `last_s`: with the records where all `workloads` have one (`verified`), else with the
    best measured.
    """

    model: str
    board_type: str
    point: str
    first_s: float | None
    first_trials: int | None
    last_s: float | None
    verified: bool
    workloads: int
    recorded: int

    @property
    def factor(self) -> float | None:
        """How many times as fast it became."""
        return self.first_s / self.last_s if self.first_s and self.last_s else None


def list_gains(document: Mapping[str, Any]) -> list[Gain]:
    """One for each curve of the document, in their order."""
    winners = {(each["board_type"], each["point"], each["workload"]): each for each in document["winners"]}
    gains = []
    for curve in document["curves"]:
        steps = curve["steps"]
        medians = {
            workload: winners[curve["board_type"], curve["point"], workload]["median_s"]
            for workload in curve["calls"]
            if (curve["board_type"], curve["point"], workload) in winners
        }
        recorded = sum(median_s is not None for median_s in medians.values())
        verified = recorded == len(curve["calls"])
        first_s, last_s = (steps[0][1], steps[-1][1]) if steps else (None, None)
        if verified:
            last_s = sum(calls * medians[workload] for workload, calls in curve["calls"].items())
        if verified and steps:
            first_s = sum(
                calls * _find_first(curve["first"][workload], winners[curve["board_type"], curve["point"], workload])
                for workload, calls in curve["calls"].items()
            )
        gains.append(
            Gain(
                curve["model"],
                curve["board_type"],
                curve["point"],
                first_s,
                int(steps[0][0]) if steps else None,
                last_s,
                verified,
                len(curve["calls"]),
                recorded,
            )
        )
    return gains


def _find_first(first: tuple[str, float], winner: Mapping[str, Any]) -> float:
    """The latency of a workload's first schedule; where it won, the record's: one code has not two times."""
    candidate, latency_s = first
    return float(winner["median_s"]) if candidate == winner["candidate"] else latency_s
