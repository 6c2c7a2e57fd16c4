"""The part of a sweep's page on schedules tried again at single points: where another is better, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from farm import units
from farm.report.pages import PageTable, make_table
from farm.sweep.rows import Document
from farm.units import format_percent, format_point


@dataclasses.dataclass(frozen=True)
class ToldSchedules:
    """What schedules tried again at one point came to, in a sentence; the table is of those that are better there."""

    sentence: str
    table: PageTable | None


def tell_schedules(document: Document) -> list[ToldSchedules]:
    """One per point; none where none was asked for."""
    told = []
    for fitted in document.get("schedules") or ():
        better = sorted(
            (each for each in fitted["workloads"] if each["differs"]), key=lambda each: float(each["ratio"])
        )
        told.append(ToldSchedules(_sentence(fitted, len(better)), _table(fitted, better) if better else None))
    return told


def _sentence(fitted: Mapping[str, Any], better: int) -> str:
    where = format_point(fitted["key"]) + (f", batch {fitted['batch']}" if fitted["batch"] > 1 else "")
    count = len(fitted["workloads"])
    if not better:
        return f"{where}: of {count} workloads none has a better schedule here than at the board's usual clocks."
    told = f"{where}: {better} of {count} workloads have a better schedule here, kept as records of this point."
    if model := fitted["model"]:
        told += f" With them the model takes {_change(model, 'latency_s', 'longer', 'shorter')}"
        if model["before"]["energy_j"] and model["after"]["energy_j"]:
            told += f" and needs {_change(model, 'energy_j', 'more energy', 'less energy')}"
        told += "."
    return told


def _change(model: Mapping[str, Any], what: str, more: str, less: str) -> str:
    before, after = (float(model[which][what]["value"]) for which in ("before", "after"))
    scale = units.seconds_scale([after]) if what == "latency_s" else units.joule_scale([after])
    percent = format_percent(after / before, more, less, "the same")
    return f"{scale.text(after)} instead of {scale.text(before)} ({percent})"


def _table(fitted: Mapping[str, Any], better: Sequence[Mapping[str, Any]]) -> PageTable:
    scale = units.seconds_scale(float(each["best_s"]) for each in better)
    rows = [
        (
            *(str(each["name"]), str(each["weight"]), scale.number(each["default_s"]), scale.number(each["best_s"])),
            (f"{(1 - each['ratio']) * 100:.1f} %", f"{(1 - each['high']) * 100:.1f} – {(1 - each['low']) * 100:.1f} %"),
        )
        for each in better
    ]
    head = ["workload", "calls", f"usual schedule, {scale.unit}", f"best here, {scale.unit}", "shorter by"]
    return make_table(head, rows, caption=format_point(fitted["key"]))
