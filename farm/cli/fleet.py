"""`farm fleet`: make the boards that the farm knows agree with a fleet file."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.cli import options, output
from farm.errors import TransientError, UsageError
from farm.inventory import fleet_plan, fleets
from farm.processes import machine
from farm.store import Store, parse_transport

app = typer.Typer(help="Fleet files: all boards, and how each is reached, in one YAML file.", no_args_is_help=True)
# The author of the changes, in the boards' events.
_BY = "farm fleet apply"

File = Annotated[Path, typer.Argument(metavar="FILE", help="A fleet file; docs/howto/describe-a-fleet.md says how.")]


@app.command("apply")
@output.command
def apply(
    file: File,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Also remove boards that the file does not name.")] = False,
    json: options.Json = False,
) -> None:
    """Apply a fleet file. What will be done is shown first."""
    fleet = fleets.read_fleet(file)
    settings = farm_settings.load()
    # A dry run makes nothing, not even an empty store.
    location = settings.store_location
    is_new = isinstance(location, Path) and not location.exists()
    with contextlib.nullcontext() if dry_run and is_new else options.open_store(settings) as store:
        todo = fleet_plan.plan(_fetch_registered(store) if store else [], fleet, prune)
        if not json:
            _print_plan(todo)
        if store and not dry_run:
            _carry_out(todo, store)
    if json:
        output.print_json(_plan_document(todo, str(file), dry_run))
    else:
        _print_end(todo, dry_run)
    if todo.held_back and not dry_run:
        raise TransientError(
            f"left as they are, because they are leased: {', '.join(held.name for held in todo.held_back)}",
            "Run this again when they are free; `farm board list` shows who holds them.",
        )


def _fetch_registered(store: Store) -> list[fleet_plan.RegisteredBoard]:
    power = store.boards.fetch_power()
    return [
        fleet_plan.RegisteredBoard(
            row.name,
            row.board_type,
            parse_transport(row.transport),
            row.labels,
            row.lease.owner if row.lease else None,
            power.get(row.name),
        )
        for row in store.boards.fetch()
    ]


def _carry_out(todo: fleet_plan.FleetPlan, store: Store) -> None:
    """One transaction per board: a run that is cut off is continued by the next.

    Raises TransientError where another command leased, added or removed one of these boards after the plan was made.
    """
    by = f"{machine.name_user()} ({_BY})"
    try:
        for new in todo.added:
            store.boards.register(new.name, new.board_type, new.transport, new.labels, by, _to_power(new))
        for change in todo.changed:
            new = change.board
            power = _to_power(new)
            store.boards.update(
                new.name, board_type=new.board_type, transport=new.transport, labels=new.labels, by=by, power=power
            )
        for name in todo.removed:
            store.boards.remove(name, by=by)
    except UsageError as error:
        # The plan came from this store: the name was taken or removed since.
        raise TransientError(
            f"another command is changing boards as well: {error.message}", "What was done stays done. Run this again."
        ) from error


def _to_power(board: fleets.FleetBoard) -> dict[str, Any]:
    return board.power.to_document() if board.power else {}


def _print_plan(todo: fleet_plan.FleetPlan) -> None:
    for board in todo.added:
        output.say(f"+ {_describe(board)}")
    for change in todo.changed:
        output.say(f"~ {change.board.name}")
        for field in change.fields:
            output.say(f"    {field.field}: {_value(field.old)} → {_value(field.new)}")
    for name in todo.removed:
        output.say(f"- {name}")
    for held in todo.held_back:
        output.say(f"! {held.name}: leased by {held.owner}; {held.action} it when it is free")
    if todo.unlisted:
        output.say(f"not in the file, and kept without --prune: {', '.join(todo.unlisted)}")


def _print_end(todo: fleet_plan.FleetPlan, dry_run: bool) -> None:
    done = ", ".join(
        f"{len(boards)} {word}"
        for boards, word in (
            (todo.added, "added"),
            (todo.changed, "changed"),
            (todo.removed, "removed"),
            (todo.unchanged, "unchanged"),
            (todo.held_back, "held back"),
        )
        if boards
    )
    output.say(f"{'nothing was changed; would be: ' if dry_run and not todo.is_empty else ''}{done or 'no boards'}")


def _plan_document(todo: fleet_plan.FleetPlan, file: str, dry_run: bool) -> dict[str, Any]:
    return {
        "file": file,
        "dry_run": dry_run,
        "added": [_board_document(board) for board in todo.added],
        "changed": [
            {
                "name": change.board.name,
                "fields": [{"field": field.field, "old": field.old, "new": field.new} for field in change.fields],
            }
            for change in todo.changed
        ],
        "removed": list(todo.removed),
        "unchanged": list(todo.unchanged),
        "unlisted": list(todo.unlisted),
        "held_back": [{"name": held.name, "action": held.action, "owner": held.owner} for held in todo.held_back],
    }


def _board_document(board: fleets.FleetBoard) -> dict[str, Any]:
    return {
        "name": board.name,
        "type": board.board_type,
        "transport": {"kind": board.transport.kind, **dataclasses.asdict(board.transport)},
        "labels": dict(board.labels),
        "power": _to_power(board) or None,
    }


def _describe(board: fleets.FleetBoard) -> str:
    labels = (f"{key}={value}" for key, value in sorted(board.labels.items()))
    power = ["power switched by commands"] if board.power else []
    return f"{board.name}: " + ", ".join((board.board_type, board.where, *labels, *power))


def _value(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
