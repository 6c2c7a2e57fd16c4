"""`farm audit`: who changed what."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from farm.cli import options, output, tables
from farm.cli.options import read_duration_s


@output.command
def audit(
    subject: Annotated[
        str | None, typer.Option("--of", metavar="NAME", help="A board's or a campaign's name, or a token's.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="PERSON", help="What the person's name begins with.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="7d", help="Age of the oldest change.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="Number of changes.")] = 50,
) -> output.Document:
    """Show who changed what, the newest first: boards, campaigns, reservations, power, priorities, records, tokens."""
    after = None if since is None else time.time() - read_duration_s("--since", since)
    with options.open_store() as store:
        changes = store.fetch_changes(limit, since=after, subject=subject, by=by)
    yield changes
    tables.print_table(
        ("When", "Who", "What", "Of", "Said"),
        [(output.moment(each["at"]), each["by"], each["kind"], each["subject"], each["message"]) for each in changes],
        left=(0, 1, 2, 3, 4),
        empty="no changes",
    )
