"""Choose one measured operating point of a sweep to set on boards, with its evidence.

`export_json` is here; `nvpmodel` and `script` write the other forms.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import OperatingPoint, StrEnum, format_hz
from farm import units
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.sweep import rows as sweep_rows
from farm.units import WATT, joule_scale, seconds_scale


class ExportForm(StrEnum):
    """The form of an exported operating point."""

    NVPMODEL = "nvpmodel"  # a stanza for the board's nvpmodel.conf
    JSON = "json"
    SH = "sh"  # a script that sets it and restores the earlier state


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One measured row of a sweep's document, and its point."""

    document: Mapping[str, Any]
    series: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def point(self) -> OperatingPoint:
        return OperatingPoint.from_dict(self.row["point"])

    @property
    def is_pick(self) -> bool:
        return bool(self.series["pick"]) and self.series["pick"]["key"] == self.row["key"]


def choose_point(document: Mapping[str, Any], series: Mapping[str, Any], key: str | None = None) -> Chosen:
    """Return the recommended point, or the point `key`, of a series.

    Raises UsageError where there is none, and for a point that was predicted or whose measurement is invalid: it has no
    evidence.
    """
    if key is None:
        if not series["pick"]:
            why = series["no_pick"] or "none was chosen"
            raise UsageError(f"sweep {document['sweep']} has no pick: {why}", "Name a point with --key.")
        key = str(series["pick"]["key"])
    row = sweep_rows.find_row(series, key)
    if row is None:
        examples = ", ".join(repr(each["key"]) for each in series["rows"][:3])
        raise UsageError(
            f"sweep {document['sweep']} has no operating point {key!r}",
            f"It has {len(series['rows'])}, such as {examples}; see `farm sweep show {document['sweep']}`.",
        )
    if row["throttled"] or row["invalid"]:
        why = row["invalid"] or "the board throttled"
        raise UsageError(f"{key}: what was measured there does not count: {why}", "Choose another point.")
    if not row["measured"]:
        raise UsageError(
            f"{key} was only predicted, not measured",
            f"Measure it first: `farm sweep pick {document['sweep']} --measure` or a sweep with --exhaustive.",
        )
    return Chosen(document, series, row)


def require_something_to_set(chosen: Chosen) -> OperatingPoint:
    """Return the point, if it differs from the board's default. Raises UsageError."""
    if chosen.point.is_empty:
        raise UsageError("this point leaves the clocks as the board has them: there is nothing to set")
    return chosen.point


def export_json(chosen: Chosen, board_type: BoardType) -> str:
    """Return the point with its evidence; `operating_point` has the form of agents and `device-agent clocks pin`."""
    row, document = chosen.row, chosen.document
    evidence = {
        name: row[name]
        for name in (
            "latency_s", "latency_p95_s", "power_w", "rail_power_w", "energy_j", "energy_above_idle_j", "temperature_c",
            "visits",
        )
    }  # fmt: skip
    content = {
        "operating_point": chosen.point.to_dict(),
        "key": row["key"],
        "board_type": board_type.name,
        "model": document["model"],
        "variant": chosen.series["variant"],
        "batch": chosen.series["batch"],
        "sweep": document["sweep"],
        "simulated": document["board"]["simulated"],
        "clocks": row["domains"],
        "is_pick": chosen.is_pick,
        "certainty": chosen.series["pick"]["certainty"] if chosen.is_pick else None,
        "goal": document["goal"],
        "evidence": evidence,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_comments(chosen: Chosen) -> list[str]:
    """Return the evidence as lines of ASCII: boards' tools and editors may know nothing else."""
    row, document, series = chosen.row, chosen.document, chosen.series
    board = document["board"]
    day = time.strftime("%Y-%m-%d", time.localtime(document["started_at"]))
    lines = [
        f"Operating point {row['key']}",
        f"for {document['model']} ({sweep_rows.name_series(series, document)}) on {sweep_rows.name_boards(document)}.",
    ]
    if board["simulated"]:
        lines.append("SIMULATED: found on a model of the board. Nothing here was measured on hardware.")
    lines.append(f"Evidence: sweep {document['sweep']} of {day}, {', '.join(board['names'])}; 95 % intervals:")
    seconds = seconds_scale([row["latency_s"]["value"]])
    lines.append("  " + _quantity("latency", row["latency_s"], seconds))
    if row["latency_p95_s"] is not None:
        lines.append(f"  95th percentile of the latency {seconds.text(row['latency_p95_s'])}")
    if row["power_w"]:
        lines.append("  " + _quantity("power", row["power_w"], WATT))
    if row["energy_j"]:
        lines.append("  " + _quantity("energy per inference", row["energy_j"], joule_scale([row["energy_j"]["value"]])))
    else:
        lines.append("  power and energy are not known: the board has no sensor")
    if chosen.is_pick:
        against = series["pick"]["against_fastest"]
        costs = f"{against['latency']:.3g} times the latency"
        costs += "" if against["energy"] is None else f" and {against['energy']:.3g} times the energy"
        lines.append(f"It is the sweep's pick for {sweep_rows.describe_goal(document['goal'])}:")
        lines.append(f"  {costs} of the fastest point measured; certain to")
        lines.append(f"  {units.format_share(series['pick']['certainty'])}.")
    if free := [d for d in row["domains"] if not d["held"] and d["units"] and d["freq_hz"]]:
        told = ", ".join(f"{d['name']} (up to {format_hz(d['freq_hz'])})" for d in free)
        lines.append(f"Left to the board, here as then: {told}.")
    return [_plain(line) for line in lines]


def _quantity(name: str, estimate: Mapping[str, float], scale: units.Scale) -> str:
    value, interval = scale.interval(estimate)
    return f"{name} {value} {scale.unit} ({interval.replace(' – ', ' to ')})"


def _plain(text: str) -> str:
    """Convert to one line of ASCII: names of models come from users, and a line break would end the comment."""
    known = text.replace("µ", "u").replace("–", "-")
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in known)
