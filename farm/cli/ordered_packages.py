"""`--compile DIR`: the option with which packages of all that was tuned are ordered, and making them once it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from farm.campaign import artifacts
from farm.cli import options, output, tables
from farm.errors import PermanentError
from farm.report import campaign_document
from farm.settings import Settings

CompileTo = Annotated[
    Path | None,
    typer.Option(
        "--compile",
        metavar="DIR",
        help="Folder to compile, verify and package every model into afterwards, for every type.",
    ),
]


def to_folder(path: Path | None) -> str | None:
    """As an order keeps it."""
    return None if path is None else str(path.expanduser().absolute())


def make(
    settings: Settings, name: str, say: Callable[[str], None], json: bool, beside: dict[str, Any] | None = None
) -> None:
    """Make the artifacts that a campaign was ordered with, and print them; with --json with the document `beside`
    (None: the campaign's). Raises PermanentError where one computes wrongly.
    """
    with options.open_store(settings) as store:
        if artifacts.find_folder(store.fetch_fleet_campaign(name)) is None:
            return
        document = campaign_document.make_document(store, name)
        made = artifacts.make_ordered(settings, store, name, document, say)
    if json:
        output.print_json({**(beside or document), "artifacts": made})
    else:
        tables.print_table(
            ("Artifact", "Board type", "Verified", "Package"),
            [
                (each["folder"], each["board_type"], "yes" if each["matches"] else "NO", each["package"])
                for each in made
            ],
            left=(0, 1, 2, 3),
        )
    if wrong := [f"{each['name']}: {each['reason']}" for each in made if not each["matches"]]:
        raise PermanentError(f"not all compute what ONNX Runtime does, and are not packed: {'; '.join(wrong)}")
