"""The page of a board's certificate: `report.md` beside `report.json`, from the document that certifying it made."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import format_mhz
from farm import foreign
from farm.report import pages

PAGE, JSON = "report.md", "report.json"
_LEVELS = {"ok": "ok", "warning": "**look**", "failed": "**FAILED**", "not tried": "not tried"}


def write_certificate(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write both files into `folder`, which is made if need be; return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {PAGE: write_page(document), JSON: json.dumps(document, indent=2, allow_nan=False) + "\n"}
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    return {"page": str(folder / PAGE), "json": str(folder / JSON)}


def write_page(document: Mapping[str, Any]) -> str:
    """The page's text."""
    values = {"board": "", "levels": _LEVELS} | foreign.escaped(dict(document))
    rails = _list_rails(values["facts"].get("power") or {})
    return pages.render_markdown(
        "certificate.md", values | {"rails": rails}, {"mhz": lambda hz: format_mhz(hz, "none")}
    )


def _list_rails(power: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What each rail drew, and all of them: idle, where that is known, and busy."""
    windows = {
        name: {rail["rail"]: rail for rail in window["rails"]} | ({"total": window["total"]} if window["total"] else {})
        for name, window in power.items()
        if window
    }
    return [(name, windows.get("idle", {}).get(name), rail) for name, rail in windows.get("busy", {}).items()]
