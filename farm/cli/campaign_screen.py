"""What an attached command shows of a campaign: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import RenderableType
from rich.live import Live

from farm.cli import output
from farm.cli.output import stderr
from farm.report import campaign_table
from farm.values import FleetCampaign

# Without a terminal, one line of progress this often, and whenever the state changes.
_PLAIN_INTERVAL_S = 10.0


class CampaignScreen:
    """Notes and progress of one campaign, on stderr."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._printed_at = 0.0
        self._state = ""

    def note(self, text: str) -> None:
        """One line, above the live table where there is one."""
        self.close()
        output.note(text)

    def show(self, campaign: FleetCampaign) -> None:
        """Draw the table anew, or print a line if it is time for one."""
        told = f"{campaign.state}: {campaign.reason}" if campaign.reason else str(campaign.state)
        changed, self._state = told != self._state, told
        if stderr.is_terminal:
            if self._live is None:
                self._live = Live(console=stderr, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(_draw(campaign, stderr.height, stderr.width))
        elif changed or time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            line = campaign_table.summary_line(
                campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress or {}
            )
            stderr.print(line, soft_wrap=True, markup=False)

    def finish(self, campaign: FleetCampaign) -> None:
        """Leave the last table standing."""
        self.close()
        stderr.print(_draw(campaign, None, stderr.width if stderr.is_terminal else None))

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _draw(campaign: FleetCampaign, height: int | None, width: int | None) -> RenderableType:
    return campaign_table.draw(
        campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress, height, width
    )
