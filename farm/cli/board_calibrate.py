"""`farm board calibrate-model`: the constants of a core's model, fitted to certificates of boards with that core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm.cli import output


@output.command
def calibrate_model(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT...", help="What `farm board certify` wrote: report.json, or its folder."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the constants, a file for each core type.")
    ] = Path("core-types"),
) -> output.Document:
    """Fit a core type to certificates. Written as an inventory overlay.

    Figures of the core that are not what its type says, and the two constants of its model, fitted to what programs
    took. FARM_CORE_TYPES names the folder, for the farm and for the agents of virtual boards alike: predictions and
    prices go by it then.
    """
    from farm.inventory.core_figures import say_figures
    from farm.services.calibrate_model import calibrate

    found = calibrate(reports)
    paths = [each.write(out) for each in found]
    yield {"cores": [each.to_dict() | {"path": str(path)} for each, path in zip(found, paths, strict=True)]}
    for each, path in zip(found, paths, strict=True):
        of = f"{each.core}{' of simulated boards' if each.simulated else ''}"
        output.say(f"{of}: {say_figures(each.measured, each.typical) or 'its figures are as the type has them'}")
        if constants := each.constants:
            (wait, crowding), (was_wait, was_crowding) = constants.after, constants.before
            (middle, worst), (was_middle, was_worst) = constants.errors_after, constants.errors_before
            output.say(
                f"{of}, {constants.runs} runs: wait_cycles {wait:g} (was {was_wait:g}), "
                f"crowding {crowding:g} (was {was_crowding:g}); prices are off by {middle:.0%} in the middle and "
                f"{worst:.0%} at worst (were {was_middle:.0%} and {was_worst:.0%})"
            )
        output.say(f"written: {path}")
    output.say(f"Have the farm go by it: export FARM_CORE_TYPES={out.resolve()}")
