"""The CSV of a sweep: a line for each point, with intervals and power by rail."""

from __future__ import annotations

import csv
import io
from typing import Any

from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series

# From a point's own visits; estimates combine them with the fit.
_ALONE = ("latency_s", "power_w", "energy_j")
_ESTIMATES = ("latency_s", "power_w", "energy_j", "energy_above_idle_j")


def write_csv(document: Document) -> str:
    """Return the CSV with a heading line; predictions are marked."""
    rails, clocks = sweep_rows.list_rails(document), _list_clocks(document)
    lines = [_line(document, series, row, clocks, rails) for series in document["series"] for row in series["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else ["sweep"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _list_clocks(document: Document) -> list[str]:
    rows = (row for series in document["series"] for row in series["rows"])
    return list(dict.fromkeys(domain["name"] for row in rows for domain in row["domains"]))


def _line(document: Document, series: Series, row: Row, clocks: list[str], rails: list[str]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "sweep": document["sweep"],
        "model": document["model"],
        "board_type": document["board"]["type"],
        "board": row["board"],
        "simulated": _truth(document["board"]["simulated"]),
        "variant": series["variant"],
        "batch": series["batch"],
        "operating_point": row["key"],
    }
    for clock in clocks:
        domain = sweep_rows.find_domain(row, clock) or {}
        line[f"{clock}_hz"] = domain.get("freq_hz")
        line[f"{clock}_held"] = _truth(domain.get("held", False))
        line[f"{clock}_units"] = domain.get("units")
    line |= {"measured": _truth(row["measured"]), "predicted": _truth(row["predicted"])}
    for name in _ESTIMATES:
        estimate = row[name] or {}
        line |= {name: estimate.get("value"), f"{name}_low": estimate.get("low"), f"{name}_high": estimate.get("high")}
    for name, estimate in (row.get("visits_alone") or dict.fromkeys(_ALONE)).items():
        alone = estimate or {}
        line |= {f"visits_{name}{end}": alone.get(end.removeprefix("_") or "value") for end in ("", "_low", "_high")}
    line["latency_p95_s"] = row["latency_p95_s"]
    line |= {f"rail_{rail}_w": row["rail_power_w"].get(rail) for rail in rails}
    per_joule = row["inferences_per_joule"]
    return line | {
        "temperature_c": row["temperature_c"],
        "throttled": _truth(row["throttled"]),
        "invalid": row["invalid"],
        "calls_per_joule": per_joule,
        "inputs_per_joule": None if per_joule is None else per_joule * series["batch"],
        "on_front": _truth(row["on_front"]),
        "is_pick": _truth(bool(series["pick"]) and series["pick"]["key"] == row["key"]),
        "visits": row["visits"],
    }


def _truth(value: object) -> int:
    return int(bool(value))
