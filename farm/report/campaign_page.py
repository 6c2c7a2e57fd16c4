"""The report of a campaign: the same page as HTML and as Markdown, its pictures, and all of it as JSON.

What the page says is in `campaign_words.py`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from farm.report import campaign_plots, campaign_rows, campaign_words, pages
from farm.report.campaign_rows import Gain
from farm.report.canvas import Picture

PAGE, MARKDOWN, JSON = "report.html", "report.md", "report.json"


def write_campaign_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, which is made if need be; return the paths of `page`, `markdown`, `json` and
    pictures.

    `document` is what `farm campaign show NAME --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = campaign_rows.list_gains(document)
    pictures = list(_draw(document, gains, folder))
    page = campaign_words.write_page(document, gains)
    texts = {
        "page": (PAGE, pages.write_html(page, pictures, (MARKDOWN, JSON))),
        "markdown": (MARKDOWN, pages.write_markdown(page, pictures)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    for name, text in texts.values():
        (folder / name).write_text(text, encoding="utf-8")
    paths = {kind: str(folder / name) for kind, (name, _) in texts.items()}
    return paths | {each.name: str(folder / each.file) for each in pictures}


def _draw(document: Mapping[str, Any], gains: list[Gain], folder: pathlib.Path) -> Iterator[Picture]:
    """The pictures that there is something for."""
    simulated = any(each["simulated"] for each in document["types"])
    name = document["name"]
    if any(each.predicted_s for each in gains):
        yield campaign_plots.plot_gains(folder, gains, f"{name}: what tuning gained", simulated=simulated)
    if any(each["steps"] for each in document["curves"]):
        yield campaign_plots.plot_course(
            folder,
            document["curves"],
            (document["progress"] or {}).get("counted", 0),
            f"{name}: workloads over trials",
            simulated=simulated,
        )
    if campaign_plots.list_contests(document["winners"]):
        yield campaign_plots.plot_winners(
            folder, document["winners"], f"{name}: winners and rivals", simulated=simulated
        )
    if document["boards"]:
        yield campaign_plots.plot_boards(
            folder, document["boards"], f"{name}: what the boards did", simulated=simulated
        )
