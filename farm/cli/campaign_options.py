"""What commands on campaigns share: options, the live table, and the packages that `--compile` orders."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType
from rich.live import Live

from farm.campaign import artifacts, submit
from farm.cli import options, output, tables
from farm.cli.options import NONE
from farm.cli.output import stderr
from farm.errors import PermanentError, UsageError
from farm.report import campaign_document, campaign_rows
from farm.settings import Settings
from farm.types import campaigns

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

Limits = Annotated[
    list[str],
    typer.Argument(
        metavar="LIMIT=VALUE…",
        help="Limits as in a campaign file: trials=8000, wall_clock=6h, board_hours=2, per_workload=64, joules=20kJ.",
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


def read_limits(given: list[str]) -> dict[str, Any]:
    """Return limits typed as `NAME=VALUE`, as fields of a budget; None for `none`. Raises UsageError."""
    limits = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            known = yaml.safe_load(value)
        except yaml.YAMLError:
            known = None
        if known is None:
            raise UsageError(f"{text!r} is no limit", "Limits are NAME=VALUE, such as trials=8000, or trials=none.")
        limits[name.strip().replace("-", "_")] = None if known == NONE else known
    return submit.read_limits("the new budget", limits)
