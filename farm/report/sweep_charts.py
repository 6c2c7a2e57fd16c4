"""Charts of a sweep: latency against energy with the front, and latency, power and energy over each clock.

Points that were only predicted are hollow, points that others beat in both are grey.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from farm import units
from farm.programs.metrics import LATENCY, read_metric
from farm.report import charts
from farm.report.charts import Chart, ChartAxis, Interval, Marks, Panel, PointName, Reference
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series
from farm.units import Scale

# Distinct shapes, for readers who see no colours and for print.
_SHAPES = ("o", "s", "^", "D")
_VARIANTS = ("tuned", "compiled", "untuned")
_DOMINATED = "#b4b4b4"
# More predictions than this are drawn without intervals and outlines, which would cover everything else.
_CROWD = 60
# Points so many times slower or more expensive than the whole front are only in the table: they would squeeze the rest.
_FAR = 3.0


@dataclasses.dataclass(frozen=True)
class Look:
    """The style of a series: its name, colour, shape, and number in the chart."""

    series: Series
    name: str
    colour: str
    shape: str
    key: str = ""


def plan_looks(document: Document, batch: int) -> list[Look]:
    """Choose a colour for each variant, the same in every chart of every sweep; tuned first."""
    others = [series["variant"] for series in document["series"] if series["variant"] not in _VARIANTS]
    known = [*_VARIANTS, *dict.fromkeys(others)]
    looks = []
    for series in sweep_rows.order_series(document):
        if series["batch"] == batch:
            index = known.index(series["variant"])
            # Orange is faint as text.
            colour = (charts.BLUE, "#d55e00", "#009e73", "#cc79a7")[index % 4]
            looks.append(Look(series, series["variant"], colour, _SHAPES[index % len(_SHAPES)]))
    return looks


def plan_charts(document: Document) -> Iterator[Chart]:
    """Return every chart that the document has data for."""
    batches = sweep_rows.list_batches(document)
    for batch in batches:
        looks = plan_looks(document, batch)
        suffix = f"-batch{batch}" if len(batches) > 1 else ""
        rows = [row for look in looks for row in sweep_rows.counted(look.series)]
        if len({row["key"] for row in rows}) > 1 and any(row["energy_j"] for row in rows):
            yield plan_front(document, looks, suffix)
        for clock in sweep_rows.find_swept_clocks(document):
            if slices := _plan_slices(looks, clock):
                yield _plan_clock(document, clock, slices, suffix)


def plan_front(document: Document, looks: Sequence[Look], suffix: str = "", far: float = _FAR) -> Chart:
    """Plan latency against energy, up to `far` times the front; at least one valid row must have an energy."""
    known = [row for look in looks for row in sweep_rows.counted(look.series) if row["energy_j"]]
    front = [row for row in known if row["on_front"]] or known
    ends = {key: far * max(row[key]["value"] for row in front) for key in ("latency_s", "energy_j")}
    rows = [row for row in known if all(row[key]["value"] <= end for key, end in ends.items())]
    by_look = [[row for row in look.series["rows"] if row in rows] for look in looks]
    metric = read_metric(document["goal"])
    time = metric.scale(row["latency_s"]["value"] for row in rows)
    energy = units.joule_scale(row["energy_j"]["value"] for row in rows)
    common = units.find_common_words(row["key"] for look in looks for row in look.series["rows"])
    goal, marks, names = document["goal"], [], []
    for look, some in zip(looks, by_look, strict=True):
        front = sorted((row for row in some if row["on_front"]), key=lambda row: float(row["latency_s"]["value"]))
        # The energy reached at a latency or less.
        x, y = _list_values(front, "latency_s", time), _list_values(front, "energy_j", energy)
        marks.append(Marks(x, y, look.colour, line="steps", alpha=0.7))
        marks += _plan_points(look, some, time, energy)
        pick = sweep_rows.find_pick(look.series)
        for row, at, cost in zip(front, x, y, strict=True):
            if row is not pick:
                names.append(PointName(at, cost, units.format_label(row["key"], common)))
        if pick and pick in some:
            at, cost = time.convert(pick["latency_s"]["value"]), energy.convert(pick["energy_j"]["value"])
            marks.append(_ring((at,), (cost,), look.key))
            text = f"pick: {units.format_label(pick['key'], common)}"
            names.append(PointName(at, cost, text, look.colour, bold=True))
    if any(not row["on_front"] for row in rows):
        marks.append(Marks((), (), _DOMINATED, "not on the front", shape="o"))
    if any(not row["measured"] for row in rows):
        marks.append(Marks((), (), charts.FAINT, "predicted, not measured", shape="o", hollow=True))
    references = []
    if goal["deadline_s"]:
        at = time.convert(goal["deadline_s"])
        references.append(
            Reference(charts.RED, f"{'at least' if time.inverse else 'deadline'} {time.text(goal['deadline_s'])}", x=at)
        )
    if goal["max_power_w"] and not time.inverse:
        slope = goal["max_power_w"] / time.factor * energy.factor
        references.append(Reference(charts.RED, f"at most {goal['max_power_w']:g} W", slope=slope))
    panel = Panel(
        ChartAxis(f"{metric.name}{' per inference' * (metric == LATENCY)}, {time.unit}", log=True),
        ChartAxis(f"energy per {metric.per}, {energy.unit}", log=True),
        tuple(marks),
        tuple(references),
        tuple(names),
    )
    beyond = len(known) - len(rows)
    points = "1 point far from the front is" if beyond == 1 else f"{beyond} points far from the front are"
    side = "right" if time.inverse else "left"
    subtitle = f"{metric.title} against energy, lower {side} is better"
    subtitle += f"; {points} in the table only" if beyond else ""
    caption = f"{metric.title} and energy per {metric.per} at every operating point, with the Pareto front"
    return _plan(document, f"front{suffix}", caption, subtitle, (panel,), 3.6)


def _plan(
    document: Document, name: str, caption: str, subtitle: str, panels: tuple[Panel, ...], height: float
) -> Chart:
    title = f"{document['model']} on {sweep_rows.name_boards(document)}"
    return Chart(name, caption, title, subtitle, panels, height, document["board"]["simulated"], shared="x")


def _plan_points(look: Look, rows: Sequence[Row], time: Scale, energy: Scale) -> Iterator[Marks]:
    """Plan every point of a series, those of one style together."""
    crowded = sum(not row["measured"] for row in rows) > _CROWD
    alike: dict[tuple[bool, bool], list[Row]] = {}
    for row in rows:
        alike.setdefault((bool(row["on_front"]), bool(row["measured"])), []).append(row)
    for (on_front, measured), some in sorted(alike.items()):
        is_small = crowded and not measured
        yield Marks(
            _list_values(some, "latency_s", time),
            _list_values(some, "energy_j", energy),
            look.colour if on_front else _DOMINATED,
            f"{look.name}, on the front" if on_front and measured else "",
            shape=look.shape,
            size=2.6 if is_small else 6.0,
            hollow=not measured,
            x_ends=() if is_small else _list_ends(some, "latency_s", time),
            y_ends=() if is_small else _list_ends(some, "energy_j", energy),
            key=f"points-{look.key}-{on_front:d}{measured:d}" if look.key else "",
            keys=tuple(row["key"] for row in some),
            titles=tuple(_describe(look, row, time, energy) for row in some) if look.key else (),
        )


def _describe(look: Look, row: Row, time: Scale, energy: Scale) -> str:
    figures = [time.text(row["latency_s"]["value"]), energy.text(row["energy_j"]["value"])]
    figures += [units.WATT.text(row["power_w"]["value"])] if row["power_w"] else []
    figures += [] if row["measured"] else ["predicted"]
    return f"{look.name}, {row['key']}: {', '.join(figures)}"


def _ring(x: charts.Numbers, y: charts.Numbers, key: str = "") -> Marks:
    """Mark a pick."""
    return Marks(x, y, charts.INK, "pick", shape="o", size=13, hollow=True, key=f"ring-{key}" if key else "")


def _list_values(rows: Sequence[Row], quantity: str, scale: Scale) -> charts.Numbers:
    return tuple(scale.convert(float(row[quantity]["value"])) for row in rows)


def _list_ends(rows: Sequence[Row], quantity: str, scale: Scale) -> tuple[Interval, ...]:
    ends = (sorted(scale.convert(row[quantity][end]) for end in ("low", "high")) for row in rows)
    return tuple((low, high) for low, high in ends)


def _plan_slices(looks: Sequence[Look], clock: Sequence[str]) -> list[tuple[Look, list[Row]]]:
    """Return the rows of each series in which only this clock changes, with all other clocks equal."""
    first = next((rows for look in looks if len(rows := sweep_rows.choose_slice(look.series, clock)) > 1), None)
    if first is None:
        return []
    slices = [(look, sweep_rows.find_slice(look.series, clock, first[0])) for look in looks]
    return [(look, rows) for look, rows in slices if len(rows) > 1]


def _plan_clock(
    document: Document, clock: Sequence[str], slices: Sequence[tuple[Look, list[Row]]], suffix: str
) -> Chart:
    """Plan latency, power and energy over one clock, one below the other, all series in each."""
    rows, metric = [row for _, some in slices for row in some], read_metric(document["goal"])
    quantities: list[tuple[str, str, Scale]] = []
    for quantity, label, choose in (
        ("latency_s", metric.name, metric.scale),
        ("power_w", "power", lambda _: units.WATT),
        ("energy_j", "energy", units.joule_scale),
    ):
        if values := [row[quantity]["value"] for row in rows if row[quantity]]:
            quantities.append((quantity, label, choose(values)))
    name = " and ".join(clock)
    x = ChartAxis(f"clock of {name}, MHz", ticks=tuple({_mhz(row, clock) for row in rows}))
    panels = tuple(
        Panel(
            x,
            ChartAxis(f"{label}, {scale.unit}", low=0, log=True),
            tuple(marks for look, some in slices for marks in _plan_course(clock, look, some, quantity, scale)),
        )
        for quantity, label, scale in quantities
    )
    told = " and ".join([metric.title, *(label for _, label, _ in quantities[1:2])])
    variants = " and ".join(look.name for look, _ in slices)
    caption = f"{told} over the clock of {name}: {variants}"
    height = 0.55 + 1.75 * len(panels)
    return _plan(document, f"clock-{'-'.join(clock)}{suffix}", caption, _explain_slice(clock, slices), panels, height)


def _mhz(row: Row, clock: Sequence[str]) -> float:
    return (sweep_rows.clock_hz(row, clock) or 0) / 1e6


def _plan_course(clock: Sequence[str], look: Look, rows: Sequence[Row], quantity: str, scale: Scale) -> Iterator[Marks]:
    """Plan one series' values over a clock, joined by a faint line."""
    known = [row for row in rows if row[quantity]]
    places = {row["key"]: _mhz(row, clock) for row in known}
    yield Marks(tuple(places.values()), _list_values(known, quantity, scale), look.colour, line="line", alpha=0.5)
    for measured in (True, False):
        if some := [row for row in known if bool(row["measured"]) is measured]:
            yield Marks(
                tuple(places[row["key"]] for row in some),
                _list_values(some, quantity, scale),
                look.colour,
                look.name if measured else "predicted, not measured",
                shape=look.shape,
                hollow=not measured,
                y_ends=_list_ends(some, quantity, scale),
            )
    pick = sweep_rows.find_pick(look.series)
    if pick and pick in known:
        yield _ring((places[pick["key"]],), _list_values([pick], quantity, scale))


def _explain_slice(clock: Sequence[str], slices: Sequence[tuple[Look, list[Row]]]) -> str:
    """Say which values the other clocks have in this chart; empty where they do not change."""
    look, rows = slices[0]
    common = units.find_common_words(row["key"] for row in look.series["rows"])
    words = rows[0]["key"].split()
    others = [word for word in words if word.partition("=")[0] not in clock and word not in common]
    at = f", with {units.format_point(' '.join(others))}" if others else ""
    return f"Over the clock of {' and '.join(clock)}{at}"
