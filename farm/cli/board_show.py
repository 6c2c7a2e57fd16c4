"""`farm board show`: everything the farm knows of one board, or of a board type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.cli import board_types, options, output, tables
from farm.crew import board_calibration
from farm.errors import UsageError
from farm.inventory import board_types as inventory_board_types
from farm.values import Health

if TYPE_CHECKING:  # loads NumPy
    from farm.crew.board_calibration import Calibration

# Probes alone leave some hundred a day.
_EVENTS = 30


@output.command
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|TYPE", help="A board, or a board type.")],
    events: Annotated[int, typer.Option("--events", metavar="N", min=0, help="Number of recent events.")] = _EVENTS,
) -> output.Document:
    """Show a board or a board type. A board with its events, a type with clocks, sensors, power modes."""
    with options.open_store() as store:
        board = next((board for board in store.fetch_boards() if board["name"] == name), None)
        happened = store.fetch_board_events(name) if board else []
        calibration = board_calibration.fetch_calibration(store, board) if board else None
    if board is None:
        yield from _show_type(name)
    else:
        yield board_calibration.to_document(board, calibration, happened)
        _print_board(board, calibration)
        output.stdout.print()
        _print_events(happened, events)


def _show_type(name: str) -> output.Document:
    try:
        board_type = inventory_board_types.require_board_type(name)
    except UsageError as error:
        raise UsageError(f"there is neither a board nor a board type {name!r}", error.hint) from error
    yield board_type.model_dump(mode="json", by_alias=True)
    board_types.print_type(board_type)


def _print_events(events: list[dict[str, Any]], newest: int) -> None:
    columns = ("kind", "before", "after", "reason", "by")
    tables.print_table(
        ("When", "What", "From", "To", "Why", "By"),
        [
            (output.moment(event["at"]), *(event[column] or "–" for column in columns))
            for event in events[max(0, len(events) - newest) :]
        ],
        left=(0, 1, 2, 3, 4, 5),
        spare=("By", "From"),
        empty="nothing has happened to it yet",
    )
    if len(events) > newest:
        output.stderr.print(f"the newest {newest} of {len(events)} events; --events N shows more")


def _print_board(board: dict[str, Any], calibration: Calibration | None) -> None:
    description = board["description"]
    facts = {
        "Board": f"{board['board_type']}/{board['name']}{' (simulated)' if board['simulated'] else ''}",
        "Reached": ", ".join(f"{key} {value}" for key, value in board["transport"].items() if value not in (None, "")),
        "State": f"{board['state']} since {output.moment(board['state_since'])}: {board['state_reason']}",
        "Health": f"{board['health']} since {output.moment(board['health_since'])}: {board['health_reason']}",
        "Held by": output.holder(board["lease"]),
        "Labels": ", ".join(f"{key}={value}" for key, value in board["labels"].items()) or "–",
        "CPU": description.get("cpu_model", "–"),
        "Agent": description.get("agent_version", "–"),
        "Last seen": output.moment(board["seen_at"]),
        "Golden": "–" if calibration is None else calibration.text,
    }
    if board["health"] == Health.UNSAFE:
        facts["Do"] = "look at it; on the board: device-agent clocks restore; then: farm board clear"
    tables.print_facts(facts)
