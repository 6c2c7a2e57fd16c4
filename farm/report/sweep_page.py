"""The report of a sweep: one self-contained HTML page, with CSV, JSON and charts beside it, and its result in words.

The words say the clocks to set, their cost against the fastest point, and the confidence; the sweep chose the point.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from farm import units
from farm.programs.metrics import LATENCY, ProgramMetric, read_metric
from farm.report import drawing, pages, sweep_charts
from farm.report.charts import Picture
from farm.report.pages import PageAnswer
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series, VariantRatio
from farm.units import format_percent, format_point

PAGE, CSV, JSON = "sweep.html", "sweep.csv", "sweep.json"
_STATES = {
    "running": "This sweep is still running; what follows is what there is so far.",
    "interrupted": "This sweep was interrupted before it was done.",
    "failed": "This sweep failed before it was done.",
    "voided": "This sweep was voided: nothing below should be relied on.",
}
# Predictions beyond the front have a line each only while they are few.
_MAX_PREDICTIONS = 40
# A page holds no more columns (a TX2 has twelve rails); the CSV has all.
_MOST_RAILS = 6
# From a point's own visits; estimates combine them with the fit.
_ALONE = ("latency_s", "power_w", "energy_j")
_ESTIMATES = ("latency_s", "power_w", "energy_j", "energy_above_idle_j", "idle_power_w", "wall_power_w")


def write_sweep_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `csv`, `json` and charts.

    `document` is what `farm sweep show ID --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [drawing.save(chart, folder) for chart in sweep_charts.plan_charts(document)]
    texts = {
        "page": (PAGE, write_page(document, pictures)),
        "csv": (CSV, write_csv(document)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    return pages.write_report(folder, texts, pictures)


def write_page(document: Document, pictures: list[Picture]) -> str:
    """Return the page's text."""
    simulated, watts = bool(document["board"]["simulated"]), document["board"]["watts"]
    series = sweep_rows.order_series(document)
    summary = compare_variants(document)
    if not sweep_rows.has_energy(document):
        summary.append("This board has no power sensor for its total: power and energy are not known.")
    boards = sweep_rows.name_boards(document)
    page = pages.ReportPage(
        title=f"{document['model']} on {boards}{' (simulated)' if simulated else ''}",
        subtitle=_subtitle(document),
        simulated=f"this board is a model of hardware, its {watts}. No figure was measured on a real one."
        if watts
        else "",
        answers=write_answers(document),
        summary=summary,
        sections=(),
        footer=f"Written by farm sweep show {document['sweep']} --out DIR."
        + (" All figures are simulated." if simulated else ""),
    )
    return pages.write_html(
        page,
        pictures,
        (CSV, JSON),
        "sweep.html",
        _FILTERS,
        document=document,
        series=series,
        boards=boards,
        broken=_STATES.get(document["state"], ""),
        several=len(series) > 1,
        several_batches=len(sweep_rows.list_batches(document)) > 1,
        variants=pair_variants(document),
        rails=[(each, rails) for each in series if (rails := sweep_rows.choose_rails(each, _MOST_RAILS))],
        rail_count=len(sweep_rows.list_rails(document)),
        most_rails=_MOST_RAILS,
        anchors={
            each["anchor"]
            for each in series
            if any(row["key"] == each["anchor"] and row["visits"] > 1 for row in each["rows"])
        },
        goal=sweep_rows.describe_goal(document["goal"]),
        watt=units.WATT,
        metric=read_metric(document["goal"]),
        others=sweep_rows.list_others(document),
        csv=CSV,
    )


def _subtitle(document: Document) -> str:
    grid, names = document["grid"], document["board"]["names"]
    when, took = units.format_minute(document["started_at"]), units.format_duration(document["seconds"])
    points = f"{grid['measured']} of {grid['points']} operating points measured"
    word = "board" if len(names) == 1 else "boards"
    return f"Sweep {document['sweep']} · {word} {', '.join(names)} · {points} · started {when}, took {took}"


def _choose_rows(series: Series) -> list[Row]:
    """Return rows for the page, without predictions where they are many. Slow clocks come last, as measured."""
    if sum(not row["measured"] for row in series["rows"]) <= _MAX_PREDICTIONS:
        return list(series["rows"])
    pick = sweep_rows.find_pick(series)
    return [row for row in series["rows"] if row["measured"] or row["on_front"] or row is pick]


def _find_scales(rows: list[Row], metric: ProgramMetric) -> tuple[units.Scale, units.Scale]:
    """Return the units of latency and energy."""
    times, energies = ([row[key]["value"] for row in rows if row[key]] for key in ("latency_s", "energy_j"))
    return metric.scale(times), units.joule_scale(energies)


def write_csv(document: Document) -> str:
    """Return the CSV with a heading line; predictions are marked."""
    rails, rows = sweep_rows.list_rails(document), [row for series in document["series"] for row in series["rows"]]
    clocks = list(dict.fromkeys(domain["name"] for row in rows for domain in row["domains"]))
    lines = [_line(document, series, row, clocks, rails) for series in document["series"] for row in series["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else ["sweep"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


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
    if document["goal"]["period_s"]:
        line |= _list_period(row["period"] or {})
    line |= {f"metric_{name}": row["metrics"].get(name) for name in document["metrics"]}
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


def _list_period(period: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name in ("mean_power_w", "released_mean_power_w"):
        estimate = period.get(name) or {}
        line |= {f"{name}{end}": estimate.get(end.removeprefix("_") or "value") for end in ("", "_low", "_high")}
    missed = period.get("missed") or {}
    line |= {name: period.get(name) for name in ("period_s", "input_j", "hours_50_wh", "latency_p99_s")}
    return line | {"runs_missed": missed.get("runs"), "runs": missed.get("of"), "share_missed_most": missed.get("most")}


def _truth(value: object) -> int:
    return int(bool(value))


TUNED, UNTUNED, COMPILED = "tuned", "untuned", "compiled"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both variants at one point."""

    untuned: Row
    tuned: Row

    @property
    def key(self) -> str:
        """Return the operating point."""
        return str(self.tuned["key"])

    def ratio(self, quantity: str) -> VariantRatio | None:
        """Return the farm's code over untuned; None where either has no figure."""
        over, under = self.tuned[quantity], self.untuned[quantity]
        return sweep_rows.divide(over, under) if over and under else None


@dataclasses.dataclass(frozen=True)
class Variants:
    """The pairs of one batch size, slow clocks as in the other tables. `name` is the sweep's name of our code."""

    name: str
    batch: int
    pairs: tuple[Pair, ...]


def pair_variants(document: Document) -> list[Variants]:
    """Pair variants by batch size; none where only one variant was swept, or no point was measured with both."""
    found = []
    for batch in sweep_rows.list_batches(document):
        by_name = {series["variant"]: series for series in document["series"] if series["batch"] == batch}
        ours = by_name.get(TUNED) or by_name.get(COMPILED)
        if ours is None or UNTUNED not in by_name:
            continue
        tuned = {row["key"]: row for row in sweep_rows.measured(ours)}
        untuned = sweep_rows.measured(by_name[UNTUNED])
        pairs = tuple(Pair(row, tuned[row["key"]]) for row in untuned if row["key"] in tuned)
        if pairs:
            found.append(Variants(str(ours["variant"]), batch, pairs))
    return found


def tabulate(variants: Variants) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return latency, power and energy of both variants side by side, and their ratio: headings, and lines of texts
    with notes. Each line begins with the point; the interval of a ratio is its note.
    """
    rows = [row for pair in variants.pairs for row in (pair.untuned, pair.tuned)]
    head, lines = [], [[(pair.key, "")] for pair in variants.pairs]
    for name, quantity, choose in (
        ("latency", "latency_s", units.seconds_scale),
        ("power", "power_w", lambda _: units.WATT),
        ("energy", "energy_j", units.joule_scale),
    ):
        known = [row[quantity]["value"] for row in rows if row[quantity]]
        if not known:
            continue
        scale = choose(known)
        head += [f"{name}, {scale.unit}: {UNTUNED}", variants.name, "ratio"]
        for pair, line in zip(variants.pairs, lines, strict=True):
            figures = (pair.untuned[quantity], pair.tuned[quantity])
            line += [(scale.interval(each)[0] if each else units.NOTHING, "") for each in figures]
            ratio = pair.ratio(quantity)
            number = units.format_number
            note = f"{number(ratio.low)} – {number(ratio.high)}" if ratio else ""
            line.append((number(ratio.value) if ratio else units.NOTHING, note))
    return head, lines


def write_answers(document: Document) -> list[PageAnswer]:
    """Return one answer per series, tuned ones first."""
    return [_answer(document, series) for series in sweep_rows.order_series(document)]


def compare_variants(document: Document) -> list[str]:
    """Compare the farm's code with untuned at the operating points where both were measured, per batch size."""
    sentences = []
    for variants in pair_variants(document):
        pairs, batch = variants.pairs, variants.batch
        times = [ratio for pair in pairs if (ratio := pair.ratio("latency_s"))]
        told = _times(times, "is {} times as fast as untuned", "takes {} times as long as untuned")
        energies = [ratio for pair in pairs if (ratio := pair.ratio("energy_j"))]
        if energies:
            told += " and " + _times(
                energies, "makes {} times as many inferences per joule", "needs {} times as much energy"
            )
        at = "the one operating point" if len(pairs) == 1 else f"the {len(pairs)} operating points"
        size = f", batch {batch}" if len(sweep_rows.list_batches(document)) > 1 else ""
        mean = " (geometric mean, and the range)" if len(pairs) > 1 else ""
        sentences.append(f"At {at} where both were measured{size}, {variants.name} {told}{mean}.")
    return sentences


def _times(ratios: list[sweep_rows.VariantRatio], better: str, worse: str) -> str:
    """Say ratios as a factor of at least one, with their range: `is 269 times as fast (260 – 280)`."""
    mean = sweep_rows.mean_ratio(ratios)
    values = sorted(ratio.value if mean > 1 else 1 / ratio.value for ratio in ratios)
    told = (worse if mean > 1 else better).format(units.format_number(mean if mean > 1 else 1 / mean))
    if len(ratios) == 1:
        return told
    return f"{told} ({units.format_number(values[0])} – {units.format_number(values[-1])})"


def _answer(document: Document, series: Series) -> PageAnswer:
    name = sweep_rows.name_series(series, document)
    pick, row = series["pick"], sweep_rows.find_pick(series)
    if not pick or row is None:
        why = str(series["no_pick"] or "the sweep ended before one was chosen").rstrip(".")
        return PageAnswer("No operating point can be recommended.", f"{why[:1].upper()}{why[1:]}.", name)
    rows = sweep_rows.counted(series)
    metric = read_metric(document["goal"])
    time = metric.scale(each["latency_s"]["value"] for each in rows)
    value, interval = time.interval(row["latency_s"])
    costs = f"{value} {time.unit} ({interval})"
    if row["energy_j"]:
        energy = units.joule_scale(each["energy_j"]["value"] for each in rows if each["energy_j"])
        value, interval = energy.interval(row["energy_j"])
        costs += f" and {value} {energy.unit}{f' per {metric.per}' if metric.counted else ''} ({interval})"
        if row["power_w"]:
            costs += f", at {units.WATT.text(row['power_w']['value'])}"
    measured = "" if row["measured"] else " as far as is predicted: this point was not measured"
    what = f"A {metric.per}" if metric != LATENCY else "An inference" if series["batch"] == 1 else "A batch"
    what += f" of {series['batch']}" if series["batch"] > 1 else ""
    lead, then = f"Set {format_point(row['key'])}.", " then"
    if row["key"] == "default":
        lead, then = "Leave the clocks as they are.", ""
    costs = f"The {metric.name}{then} is {costs}" if metric.counted else f"{what}{then} takes {costs}"
    sentences = [f"{costs}{measured}.", _against_fastest(series)]
    several, goal = len(sweep_rows.measured(series)) > 1, document["goal"]
    sentences.append(sweep_rows.describe_period(pick))
    if several or goal["deadline_s"] or goal["max_power_w"] or goal["period_s"]:
        sentences.append(f"It was picked for {sweep_rows.describe_goal(goal)}.")
    sentences.append(_certainty(pick) if several else "")
    return PageAnswer(lead, " ".join(sentence for sentence in sentences if sentence), name)


def _certainty(pick: Mapping[str, Any]) -> str:
    told = "The chance that no other measured point is better"
    told += f" is {units.format_share(pick['certainty'])}"
    if pick.get("close") is not None:
        told += f", that none is better by more than 3 %: {units.format_share(pick['close'])}"
    return told + "."


def _against_fastest(series: Series) -> str:
    fastest, against = sweep_rows.find_fastest(series), series["pick"]["against_fastest"]
    if fastest is None or len(sweep_rows.measured(series)) < 2:
        return ""
    if fastest["key"] == series["pick"]["key"]:
        return "It is also the fastest point that was measured."
    longer = format_percent(against["latency"], "longer", "shorter", "no longer")
    told = f"Against the fastest point ({format_point(fastest['key'])}) that is {longer}"
    if against["energy"] is not None:
        told += f", for {format_percent(against['energy'], 'more energy', 'less energy', 'the same energy')}"
    return told + "."


_FILTERS: dict[str, Callable[..., Any]] = {
    "series_name": sweep_rows.name_series,
    "shown_rows": _choose_rows,
    "scales": lambda series, metric: _find_scales(_choose_rows(series), metric),
    "counted_scales": lambda series, metric: _find_scales(sweep_rows.counted(series), metric),
    "common_words": lambda series: units.find_common_words(row["key"] for row in series["rows"]),
    "find_common": units.find_common_words,
    "tabulate": tabulate,
    "seconds_scale": units.seconds_scale,
    "joule_scale": units.joule_scale,
    "point": units.format_point,
    "percent": units.format_percent,
    "duration": units.format_duration,
    "share": units.format_share,
}
