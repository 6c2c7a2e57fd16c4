"""The campaign search over a single workload, without the names that a campaign has for its tasks."""

from __future__ import annotations

from farm.search.tuners.campaign_search import CampaignSearch
from farm.search.tuners.decisions import Candidate, SearchTask, derive_traits
from farm.values import Workload


class OneSearch:
    """A small search, on one thread so that equal seeds and results give equal candidates."""

    def __init__(self, workload: Workload) -> None:
        self._search = CampaignSearch("xgb", None, 0, population=16, generations=1, threads=1)
        self._search.open("one", SearchTask(workload, "local", "default", derive_traits(workload.target)))
        self.exhausted = False

    def propose(self, count: int) -> list[Candidate]:
        found, self.exhausted = self._search.propose("one", count)
        return found

    def observe(self, results: list[tuple[str, float | None]]) -> None:
        self._search.observe("one", results)

    def recall(self, known: list[tuple[str, str, float | None]]) -> None:
        self._search.recall("one", known)

    def forget(self, candidate: str) -> None:
        self._search.forget("one", candidate)

    def replay(self, trace_json: str) -> str:
        return self._search.replay("one", trace_json)
