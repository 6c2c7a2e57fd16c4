"""`farm model artifacts`: the artifacts that were compiled on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import catalogue
from farm.cli import options, output, tables
from farm.units import format_bytes, format_minute

_OPTIONS = {
    "board_type": Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Only this board type.")],
    "verified": Annotated[bool, typer.Option("--verified", help="Only those whose outputs were found right.")],
    "simulated": Annotated[bool, typer.Option("--simulated", help="Only those for virtual boards.")],
}


@output.command
@options.spread("wanted", catalogue.ArtifactFilters, _OPTIONS)
def list_artifacts(wanted: catalogue.ArtifactFilters) -> output.Document:
    """List the artifacts that still exist, the newest first."""
    made = catalogue.list_made_here(farm_settings.load().home_path)
    found = [catalogue.to_document(each) for each in wanted.choose(made)]
    yield found
    empty = "no artifacts yet; `farm model compile MODEL` makes one"
    tables.print_table(
        ("Model", "Board type", "Weights", "Clocks", "Verified", "Latency (ms)", "Size", "Made", "Folder"),
        [
            (
                each["model"],
                f"{each['board_type']}{' GPU' * (each['device'] == 'gpu')}{' (simulated)' * each['simulated']}",
                each["weights"],
                each["operating_point"],
                {None: "not yet", True: "yes", False: "WRONG"}[each["verified"]],
                None if each["latency_s"] is None else f"{each['latency_s'] * 1e3:.3f}",
                format_bytes(each["bytes"]),
                format_minute(each["created_at"]),
                each["folder"],
            )
            for each in found
        ],
        left=(0, 1, 2, 3, 4, 7, 8),
        spare=("Clocks", "Made", "Size", "Weights"),
        empty="no artifacts that were asked for" if made else empty,
    )
