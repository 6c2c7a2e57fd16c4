"""`farm board power`: switches a board off, on, or off and on again, by the commands of its fleet file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from farm.cli import options, output
from farm.crew import health, leased_board
from farm.errors import UsageError
from farm.processes import machine
from farm.services import powering
from farm.store import Store
from farm.values import Health

# What a board that was switched off by us is drained for; switching it on puts no other one back in service.
_OFF = "its power was switched off"


@output.command
def power(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    action: Annotated[Literal["on", "off", "cycle"], typer.Argument(metavar="on|off|cycle")],
    force: Annotated[bool, typer.Option("--force", help="Revoke the lease of the board's holder.")] = False,
    reason: Annotated[str, typer.Option("--why", help="Reason, kept with the board's events.")] = "",
) -> None:
    """Switch a board's power. Runs the commands of its fleet file on this host.

    A board that is switched off gets no work, as with `drain`, until it is switched on again.
    """
    with options.open_store() as store:
        store.boards.require(name)
        commands = powering.parse_power(store.boards.fetch_power().get(name))
        if commands is None:
            raise UsageError(
                f"no command switches the power of {name}",
                "Give it `power:` in its fleet file; docs/howto/switch-power.md says how.",
            )
        if force:
            store.leases.force_release(name, machine.name_user(), reason or f"power {action}")
        lease = powering.take_board(
            store, name, leased_board.name_owner(), f"power {action}", commands, frozenset(Health)
        )
        try:
            said = powering.switch(name, commands, action)
        finally:
            store.leases.release(lease)
        _note(store, name, action, reason)
    output.stdout.print(f"{name}: power {action}{f': {said}' if said else ''}", markup=False, soft_wrap=True)


def _note(store: Store, name: str, action: str, reason: str) -> None:
    board = store.boards.require(name)
    by, tail = machine.name_user(), f": {reason}" if reason else ""
    store.events.add(f"power_{action}", name, f"switched {action}{tail}", by)
    if action == "cycle":
        kind, detail = health.Kind.POWER_CYCLED, reason or "by an operator"
    elif action == "off" and board.health in (Health.GOOD, Health.SUSPECT, Health.QUARANTINED):
        kind, detail = health.Kind.DRAIN, f"{_OFF}{tail}"
    elif action == "on" and board.health == Health.MAINTENANCE and _OFF in board.health_reason:
        kind, detail = health.Kind.UNDRAIN, "its power was switched on"
    else:
        return
    store.boards.observe(name, str(kind), by, health.decide_by(health.Observation(kind, detail)))
