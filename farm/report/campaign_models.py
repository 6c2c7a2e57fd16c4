"""What the trials gained each model on each board type at each operating point, from a campaign's document. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.report.campaign_rows import list_finals


@dataclasses.dataclass(frozen=True)
class Gain:
    """Latencies in seconds, None where not known: `predicted_s` is the model's without a trial, `last_s` that of what
    is compiled from now on, both timed in turns on a board (`said`: in a sentence). Where the model was not timed,
    `last_s` is the sum of its functions' records where all `workloads` have one (`verified`), else of the best known.

    `factor`: how many times as fast as without a trial it is; 1.0 where nothing was gained.
    """

    model: str
    board_type: str
    point: str
    predicted_s: float | None
    last_s: float | None
    factor: float | None
    said: str
    verified: bool
    workloads: int
    recorded: int


def list_gains(document: Mapping[str, Any]) -> list[Gain]:
    """One for each curve of the document, in their order."""
    winners = {(each["board_type"], each["point"], each["workload"]): each for each in document["winners"]}
    finals = {(each["model"], each["board_type"], each["point"]): each for each in list_finals(document["progress"])}
    gains = []
    for curve in document["curves"]:
        key, steps = (curve["model"], curve["board_type"], curve["point"]), curve["steps"]
        medians = {
            workload: winners[curve["board_type"], curve["point"], workload]["median_s"]
            for workload in curve["calls"]
            if (curve["board_type"], curve["point"], workload) in winners
        }
        recorded = sum(median_s is not None for median_s in medians.values())
        verified = recorded == len(curve["calls"])
        last_s = steps[-1][1] if steps else None
        if verified:
            last_s = sum(calls * medians[workload] for workload, calls in curve["calls"].items())
        final = finals.get(key, {})
        predicted_s = factor = None
        if final.get("taken"):
            last_s, verified = final["latency_s"], True
            predicted_s = final["variants"].get("predicted", {}).get("median")
            factor = (final["gain"] or {"value": 1.0})["value"]
        gains.append(
            Gain(*key, predicted_s, last_s, factor, final.get("said", ""), verified, len(curve["calls"]), recorded)
        )
    return gains
