"""`farm notices`: list the routes of notices.yaml, and send a test notice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from farm import foreign
from farm import settings as farm_settings
from farm.cli import output
from farm.errors import UsageError
from farm.services import notices as sending


@output.command
def notices(
    test: Annotated[str, typer.Option("--test", metavar="NAME", help="Send a notice this way now, once.")] = "",
) -> output.Document:
    """List notices: who hears of what; never a URL's path, a header or an argument. --test sends one.

    Exit code 1 where a test does not arrive.
    """
    ways = _read(farm_settings.load().home_path)
    if test:
        if test not in ways:
            hint = f"{foreign.suggest(test, ways)} There are: {', '.join(ways)}.".strip()
            raise UsageError(f"there is no way {test!r} in {sending.FILE_NAME}", hint)
        sending.send(
            ways[test], sending.Notice("test", ways[test].classes[0], time.time(), "a test", "nothing happened")
        )
        yield {"sent": test}
        output.say(f"sent: {ways[test].shown}")
        return
    rows = [{"name": name, "way": way.shown, "classes": list(way.classes)} for name, way in ways.items()]
    yield rows
    for row in rows:
        output.stdout.print(f"{row['name']}  {row['way']}  {', '.join(row['classes'])}", markup=False, soft_wrap=True)


def _read(home: Path) -> dict[str, sending.WayDocument]:
    document = sending.read_notices(home)
    if document is None:
        raise UsageError(f"there is no {home / sending.FILE_NAME}", "docs/howto/watch-the-farm.md shows one.")
    return document.ways
