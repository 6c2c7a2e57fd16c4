"""`farm board certify`: a bounded, harmless check of one board's hardware, and a report of it that can be sent away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.cli import options, output
from farm.cli.options import read_duration_s
from farm.cli.output import print_check
from farm.errors import BoardUnsafeError, UsageError
from farm.report import bench_page
from farm.services import board_certify

# Exit codes: the connection failed, the board did, its clocks could not be restored.
_NOT_REACHED, _FAILED = 3, 1


@output.command
def certify(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A board, as `farm board list` names it.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the report; default: ./certify-NAME.")
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Limit of the time once the board is reached.")
    ] = "5m",
    names: Annotated[
        bool, typer.Option("--names", help="Keep names of boards, hosts and folders, and addresses, in the report.")
    ] = False,
    prices: Annotated[bool, typer.Option("--prices/--no-prices", hidden=True, help="Without effect since 0.3.")] = True,
    json: options.Json = False,
) -> None:
    """Check a board's hardware. Takes a minute or two, harms nothing, and writes a report that can be sent away.

    What `farm board doctor` checks, then clock tables, holding and letting go, speed against the clock, rails and
    power, and what would tell of throttling. Every clock is as before afterwards; Ctrl-C leaves nothing behind.
    """
    timeout_s = read_duration_s("--timeout", timeout)
    folder = out or Path(f"certify-{name}")
    if folder.exists() and (
        not folder.is_dir() or any(one.name not in (bench_page.PAGE, bench_page.JSON) for one in folder.iterdir())
    ):
        raise UsageError(f"{folder} holds something else than a report", "Give a folder of its own with --out.")
    show = (lambda check: None) if json else print_check
    settings = farm_settings.load()
    found = board_certify.certify_board(settings, name, timeout_s, names, show, output.stderr.print)
    if found.document is not None:
        paths = bench_page.write_certificate(found.document, folder)
        if json:
            output.print_json(found.document | {"report": paths})
        else:
            output.say(f"{found.document['result']}; report: {paths['page']}")
    elif json:
        output.print_json({"result": "unsafe" if found.unsafe else "not reached"})
    if not found.passed:
        code = BoardUnsafeError.exit_code if found.unsafe else _FAILED if found.reached else _NOT_REACHED
        raise SystemExit(code)
