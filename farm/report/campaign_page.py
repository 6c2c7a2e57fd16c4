"""The report of a campaign: `report.md` with its pictures, and `report.json`. Its texts are in `campaign_words`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from farm.report import campaign_evidence, campaign_models, campaign_plots, campaign_words
from farm.report.campaign_models import Gain

PAGE, JSON = "report.md", "report.json"


def write_campaign_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, which is made if need be; return the paths of `page`, `json` and pictures.

    `document` is what `farm campaign show NAME --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = campaign_models.list_gains(document)
    pictures = _draw(document, gains, folder)
    texts = {
        "page": (PAGE, campaign_words.write_page(document, gains, pictures)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    for name, text in texts.values():
        (folder / name).write_text(text, encoding="utf-8")
    paths = {kind: str(folder / name) for kind, (name, _) in texts.items()}
    return paths | {pathlib.Path(name).stem: str(folder / name) for name in pictures.values()}


def _draw(document: Mapping[str, Any], gains: list[Gain], folder: pathlib.Path) -> dict[str, str]:
    """The pictures that there is something for: caption -> file."""
    simulated = any(each["simulated"] for each in document["types"])
    name, pictures = document["name"], {}
    if any(each.predicted_s for each in gains):
        campaign_plots.plot_gains(folder / "gains.png", gains, f"{name}: what tuning gained", simulated=simulated)
        pictures["Latency of every model without a trial and as it is compiled now"] = "gains.png"
    if any(each["steps"] for each in document["curves"]):
        campaign_plots.plot_course(
            folder / "course.png", document["curves"], f"{name}: latency over trials", simulated=simulated
        )
        pictures["Latency of every model over the campaign's trials"] = "course.png"
    if campaign_evidence.list_contests(document["winners"]):
        campaign_evidence.plot_winners(
            folder / "winners.png", document["winners"], f"{name}: winners and rivals", simulated=simulated
        )
        pictures["Winners and how far behind their rivals are"] = "winners.png"
    if document["boards"]:
        campaign_evidence.plot_boards(
            folder / "boards.png", document["boards"], f"{name}: what the boards did", simulated=simulated
        )
        pictures["Trials and hours of every board"] = "boards.png"
    return pictures
