"""What happened to a campaign, as an operator would tell it: what searches said as they began is summed up.

All events, as they were noted, are in the report's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# By the kind of an event; what follows it, where there is anything, is the event's own message.
_SAID = {
    "campaign_submitted": "submitted",
    "campaign_running": "measuring",
    "campaign_waiting": "waiting for boards",
    "campaign_paused": "paused",
    "campaign_resumed": "resumed",
    "campaign_interrupted": "interrupted",
    "campaign_verifying": "the search is over, winners are measured again",
    "campaign_finished": "finished",
    "campaign_cancelled": "cancelled",
    "campaign_failed": "failed",
    "model_timed": "",
    "restarted": "started again",
    "search_failed": "a search failed",
    "search_remark": "",
}
# What each task's search says as it begins: dozens of lines that matter together.
_SUMMED = "warm_start"


def tell(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """When, in seconds since the epoch, and what; the oldest first."""
    return list(_tell(events))


def _tell(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    begun = [each for each in events if each["kind"] == _SUMMED]
    for each in events:
        if each["kind"] == _SUMMED:
            if each is begun[0]:
                tasks = "1 task" if len(begun) == 1 else f"{len(begun)} tasks"
                yield each["at"], f"{tasks} began with what is known from elsewhere (see Warm start)"
            continue
        said = _SAID.get(each["kind"], each["kind"].replace("_", " "))
        yield each["at"], ": ".join(part for part in (said, each["message"]) if part)
