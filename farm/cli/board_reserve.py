"""`farm board reserve`: a board for oneself, for a while."""

from __future__ import annotations

from typing import Annotated

import typer

from farm.cli import options, output
from farm.cli.options import read_duration_s
from farm.crew import reservation


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
