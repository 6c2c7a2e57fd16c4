"""`farm logs`: what the processes of this home logged, and who changed what."""

from __future__ import annotations

import contextlib
import json as json_module
import operator
import sys
import time
from collections.abc import Iterable
from typing import Annotated

import typer

from farm import foreign
from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.cli.options import read_duration_s
from farm.errors import FarmError, UsageError
from farm.processes import home_log
from farm.store import Store, events

_MOST_LINES = 1_000_000
# Events that are read; more where a filter may look far back.
_EVENTS, _SEARCHED_EVENTS = 2000, 100_000
_LOOK_S = 0.25
_AT = operator.attrgetter("at")


@output.command
def logs(
    campaign: Annotated[
        str, typer.Option("--campaign", metavar="NAME", help="Only lines about a campaign, by its name or number.")
    ] = "",
    board: Annotated[str, typer.Option("--board", metavar="NAME", help="Only lines about a board.")] = "",
    lines: Annotated[int, typer.Option("--lines", min=0, max=_MOST_LINES, help="Number of last lines.")] = 100,
    since: Annotated[str, typer.Option("--since", metavar="1h", help="Only lines younger than that.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    changes: Annotated[
        bool, typer.Option("--changes", help="Only who changed what, the newest first: boards, campaigns, tokens, …")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document for each line.")] = False,
) -> None:
    """Show the log of this home: what the services, the engine, searches and take-overs logged, in order of time.

    Events of the store are among them. A line is about a campaign or a board by its ids, or because it names it. The
    tracker and agents have files of their own in FARM_HOME/logs; `farm board logs` shows an agent's.
    """
    settings = farm_settings.load()
    since_s = time.time() - read_duration_s("--since", since) if since else None
    if changes:
        _show_changes(board or campaign, since_s, max(1, min(lines, _EVENTS)), json)
        return
    folder = settings.home_path / "logs"
    with _open_store(settings) as store:
        wanted = home_log.LogFilter(_find_campaign(store, campaign), _find_board(store, board), since_s)
        # Before the log is read: what is written meanwhile is in both, and printed once.
        follower = home_log.Follower(folder / home_log.LOG_FILE)
        mark = events.Mark() if store is None else store.events.fetch_mark()
        found = home_log.read_log(folder, wanted)
        if store is not None:
            last_events = store.events.fetch_last(_SEARCHED_EVENTS if campaign or board or since else _EVENTS)
            found += filter(wanted.takes, map(home_log.read_event, last_events))
        last = sorted(found, key=_AT)[-lines:] if lines else []
        _show(last, json)
        with contextlib.closing(follower), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
            known = set(found)
            while follow:
                written = [line for line in map(home_log.read_line, follower.read()) if line is not None]
                if store is not None and (newer := store.events.fetch_after(mark, _EVENTS)):
                    mark = newer[-1].mark
                    written += map(home_log.read_event, newer)
                _show(sorted((each for each in written if wanted.takes(each) and each not in known), key=_AT), json)
                known.clear()
                time.sleep(_LOOK_S)


def _show_changes(subject: str, since_s: float | None, limit: int, json: bool) -> None:
    with options.open_store() as store:
        found = store.events.fetch_changes(limit, since=since_s, subject=subject or None)
    if json:
        output.print_json(found)
        return
    tables.print_table(
        ("When", "Who", "What", "Of", "Said"),
        [(output.moment(each.at), each.by, each.kind, each.subject, each.message) for each in found],
        left=(0, 1, 2, 3, 4),
        empty="no changes",
    )


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
    if wanted.isdecimal() and len(wanted) < 19:
        for each in store.campaigns.fetch():
            if each.id == int(wanted):
                return each.name
    return store.campaigns.require(wanted).name


def _find_board(store: Store | None, wanted: str) -> str:
    """A board's name; one that was removed may still have events. Raises UsageError."""
    if not wanted or store is None:
        return wanted
    try:
        return store.boards.require(wanted).name
    except UsageError:
        if store.events.fetch_of_boards(wanted):
            return wanted
        raise


def _show(found: Iterable[home_log.LogLine], json: bool) -> None:
    for line in found:
        if json:
            print(json_module.dumps(line.to_document(), allow_nan=False))
        else:
            # A pipe gets it harmless as well: it may end in a terminal.
            print(foreign.show_controls(line.to_text()))
        sys.stdout.flush()
