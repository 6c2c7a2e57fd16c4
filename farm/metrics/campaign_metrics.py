"""From what the store says of campaigns to the values of their metrics. Pure; who asks the store is
`farm/services/figures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import FaultSide
from farm.metrics import table
from farm.metrics.table import Metric
from farm.values import CampaignState

# By metric, then by the values of its labels.
Values = dict[Metric, dict[tuple[str, ...], float]]

SIDES = ("ok", *map(str, FaultSide))
DOINGS = ("idle", "measuring", "verifying")
# With these nobody looks for a board: winners have theirs, the others wait for an operator.
_NO_QUEUE = (CampaignState.VERIFYING, CampaignState.INTERRUPTED, CampaignState.PAUSED)
_TO_RUN = "run"


def to_values(
    counts: Mapping[str, int], standings: Sequence[Mapping[str, Any]], sums: Mapping[int, Mapping[str, Any]]
) -> Values:
    """All series of campaigns. What an engine has not said is absent, and so are sums that nobody has made."""
    values: Values = {
        table.CAMPAIGNS: {(str(state),): counts.get(state, 0) for state in CampaignState},
        table.BOARDS_WANTED: {},
    }
    values |= {metric: {} for metric in _OF_ONE}
    for row in standings:
        _add(values, row, sums.get(row["id"]))
    return values


_OF_ONE = (
    table.CAMPAIGN_STATE,
    table.CAMPAIGN_TRIALS,
    table.CAMPAIGN_BUILD,
    table.CAMPAIGN_BOARDS_HELD,
    table.CAMPAIGN_SEARCH,
    table.CAMPAIGN_ELAPSED,
    table.CAMPAIGN_ETA,
    table.CAMPAIGN_BOARDS,
    table.CAMPAIGN_LATENCY,
    table.CAMPAIGN_PREDICTED,
)


def _add(values: Values, row: Mapping[str, Any], sums: Mapping[str, Any] | None) -> None:
    name, state = row["name"], CampaignState(row["state"])
    values[table.CAMPAIGN_STATE] |= {(name, str(each)): each is state for each in CampaignState}
    if sums is not None:
        values[table.CAMPAIGN_TRIALS] |= {(name, side): sums["by_side"].get(side, 0) for side in SIDES}
        values[table.CAMPAIGN_BUILD][name,] = sums["build_s"]
        values[table.CAMPAIGN_BOARDS_HELD][name,] = sums["board_s"]
    for metric, key in (
        (table.CAMPAIGN_SEARCH, "search_s"),
        (table.CAMPAIGN_ELAPSED, "wall_clock_s"),
        (table.CAMPAIGN_ETA, "eta_s"),
    ):
        if row[key] is not None:
            values[metric][name,] = float(row[key])
    has = _add_boards(values, row)
    if not state.over and row["wanted"] == _TO_RUN and state not in _NO_QUEUE:
        for board_type in row["board_types"]:
            queue = values[table.BOARDS_WANTED]
            queue[board_type,] = queue.get((board_type,), 0) + (board_type not in has)
    for model in row["models"] or ():
        labels = (name, model["name"], model["board_type"], model["point"])
        values[table.CAMPAIGN_PREDICTED][labels] = model["predicted"]
        if model["latency_s"] is not None:
            values[table.CAMPAIGN_LATENCY][labels] = model["latency_s"]


def _add_boards(values: Values, row: Mapping[str, Any]) -> set[str]:
    """Count a campaign's boards; returns the types of which it has one. One that is over has none."""
    boards = values[table.CAMPAIGN_BOARDS]
    has = set()
    for board_type in row["board_types"]:
        boards |= {(row["name"], board_type, doing): 0 for doing in DOINGS}
    for board in row["boards"] or ():
        labels = (row["name"], board["board_type"], board["doing"])
        boards[labels] = boards.get(labels, 0) + 1
        has.add(board["board_type"])
    return has
