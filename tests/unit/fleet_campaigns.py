"""Small campaigns, and a fleet that answers by hand, for tests of the fleet's scheduler."""

from __future__ import annotations

from typing import Any, TypeVar

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.scheduler import step
from farm.types.campaigns import Budget

Wanted = TypeVar("Wanted")


def campaign(name: str = "vision", **fields: Any) -> v.ScheduledCampaign:
    workloads = tuple(
        v.CampaignWorkload(f"{name}-w{n}", "conv2d", 1.0 + n, 1e8) for n in range(fields.pop("workloads", 2))
    )
    types, points = fields.pop("board_types", ("nano",)), fields.pop("points", ("default",))
    parts = tuple(v.Part(board_type, point, workloads) for board_type in types for point in points)
    values: dict[str, Any] = {
        "name": name,
        "owner": f"owner of {name}",
        "parts": parts,
        "budget": Budget(trials=100),
    }
    return v.ScheduledCampaign(**(values | fields))


class Hands:
    """A fleet whose answers a test gives itself. It keeps what is asked and not yet answered, oldest first."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {"batch": 4, "warmup": 4, "builders": 8}
        self.state = FleetState(v.SchedulerSettings(**(values | settings)))
        self.now_s = 0.0
        self.wake_s: float | None = None
        self.seen: list[v.Decision] = []
        self.searches: dict[int, v.Search] = {}
        self.builds: dict[int, v.Build] = {}
        self.measures: dict[int, v.Measure] = {}
        self._made = 0

    def tell(self, *events: v.Event, after_s: float = 0.0) -> list[v.Decision]:
        self.now_s += after_s
        decided = step(self.state, events, self.now_s)
        self.wake_s = decided.wake_s
        for decision in decided.decisions:
            if isinstance(decision, v.Search):
                self.searches[decision.request] = decision
            elif isinstance(decision, v.Build):
                self.builds[decision.job] = decision
            elif isinstance(decision, v.Measure):
                self.measures[decision.assignment] = decision
            elif isinstance(decision, v.Revoke):
                self.measures.pop(decision.assignment)
            elif isinstance(decision, (v.Discard, v.Ban, v.Count)) and decision.job is not None:
                self.builds.pop(decision.job, None)
        self.seen += decided.decisions
        return list(decided.decisions)

    def boards(self, *names: str, board_type: str = "nano", **fields: Any) -> None:
        self.tell(*(v.BoardArrived(name, board_type, **fields) for name in names))

    def propose(self, request: int, count: int | None = None, exhausted: bool = False) -> list[v.Decision]:
        search = self.searches.pop(request)
        count = search.count if count is None else count
        self._made += count
        names = tuple(f"{number}" for number in range(self._made - count, self._made))
        return self.tell(v.Proposed(request, names, exhausted))

    def build(self, job: int, side: FaultSide | None = None) -> list[v.Decision]:
        self.builds.pop(job)
        return self.tell(v.Built(job, side))

    def measure(
        self, assignment: int, side: FaultSide | None = None, latency_s: float = 1e-3, board_s: float = 2.0
    ) -> list[v.Decision]:
        self.measures.pop(assignment)
        result = v.Measured(assignment, side, board_s, latency_s if side is None else None)
        return self.tell(result, after_s=board_s)

    def supply(self) -> None:
        while self.searches or self.builds:
            for request in list(self.searches):
                self.propose(request)
            for job in list(self.builds):
                self.build(job)

    def running(self) -> list[v.Measure]:
        at_boards = self.state.assignments
        return [m for number, m in self.measures.items() if at_boards[number].started_s is not None]

    def finish(self, most: int = 10_000) -> None:
        self.supply()
        while self.running() and most:
            self.measure(self.running()[0].assignment)
            self.supply()
            most -= 1

    def of(self, kind: type[Wanted]) -> list[Wanted]:
        return [decision for decision in self.seen if isinstance(decision, kind)]

    def status(self, name: str = "vision") -> v.Status:
        """A campaign's status."""
        return self.state.campaigns[name].status
