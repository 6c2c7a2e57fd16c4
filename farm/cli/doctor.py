"""`farm doctor`: go through every hop, up to a kernel really run; name the one that fails."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import markup

from farm import doctor as farm_doctor
from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.cli import options, output
from farm.cli.output import print_check
from farm.errors import BoardUnsafeError, UsageError
from farm.services import board_doctor as service_board_doctor
from farm.services import checks as service_checks
from farm.store import standing
from farm.values import Health

# Exit code of a failed check.
_FAILED = 3


@output.command
def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BOARD…]", help="Boards to examine.", autocompletion=options.complete_board),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All registered boards.")] = False,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Check clocks, speed, rails and power against the board type, too.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.json", help="File for the result of --hardware.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check every part of the farm, or every hop to a board. Ends with a kernel run there; says what to do.

    Without a board it ends on this machine's, and says of others what is known. --hardware takes a minute or two and
    harms nothing: every clock is as before afterwards. Its report names no board, host or folder.
    """
    boards = list(dict.fromkeys(names or ()))
    if boards and every:
        raise UsageError("--all goes without names of boards")
    if report is not None:
        if not hardware or len(boards) != 1:
            raise UsageError("--report is for --hardware, and for one board")
        artifact_folder.require_room(report.absolute().parent)
    if boards or every:
        _examine_boards(boards or None, json, hardware, report)
        return
    if hardware:
        raise UsageError("--hardware is for boards", "Name them, or say --all.")

    checks: list[service_checks.Check] = []

    def show(check: service_checks.Check) -> None:
        checks.append(check)
        if not json:
            print_check(check)

    farm_doctor.examine(farm_settings.load(), show)
    if json:
        output.print_json([_to_document(check) for check in checks])
    if any(check.level is service_checks.Level.FAILED for check in checks):
        raise SystemExit(_FAILED)


def _examine_boards(names: list[str] | None, json: bool, hardware: bool = False, report: Path | None = None) -> None:
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        if names is None:
            rows = store.boards.fetch()
            names = [row.name for row in rows if row.health != Health.RETIRED and not row.on_demand]
        for name in names:
            standing.require_kept(store.boards.require(name))
    if not names:
        raise UsageError("there are no boards to examine", "`farm board add` registers one.")
    checks: dict[str, list[service_checks.Check]] = {name: [] for name in names}

    def show(name: str, check: service_checks.Check) -> None:
        if not json:
            if len(checks) > 1 and not checks[name]:
                output.stdout.print(f"[bold]{markup.escape(name)}[/]")
            print_check(check)
        checks[name].append(check)

    found = service_board_doctor.examine_boards(settings, names, show, output.stderr.print, hardware)
    if report is not None and found[0].report is not None:
        report.write_text(json_format.dumps(found[0].report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if json:
        documents = [{"board": name, "checks": [_to_document(one) for one in found]} for name, found in checks.items()]
        output.print_json(documents)
    if any(each.unsafe for each in found):
        raise SystemExit(BoardUnsafeError.exit_code)
    if not all(each.passed for each in found):
        raise SystemExit(_FAILED)


def _to_document(check: service_checks.Check) -> dict[str, Any]:
    return check.to_document() | {"ok": check.ok}
