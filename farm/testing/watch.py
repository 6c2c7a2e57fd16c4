"""What must hold in a simulated farm."""

from __future__ import annotations

from typing import Any

from device_agent.protocol import OperatingPoint
from farm.campaign.engine import engine
from farm.campaign.scheduler.state import Assignment
from farm.store import Store
from farm.testing.played_boards import Act, PlayedBoard
from farm.types.states import CampaignState
from farm.values import SEARCH_TRIAL

_POINTS = {"default": OperatingPoint(), "slow": OperatingPoint(cpu_freq_hz={"cpu": 403_200_000})}


class Watch:
    """What must hold; `failures` is what did not."""

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        self._tokens: dict[str, int] = {}
        self._checked: set[str] = set()
        # The store's latest trial when a candidate of a task was last sent to a board.
        self._sent: dict[tuple[Any, ...], int] = {}

    def on_act(self, board: PlayedBoard, act: Act) -> None:
        """A board ran a program."""
        if board.running:
            self.failures.append(f"two holders acted on {act.board} at once")
        if act.token < self._tokens.get(act.board, 0):
            self.failures.append(f"lease {act.token} acted on {act.board} after lease {self._tokens[act.board]}")
        self._tokens[act.board] = act.token
        if act.is_check and not act.program.get("wrong"):
            self._checked.add(str(act.program.get("candidate")))

    def on_measure(self, store: Store, running: engine.CampaignEngine, assignment: Assignment) -> None:
        """An engine sends a candidate of a search to a board."""
        task, name = assignment.job.task.key, assignment.job.candidate.hash
        campaign = running.active[task.campaign].id
        self._sent[campaign, task.board_type, task.workload, task.point, name] = store.trials.fetch_mark()

    def check_end(self, store: Store) -> None:
        """The faults are over, and time enough has passed."""
        for row in store.campaigns.fetch():
            counts, most = store.trials.count(row.id, purpose=SEARCH_TRIAL), row.budget.trials or 0
            counted = sum(number for side, number in counts.items() if side in ("", "candidate", None))
            if row.state not in (CampaignState.FINISHED, CampaignState.CANCELLED):
                self.failures.append(f"{row.name} is still {row.state}: {row.reason or 'without a reason'}")
            if counted > most:
                self.failures.append(f"{row.name} counted {counted} of {most} trials")
        for trial in store.trials.fetch():
            ran_at = OperatingPoint.from_dict((trial["outcome"] or {}).get("point") or {})
            key = tuple(trial[name] for name in ("campaign", "board_type", "workload", "operating_point", "candidate"))
            if trial["counted"] is not None and self._sent.get(key, 0) >= trial["id"]:
                self.failures.append(f"{key} is measured again, though it was counted")
            if trial["status"] == "ok" and ran_at != _POINTS[trial["operating_point"]]:
                self.failures.append(f"a trial at {trial['operating_point']} ran at {ran_at}")
        for record in store.records.fetch(simulated=True):
            if record.candidate not in self._checked:
                self.failures.append(f"the record of {record.workload_name} was never checked on a board")
        self.check_leases(store, "")

    def check_leases(self, store: Store, owner: str) -> None:
        """What `owner` had has been given back, and no lease lapsed where nothing is at fault."""
        for board in store.boards.fetch():
            if board.lease is not None and board.lease.owner.endswith(owner):
                self.failures.append(f"{board.name} is still leased: {board.lease.purpose} by {board.lease.owner}")
        if owner and any(event.kind == "lease_expired" for event in store.events.fetch_of_boards()):
            self.failures.append("a lease lapsed under its holder")
