"""The tables of a sweep's page: every point with its figures and intervals, and power by rail."""

from __future__ import annotations

from collections.abc import Sequence

from farm import units
from farm.report.pages import Cell, Content, PageTable, make_table
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series
from farm.units import WATT, Scale, format_point

# Predictions beyond the front are worth a line each only while they are few.
_MAX_PREDICTIONS = 40
# More columns than that (a TX2 has twelve rails) no page holds; the CSV has all.
MOST_RAILS = 6


def choose_rows(series: Series) -> tuple[list[Row], int]:
    """Rows for the page, and how many predictions are left to the CSV. Slow clocks come last, as measured."""
    predictions = [row for row in series["rows"] if not row["measured"]]
    if len(predictions) > _MAX_PREDICTIONS:
        keep = [
            row for row in series["rows"] if row["measured"] or row["on_front"] or row is sweep_rows.find_pick(series)
        ]
        return keep, len(series["rows"]) - len(keep)
    return list(series["rows"]), 0


def list_points(document: Document, series: Series) -> PageTable:
    """The main table of a series: latency, power, energy, temperature and marks of each operating point."""
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
    """Power by rail at each measured point; None where no rail was read."""
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
    """To the milliwatt, so that a column can be read down."""
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
