"""The report of a campaign: HTML, Markdown, its charts, and all of it as JSON. `campaign_words.py` has the texts."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from farm.report import campaign_charts, campaign_rows, campaign_words, drawing, pages


def write_campaign_report(
    document: Mapping[str, Any], folder: pathlib.Path, note: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `markdown`, `json` and charts.

    `note` is called before each chart. `document` is what `farm campaign show NAME --json` prints. Raises OSError where
    the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = campaign_rows.list_gains(document)
    planned, pictures = list(campaign_charts.plan_charts(document, gains)), []
    for number, chart in enumerate(planned, 1):
        note(f"drawing {chart.name} ({number} of {len(planned)})")
        pictures.append(drawing.save(chart, folder))
    page = campaign_words.write_page(document, gains)
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return pages.write_page(folder, "report", page, pictures, {"json": text})
