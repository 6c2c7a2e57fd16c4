"""`farm queue`: what waits for boards and why, and who has them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.crew import queue_entry
from farm.errors import UsageError
from farm.processes import machine
from farm.units import format_duration


@output.command
def queue(
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Number of what waits, for --priority.")] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority", metavar="N", help="Priority from -10 to 10; each step doubles the share. Usually 0."
        ),
    ] = None,
) -> output.Document:
    """Show what waits for boards, who asked, why it has none yet, and who has which board now; or set a priority.

    Interactive work below 0 takes only boards that no campaign wants.
    """
    if (number is None) != (priority is None):
        raise UsageError("a priority is of one request", "Say: farm queue ID --priority N.")
    if number is not None and priority is not None:
        with options.open_store(farm_settings.load()) as store:
            request = store.queue.set_priority(number, priority, machine.name_user())
        yield {"id": request.id, "purpose": request.purpose, "priority": request.priority}
        output.say(f"{request.purpose} has priority {request.priority} now")
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
