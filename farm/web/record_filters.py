"""Which records a request means: the words of `farm record list`, for the API's route and the page's."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from farm.report.record_choice import Filters

Text = Annotated[str, Query(max_length=500)]


def read_filters(
    workload: Text = "",
    operator: Text = "",
    board_type: Text = "",
    target: Text = "",
    operating_point: Text = "",
    since: Text = "",
    until: Text = "",
    campaign: Text = "",
    simulated: bool = False,
    imported: bool = False,
) -> Filters:
    """Real ones unless simulated ones are asked for: the two never mix."""
    return Filters(workload, operator, board_type, target, operating_point, since, until, campaign, simulated, imported)


RecordFilters = Annotated[Filters, Depends(read_filters)]
