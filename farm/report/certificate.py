"""The page of a board's certificate: `report.md` beside `report.json`, from the document that certifying it made."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import format_mhz
from farm import foreign

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
    shown = foreign.escaped(document)
    simulated = " (simulated)" if document["simulated"] else ""
    parts = [
        f"# {shown['title']}{simulated}: {shown['result']}",
        f"{shown['board_type']}{' ' + shown['board'] if 'board' in shown else ''}, {shown['at']}, "
        f"{document['took_s']:g} s; agent {shown['agent_version']}, farm {shown['farm_version']}",
    ]
    if document["simulated"]:
        parts.append("This board's figures come from a model of hardware: they say nothing about a real one.")
    troubles = [check for check in shown["checks"] if check["level"] in ("failed", "warning")]
    if troubles:
        parts.append("## What to look at")
        parts += ["\n".join(f"- {_LEVELS[one['level']]} {one['name']}: {_with_advice(one)}" for one in troubles)]
    rows = [
        (check["name"], _LEVELS[check["level"]], check["detail"], f"{check['seconds']:.1f}")
        for check in shown["checks"]
    ]
    parts += ["## Every check", foreign.table(("check", "result", "what was found", "s"), rows, left=(0, 1, 2))]
    parts += _list_facts(shown["facts"])
    return "\n\n".join(parts) + "\n"


def _with_advice(check: Mapping[str, Any]) -> str:
    return ". ".join(filter(None, (check["detail"], check["advice"])))


def _list_facts(facts: Mapping[str, Any]) -> list[str]:
    parts = []
    if held := facts.get("held"):
        rows = [
            (
                one["clock"],
                format_mhz(one["asked_hz"], "none"),
                format_mhz(one["reached_hz"], "none"),
                f"{one['took_s'] * 1e3:.0f}",
                "; ".join([one["message"], *one["notes"]]).strip("; "),
            )
            for one in held
        ]
        head = ("clock", "asked MHz", "reached MHz", "ms", "what was said")
        parts += ["## Points held", foreign.table(head, rows, left=(0, 4))]
    if core := facts.get("core"):
        figures = [
            (name, f"{each['value']:.4g}", f"{each['low']:.4g} to {each['high']:.4g}", f"{core['type'][name]:.4g}")
            for name, each in core["found"].items()
        ]
        figures += [(name, "not told", "", f"{core['type'][name]:.4g}") for name in core["unknown"]]
        parts += [
            f"## What its core can do at {format_mhz(core['clock_hz'])} MHz",
            foreign.table(("figure", "found", "rounds that agree", "core type"), figures),
        ]
    if runs := (facts.get("prices") or {}).get("runs"):
        rows = [
            (
                one["program"],
                str(one["threads"]),
                f"{one['measured_s'] * 1e3:.4g}",
                f"{one['priced_s'] * 1e3:.4g}",
                f"{one['priced_s'] / one['measured_s']:.2f}",
            )
            for one in runs
        ]
        head = ("program", "threads", "measured ms", "priced ms", "priced over measured")
        parts += ["## What programs take, and cost by the model of the core", foreign.table(head, rows)]
    if any((facts.get("power") or {}).values()):
        parts += [
            "## Power",
            foreign.table(("rail", "idle W", "busy W", "95 % interval", "updates"), _rails(facts["power"])),
        ]
    return parts


def _rails(power: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    windows = {
        name: {rail["rail"]: rail for rail in window["rails"]} | ({"total": window["total"]} if window["total"] else {})
        for name, window in power.items()
        if window
    }
    idle, busy = windows.get("idle", {}), windows.get("busy", {})
    return [
        (
            name,
            f"{idle[name]['power_w']:.3f}" if name in idle else "unknown",
            f"{rail['power_w']:.3f}",
            f"{rail['power_ci_w'][0]:.3f} to {rail['power_ci_w'][1]:.3f}",
            str(rail["updates"]),
        )
        for name, rail in busy.items()
    ]
