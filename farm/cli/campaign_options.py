"""What commands on campaigns share: options, the live table, and the packages that `--compile` orders."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from farm.campaign import artifacts, submit
from farm.cli import options, output, tables
from farm.cli.options import NONE, read_duration_s
from farm.cli.output import stderr
from farm.errors import PermanentError, UsageError
from farm.report import campaign_document, campaign_rows
from farm.settings import Settings
from farm.types import campaigns
from farm.units import parse_energy_j

# Without a terminal, one line of progress this often, and whenever the state changes.
_PLAIN_INTERVAL_S = 10.0
CompileTo = Annotated[
    Path | None,
    typer.Option(
        "--compile",
        metavar="DIR",
        help="Folder to compile, verify and package every model into afterwards, for every type.",
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A campaign; `farm campaign list` shows them.", autocompletion=options.complete_campaign
    ),
]


class CampaignScreen:
    """Notes and progress of one campaign, on stderr."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._printed_at = 0.0
        self._state = ""

    def note(self, text: str) -> None:
        """Print one line, above the live table where there is one."""
        self.close()
        output.note(text)

    def show(self, campaign: campaigns.FleetCampaign) -> None:
        """Draw the table anew, or print a line if it is due."""
        told = f"{campaign.state}: {campaign.reason}" if campaign.reason else str(campaign.state)
        changed, self._state = told != self._state, told
        if stderr.is_terminal:
            if self._live is None:
                self._live = Live(console=stderr, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(draw(campaign, stderr.height, stderr.width))
        elif changed or time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            line = campaign_rows.summary_line(
                campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress or {}
            )
            stderr.print(line, soft_wrap=True, markup=False)

    def finish(self, campaign: campaigns.FleetCampaign) -> None:
        """Leave the last table on the terminal."""
        self.close()
        stderr.print(draw(campaign, None, stderr.width if stderr.is_terminal else None))

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def draw(campaign: campaigns.FleetCampaign, height: int | None, width: int | None) -> RenderableType:
    """Draw a campaign's tables; see `campaign_rows.draw`."""
    return campaign_rows.draw(
        campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress, height, width
    )


def to_folder(path: Path | None) -> str | None:
    """Return the folder as an order keeps it."""
    return None if path is None else str(path.expanduser().absolute())


def make(
    settings: Settings, name: str, say: Callable[[str], None], json: bool, beside: dict[str, Any] | None = None
) -> None:
    """Make the artifacts of a campaign's order and print them; with --json with the document `beside` (None: the
    campaign's).

    Raises PermanentError where one computes wrongly.
    """
    with options.open_store(settings) as store:
        if store.campaigns.require(name).order.compile_to is None:
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


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a campaign's budget, as typed; None for those that were not."""

    trials: Annotated[
        str | None, typer.Option("--trials", metavar="N|none", help="Limit of candidates measured, in total.")
    ] = None
    wall_clock: Annotated[
        str | None,
        typer.Option("--wall-clock", metavar="6h|none", help="Limit of the time from start to end, without pauses."),
    ] = None
    board_hours: Annotated[
        str | None,
        typer.Option("--board-hours", metavar="H|none", help="Limit of the hours for which trials hold boards."),
    ] = None
    per_workload: Annotated[
        str | None,
        typer.Option(
            "--per-workload", metavar="N|none", help="Limit of trials of one workload at one point of one board type."
        ),
    ] = None
    joules: Annotated[
        str | None,
        typer.Option("--joules", metavar="20kJ|none", help="Limit of the energy of boards while trials hold them."),
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the given limits as fields of a budget; None for `none`. Raises UsageError."""
        changes: dict[str, Any] = {}
        for name, read in _READ_LIMITS.items():
            if (text := getattr(self, name)) is not None:
                changes[submit.LIMITS[name]] = None if text == NONE else read(f"--{name.replace('_', '-')}", text)
        return changes


def _read_count(option: str, text: str) -> int:
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"{option} must be a whole number of at least 1, or {NONE}, not {text!r}")
    return count


def _read_hours(option: str, text: str) -> float:
    try:
        hours = float(text.removesuffix("h"))
    except ValueError:
        hours = 0.0
    if not 0 < hours < float("inf"):
        raise UsageError(f"{option} must be hours above 0, or {NONE}, not {text!r}")
    return hours * 3600


def _read_joules(option: str, text: str) -> float:
    try:
        return parse_energy_j(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from error


_READ_LIMITS: dict[str, Callable[[str, str], float]] = {
    "trials": _read_count,
    "wall_clock": read_duration_s,
    "board_hours": _read_hours,
    "per_workload": _read_count,
    "joules": _read_joules,
}
