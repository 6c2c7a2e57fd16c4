"""`farm board calibrate-model`: the constants of a core's model, fitted to certificates of boards with that core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm.cli import options, output


@output.command
def calibrate_model(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT...", help="What `farm board certify` wrote: report.json, or its folder."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the constants, a file for each core type.")
    ] = Path("core-types"),
    json: options.Json = False,
) -> None:
    """Fit the two constants of a core's model to what real boards took, and write them as an inventory overlay.

    FARM_CORE_TYPES names the folder, for the farm and for the agents of virtual boards alike: prices go by it then.
    """
    from farm.services.calibrate_model import calibrate

    found = calibrate(reports)
    paths = [each.write(out) for each in found]
    if json:
        output.print_json(
            {"cores": [each.to_dict() | {"path": str(path)} for each, path in zip(found, paths, strict=True)]}
        )
        return
    for each, path in zip(found, paths, strict=True):
        (wait, crowding), (was_wait, was_crowding) = each.after, each.before
        (middle, worst), (was_middle, was_worst) = each.errors_after, each.errors_before
        output.say(
            f"{each.core}, {each.runs} runs{' of simulated boards' if each.simulated else ''}: "
            f"wait_cycles {wait:g} (was {was_wait:g}), crowding {crowding:g} (was {was_crowding:g}); "
            f"prices are off by {middle:.0%} in the middle and {worst:.0%} at worst "
            f"(were {was_middle:.0%} and {was_worst:.0%})"
        )
        output.say(f"written: {path}")
    output.say(f"Have prices go by it: export FARM_CORE_TYPES={out.resolve()}")
