"""What provisioning did to a board, step by step, as values that are printed or given to programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from device_agent.protocol import StrEnum


class StepStatus(StrEnum):
    """How a step ended."""

    OK = "ok"  # it only looks, and found what it needs
    DONE = "done"  # it changed the board
    ALREADY = "already"  # there was nothing left to change
    WOULD = "would"  # it would change the board, in a dry run
    FAILED = "failed"


class ProvisioningOutcome(StrEnum):
    """How a board came out of it."""

    PROVISIONED = "provisioned"  # changed and proven
    UNCHANGED = "unchanged"  # everything was there already
    PLANNED = "planned"  # a dry run
    REMOVED = "removed"
    ROLLED_BACK = "rolled back"  # the new version failed; what was there before runs again
    FAILED = "failed"
    INTERRUPTED = "interrupted"


# What an operator may build on: the board does what was asked for.
GOOD = frozenset(
    {
        ProvisioningOutcome.PROVISIONED,
        ProvisioningOutcome.UNCHANGED,
        ProvisioningOutcome.PLANNED,
        ProvisioningOutcome.REMOVED,
    }
)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step. `seconds` is how long it took."""

    name: str
    status: StepStatus
    detail: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class BoardReport:
    """One board. `version` is what runs there as far as is known; `notes` is what an operator should know of it.

    `state` says in a sentence how the board is left.
    """

    board: str
    outcome: ProvisioningOutcome
    version: str
    state: str
    steps: tuple[StepReport, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        document = dataclasses.asdict(self)
        return document | {
            "outcome": str(self.outcome),
            "steps": [s | {"status": str(s["status"])} for s in document["steps"]],
        }
