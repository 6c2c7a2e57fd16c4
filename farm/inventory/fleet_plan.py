"""Plan the changes that make the registered boards agree with a fleet file. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from farm.inventory import fleet_addresses as addresses
from farm.inventory.fleets import Fleet, FleetBoard
from farm.values import Ssh, Transport

# Fields that may change under a lease.
_ANY_TIME = ("labels.", "power.")


@dataclasses.dataclass(frozen=True)
class RegisteredBoard:
    """A registered board, for a plan. `leased_by` is the lease's owner, None without one.

    `power` holds its power commands in the store's form.
    """

    name: str
    board_type: str
    transport: Transport
    labels: Mapping[str, str]
    leased_by: str | None = None
    power: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class FieldChange:
    """One differing field, such as `transport.port` or `labels.rack`; None on the side that lacks it."""

    field: str
    old: Any
    new: Any


@dataclasses.dataclass(frozen=True)
class BoardChange:
    """A registered board and its description in the file."""

    board: FleetBoard
    fields: tuple[FieldChange, ...]


@dataclasses.dataclass(frozen=True)
class HeldBack:
    """A change that must wait, because `owner` holds a lease of the board."""

    name: str
    action: Literal["change", "remove"]
    owner: str


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """The difference. Each registered or described board is in exactly one part.

    `unlisted` boards are registered, not in the file, and stay; `removed` ones go.
    """

    added: tuple[FleetBoard, ...] = ()
    changed: tuple[BoardChange, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    held_back: tuple[HeldBack, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do now."""
        return not (self.added or self.changed or self.removed)


def plan(current: Sequence[RegisteredBoard], wanted: Fleet, prune: bool = False) -> FleetPlan:
    """Plan how the registered boards become those of the file.

    Unlisted boards are removed only with `prune`. A leased board is not removed, and keeps its type and transport; its
    labels and power commands may change. A host key that the file leaves open stays as long as address and port do.
    Raises UsageError if a board of the file has the address of one that stays beside it.
    """
    registered = {board.name: board for board in current}
    added, changed, unchanged, held_back = [], [], [], []
    for described in wanted.boards:
        board = described
        known = registered.pop(board.name, None)
        if known is None:
            added.append(board)
            continue
        board = _keep_host_key(known, board)
        if not (fields := compare(known, board)):
            unchanged.append(board.name)
        elif known.leased_by is not None and not all(change.field.startswith(_ANY_TIME) for change in fields):
            held_back.append(HeldBack(board.name, "change", known.leased_by))
        else:
            changed.append(BoardChange(board, fields))
    if not prune:
        left = [(known.name, known.transport) for known in registered.values()]
        for board in (*added, *(change.board for change in changed)):
            addresses.require_new_end(board.name, board.transport, left)
    removed, unlisted = [], []
    for name, known in sorted(registered.items()):
        if not prune:
            unlisted.append(name)
        elif known.leased_by is not None:
            held_back.append(HeldBack(name, "remove", known.leased_by))
        else:
            removed.append(name)
    return FleetPlan(tuple(added), tuple(changed), tuple(unchanged), tuple(removed), tuple(unlisted), tuple(held_back))


def compare(known: RegisteredBoard, wanted: FleetBoard) -> tuple[FieldChange, ...]:
    """The fields in which a registered board differs from its description: type, transport, labels, power."""
    old, new = _flatten(known), _flatten(wanted)
    return tuple(
        FieldChange(field, old.get(field), new.get(field))
        for field in dict.fromkeys((*new, *old))
        # A null field and a missing one are equal.
        if old.get(field) != new.get(field)
    )


def _keep_host_key(known: RegisteredBoard, wanted: FleetBoard) -> FleetBoard:
    """`wanted` with the host key confirmed at first contact, if the file has none and the address is unchanged."""
    old, new = known.transport, wanted.transport
    if (
        not isinstance(old, Ssh)
        or not isinstance(new, Ssh)
        or new.host_key
        or (old.host, old.port) != (new.host, new.port)
    ):
        return wanted
    return dataclasses.replace(wanted, transport=dataclasses.replace(new, host_key=old.host_key))


def _flatten(board: RegisteredBoard | FleetBoard) -> dict[str, Any]:
    power = board.power.to_document() if isinstance(board, FleetBoard) and board.power else board.power
    return {
        "type": board.board_type,
        "transport.kind": board.transport.kind,
        **{f"transport.{key}": value for key, value in dataclasses.asdict(board.transport).items()},
        **{f"labels.{key}": value for key, value in board.labels.items()},
        **{f"power.{key}": _to_text(value) for key, value in dict(power or {}).items()},
    }


def _to_text(value: Any) -> str:
    """Format commands as people write them, and numbers unchanged."""
    return shlex.join(value) if isinstance(value, list) else f"{value:g}"
