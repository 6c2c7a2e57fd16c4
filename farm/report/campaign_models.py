"""What the trials gained each model on each board type at each operating point, from a campaign's document. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.report.campaign_rows import list_finals


@dataclasses.dataclass(frozen=True)
class Gain:
    """Latencies in seconds, None where not known: `predicted_s` is the model's without a trial, `last_s` that of what
    is compiled from now on, both timed in turns on a board (`said`: in a sentence). Where the model was not `timed`,
    `last_s` is the sum over its `workloads`: of the record where there is one (`recorded`), else of the best trial
    (`tried`), else of the prediction (`guessed`); None where one has none of these.

    `factor`: how many times as fast as without a trial it is; 1.0 where nothing was gained.
    """

    model: str
    board_type: str
    point: str
    predicted_s: float | None
    last_s: float | None
    factor: float | None
    said: str
    timed: bool
    workloads: int
    recorded: int
    tried: int
    guessed: int

    @property
    def verified(self) -> bool:
        """Whether `last_s` is made from nothing but what was measured again."""
        return self.timed or self.recorded == self.workloads


def list_gains(document: Mapping[str, Any]) -> list[Gain]:
    """One for each curve of the document, in their order."""
    winners = {(each["board_type"], each["point"], each["workload"]): each for each in document["winners"]}
    finals = {(each["model"], each["board_type"], each["point"]): each for each in list_finals(document["progress"])}
    gains = []
    for curve in document["curves"]:
        key = (curve["model"], curve["board_type"], curve["point"])
        last_s: float | None = 0.0
        counts = [0, 0, 0]
        for workload, calls in curve["calls"].items():
            winner = winners.get((curve["board_type"], curve["point"], workload), {})
            # The most trusted first.
            times = (winner.get("median_s"), curve["best_s"].get(workload), winner.get("predicted_s"))
            source = next((at for at, time_s in enumerate(times) if time_s is not None), None)
            if source is None:
                last_s = None
                continue
            counts[source] += 1
            last_s = None if last_s is None else last_s + calls * times[source]
        final = finals.get(key, {})
        predicted_s = factor = None
        timed = bool(final.get("taken"))
        if timed:
            last_s = final["latency_s"]
            predicted_s = final["variants"].get("predicted", {}).get("median")
            factor = (final["gain"] or {"value": 1.0})["value"]
        gains.append(
            Gain(*key, predicted_s, last_s, factor, final.get("said", ""), timed, len(curve["calls"]), *counts)
        )
    return gains
