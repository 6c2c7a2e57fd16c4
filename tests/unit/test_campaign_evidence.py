"""The picture of winners and their rivals says of each what the record's evidence does."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from farm.report import campaign_page


@pytest.mark.parametrize("verdict", ["slower", "tied", "faster"])
def test_a_rival_has_the_colour_of_its_verdict(verdict: str) -> None:
    """One that was faster, though not by enough to replace what was tried first, is not drawn as slower."""
    axes = Figure().subplots()
    rival = {"candidate": "c", "ratio": 0.96, "low": 0.95, "high": 0.97, "rounds": 4, "verdict": verdict}
    campaign_page._draw_rivals(axes, 0.0, [rival], 1.2)
    assert {to_hex(line.get_color()) for line in axes.lines} == {campaign_page.VERDICTS[verdict][0]}
    colours = [colour for colour, _ in campaign_page.VERDICTS.values()]
    assert len(set(colours)) == len(colours)
