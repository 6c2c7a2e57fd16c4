"""`farm logs`: what all processes of the farm on this machine wrote, and what the store says happened."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from farm import foreign
from farm import settings as farm_settings
from farm.cli import output
from farm.cli.durations import read_duration_s
from farm.errors import FarmError, UsageError
from farm.processes import log_merge
from farm.processes.log_lines import LogLine, make_readable
from farm.store import Store

_MOST_LINES = 1_000_000


@output.command
def logs(
    campaign: Annotated[
        str,
        typer.Option(
            "--campaign",
            metavar="NAME",
            help="Only lines about a campaign, by its name or number.",
        ),
    ] = "",
    board: Annotated[
        str,
        typer.Option("--board", metavar="NAME", help="Only lines about a board."),
    ] = "",
    lines: Annotated[int, typer.Option("--lines", min=0, max=_MOST_LINES, help="Number of last lines.")] = 100,
    since: Annotated[str, typer.Option("--since", metavar="1h", help="Only lines younger than that.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document for each line.")] = False,
) -> None:
    """Show what the services, the engine, searches, probes, the tracker and virtual boards wrote, in order of time.

    Events of the store are among them. A line is about a campaign or a board by its ids, or because it names it.
    """
    settings = farm_settings.load()
    since_s = time.time() - read_duration_s("--since", since) if since else None
    folder = settings.home_path / "logs"
    with _open_store(settings) as store:
        wanted = log_merge.Wanted(_find_campaign(store, campaign), _find_board(store, folder, board), since_s)
        # Before: what is written meanwhile is in both, and told once.
        following = log_merge.Following(folder, store, wanted) if follow else None
        last = log_merge.read_last(folder, store, wanted, lines)
        _show(last, json)
        if following is not None:
            # Ctrl-C is how it ends.
            with contextlib.closing(following), contextlib.suppress(KeyboardInterrupt):
                _show(following.listen(last), json)


def _open_store(settings: farm_settings.Settings) -> contextlib.AbstractContextManager[Store | None]:
    """The store, or None where it cannot be opened: that is when logs are wanted."""
    try:
        return Store(settings.store_location)
    except FarmError as error:
        output.tell(f"warning: without the store's events: {error}")
        return contextlib.nullcontext()


def _find_campaign(store: Store | None, wanted: str) -> str:
    """A campaign's name, by it or its number. Raises UsageError where there is none."""
    if not wanted or store is None:
        return wanted
    if wanted.isdecimal():
        for each in store.fetch_fleet_campaigns():
            if each.id == int(wanted):
                return each.name
    return store.fetch_fleet_campaign(wanted).name


def _find_board(store: Store | None, folder: Path, wanted: str) -> str:
    """A board's name; one that was removed may still have a log or events. Raises UsageError."""
    if not wanted or store is None or (folder / "boards" / f"{wanted}.log").exists():
        return wanted
    try:
        return str(store.require_board(wanted)["name"])
    except UsageError:
        if store.fetch_board_events(wanted):
            return wanted
        raise


def _show(found: Iterable[LogLine], json: bool) -> None:
    for line in found:
        if json:
            print(json_module.dumps(line.to_document(), allow_nan=False))
        else:
            # A pipe gets it harmless as well: it may end in a terminal.
            print(foreign.show_controls(make_readable(line)))
        sys.stdout.flush()
