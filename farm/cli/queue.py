"""`farm queue`, `farm board reserve`: what waits for boards and why, who has them, and boards reserved for a person."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.cli.options import read_duration_s
from farm.crew import queue_entry, reservation
from farm.processes import machine
from farm.units import format_duration


@output.command
def reserve(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, such as 30m or 2h; up to 7 days.")],
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, which others see.")] = "",
    wait: Annotated[str, typer.Option("--wait", metavar="TIME", help="Time limit of waiting for the board.")] = "10m",
) -> output.Document:
    """Reserve a board. Only your work gets it until the time is over or `farm board release`.

    A campaign gives it up after the trial under way. Reserved again, it is yours for that time from now.
    """
    for_s, wait_s = read_duration_s("--for", for_), read_duration_s("--wait", wait)
    with options.open_store() as store:
        lease, new = reservation.reserve(store, name, for_s, why, wait_s, output.note)
    yield {"board": name, "owner": lease.owner, "purpose": lease.purpose, "until": lease.expires_at, "new": new}
    output.stdout.print(f"{name} is yours until {output.moment(lease.expires_at)}", markup=False)
    output.stderr.print(f"to give it back before: farm board release {name}", markup=False)


app = typer.Typer(help="The queue for boards: what waits, who asked, why not yet, and who has boards.")


@app.callback(invoke_without_command=True)
@output.command
def show(context: typer.Context) -> output.Document:
    """Show what waits for boards, who asked, why it has none yet, and who has which board now."""
    if context.invoked_subcommand is not None:
        return
    with options.open_store(farm_settings.load()) as store:
        document = queue_entry.to_document(store)
    yield document
    tables.print_table(
        ["ID", "For", "Who", "Since", "Priority", "Boards", "Why not yet"],
        [_to_row(request) for request in document["requests"]],
        left=(0, 1, 2, 3, 5, 6),
        empty="nothing waits for a board",
        spare=("Who", "Since", "Boards"),
    )
    if held := [board for board in document["boards"] if board["owner"]]:
        output.stdout.print()
        tables.print_table(
            ["Board", "Held for", "Who", "Since", "Reserved until"],
            [
                [b["name"], b["purpose"], b["owner"], *map(output.moment, (b["acquired_at"], b["reserved_until"]))]
                for b in held
            ],
            left=(0, 1, 2, 3, 4),
        )


def _to_row(request: dict[str, Any]) -> list[Any]:
    names = request["boards"]
    boards = names[0] if len(names) == 1 else f"{len(names)} of type {request['board_type']}"
    since = f"{format_duration(request['waited_s'])} ago"
    return [request["id"], request["purpose"], request["owner"], since, request["priority"], boards, request["why"]]


@app.command("priority", context_settings={"ignore_unknown_options": True})
@output.command
def priority(
    number: Annotated[int, typer.Argument(metavar="ID", help="Number of what waits, as `farm queue` shows it.")],
    value: Annotated[
        int, typer.Argument(metavar="N", help="Priority from -10 to 10; each step doubles the share. Usually 0.")
    ],
) -> output.Document:
    """Change the priority of a waiting request. Interactive work below 0 takes only boards that no campaign wants."""
    with options.open_store(farm_settings.load()) as store:
        request = store.queue.set_priority(number, value, machine.name_user())
    yield {"id": request.id, "purpose": request.purpose, "priority": request.priority}
    output.say(f"{request.purpose} has priority {request.priority} now")
