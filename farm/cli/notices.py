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
from farm.services.notices import sending

app = typer.Typer(no_args_is_help=True, help="Notices: who hears of what, by a command, a webhook or a URL of Apprise.")


@app.command("list")
@output.command
def list_ways() -> output.Document:
    """List notices. The routes of notices.yaml and what each is sent; never a URL's path, a header or an argument."""
    ways = _read(farm_settings.load().home_path)
    rows = [{"name": name, "way": way.shown, "classes": list(way.classes)} for name, way in ways.items()]
    yield rows
    for row in rows:
        output.stdout.print(f"{row['name']}  {row['way']}  {', '.join(row['classes'])}", markup=False, soft_wrap=True)


@app.command("test")
@output.command
def try_way(name: Annotated[str, typer.Argument(metavar="NAME", help="A way.")]) -> None:
    """Send a notice by a way now, once. Exit code 1 where it does not arrive."""
    ways = _read(farm_settings.load().home_path)
    if name not in ways:
        hint = f"{foreign.suggest(name, ways)} There are: {', '.join(ways)}.".strip()
        raise UsageError(f"there is no way {name!r} in {sending.FILE_NAME}", hint)
    sending.send(ways[name], sending.Notice("test", ways[name].classes[0], time.time(), "a test", "nothing happened"))
    output.say(f"sent: {ways[name].shown}")


def _read(home: Path) -> dict[str, sending.WayDocument]:
    document = sending.read_notices(home)
    if document is None:
        raise UsageError(f"there is no {home / sending.FILE_NAME}", "docs/howto/watch-the-farm.md shows one.")
    return document.ways
