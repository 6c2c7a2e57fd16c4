"""The tables of a sweep's page: points with figures and intervals, power by rail, the CSV, schedules by point."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

from farm import units
from farm.report.pages import Cell, Content, PageTable, make_table
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series
from farm.units import WATT, Scale, format_percent, format_point


@dataclasses.dataclass(frozen=True)
class ToldSchedules:
    """The result of schedules tried again at one point, in a sentence; the table has those that are better there."""

    sentence: str
    table: PageTable | None


def tell_schedules(document: Document) -> list[ToldSchedules]:
    """Return one per point; none where none was requested."""
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


# Predictions beyond the front have a line each only while they are few.
_MAX_PREDICTIONS = 40
# A page holds no more columns (a TX2 has twelve rails); the CSV has all.
MOST_RAILS = 6


def choose_rows(series: Series) -> tuple[list[Row], int]:
    """Return rows for the page, and how many predictions only the CSV has. Slow clocks come last, as measured."""
    predictions = [row for row in series["rows"] if not row["measured"]]
    if len(predictions) > _MAX_PREDICTIONS:
        keep = [
            row for row in series["rows"] if row["measured"] or row["on_front"] or row is sweep_rows.find_pick(series)
        ]
        return keep, len(series["rows"]) - len(keep)
    return list(series["rows"]), 0


def list_points(document: Document, series: Series) -> PageTable:
    """Return the main table of a series: latency, power, energy, temperature and marks of each operating point."""
    rows, _ = choose_rows(series)
    common = units.find_common_words(row["key"] for row in series["rows"])
    known = [row for row in rows if row["latency_s"]]
    time = units.seconds_scale(row["latency_s"]["value"] for row in known)
    energy = units.joule_scale(row["energy_j"]["value"] for row in rows if row["energy_j"])
    power = sweep_rows.has_energy(document) or any(row["power_w"] for row in rows)
    batch = series["batch"]
    head = ["operating point", f"latency, {time.unit}", f"95th percentile, {time.unit}"]
    if power:
        head += ["power, W", f"energy, {energy.unit}", f"above idle, {energy.unit}"]
        head += ["inferences per J" if batch == 1 else "inputs per J"]
    head += ["°C", ""]
    cells: list[list[Content]] = []
    for row in rows:
        own: list[Content] = [(format_point(row["key"], common), _note(row))]
        own += [_estimate(row, "latency_s", time), time.number(row["latency_p95_s"])]
        if power:
            own += [_estimate(row, "power_w", WATT), _estimate(row, "energy_j", energy)]
            each = row["inferences_per_joule"]
            own += [_estimate(row, "energy_above_idle_j", energy), WATT.number(each and each * batch)]
        celsius = row["temperature_c"]
        own.append(units.NOTHING if celsius is None else f"{celsius:.0f}")
        cells.append([*own, Cell("", kind="badges", badges=_badges(series, row))])
    kinds = [_line_kind(series, row) for row in rows]
    return make_table(head, cells, caption=_caption(document, series, common), kinds=kinds)


def list_rails(document: Document, series: Series) -> PageTable | None:
    """Return power by rail at each measured point; None where no rail was read."""
    rails = sweep_rows.choose_rails(series, MOST_RAILS)
    rows = [row for row in series["rows"] if row["rail_power_w"]]
    if not rails or not rows:
        return None
    common = units.find_common_words(row["key"] for row in series["rows"])
    cells = [
        (
            format_point(row["key"], common),
            _watts(row["power_w"]["value"] if row["power_w"] else None),
            *(_watts(row["rail_power_w"].get(rail)) for rail in rails),
        )
        for row in rows
    ]
    kinds = [_line_kind(series, row) for row in rows]
    caption = _caption(document, series, common)
    return make_table(["operating point", "total, W", *rails], cells, caption=caption, kinds=kinds)


def _watts(power_w: float | None) -> str:
    """Format to the milliwatt, so that columns align."""
    return units.NOTHING if power_w is None else f"{power_w:.3f}"


def _estimate(row: Row, quantity: str, scale: Scale) -> Content:
    return scale.interval(row[quantity]) if row[quantity] else units.NOTHING


def _note(row: Row) -> str:
    if row["invalid"]:
        return str(row["invalid"])
    return "throttled: not counted" if row["throttled"] else ""


def _badges(series: Series, row: Row) -> Sequence[tuple[str, str]]:
    badges = []
    if series["pick"] and series["pick"]["key"] == row["key"]:
        badges.append(("pick", "pick"))
    if row["on_front"]:
        badges.append(("front", "front"))
    if row["key"] == series["anchor"]:
        badges.append(("anchor", ""))
    if row["predicted"]:
        badges.append(("predicted", "predicted"))
    if row["throttled"]:
        badges.append(("throttled", "bad"))
    elif row["invalid"]:
        badges.append(("not counted", "bad"))
    return badges


def _line_kind(series: Series, row: Row) -> str:
    if not sweep_rows.counts(row):
        return "void" if row["measured"] or row["invalid"] or row["throttled"] else "predicted"
    if series["pick"] and series["pick"]["key"] == row["key"]:
        return "pick"
    return "predicted" if row["predicted"] else ""


def _caption(document: Document, series: Series, common: Sequence[str]) -> str:
    same = f"; everywhere {format_point(' '.join(common))}" if common else ""
    simulated = ", simulated" if document["board"]["simulated"] else ""
    return f"{sweep_rows.name_series(series, document)} on {sweep_rows.name_boards(document)}{simulated}{same}"
