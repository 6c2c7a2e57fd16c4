"""A sweep's document as text on stdout: the table, the picks, what has to be said beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import markup

from farm.cli import output
from farm.report import sweep_words

# More columns than that (a TX2 has twelve rails) no terminal holds.
_MOST_RAILS = 3


def print_sweep(document: Mapping[str, Any]) -> None:
    """Everything."""
    board = document["board"]
    names = ", ".join(board["names"])
    simulated = " (simulated: nothing of it holds for a real board)" if board["simulated"] else ""
    grid = document["grid"]
    _say(
        f"sweep {document['sweep']}: {document['model']} on {board['type']}{f'/{names}' if names else ''}{simulated}, "
        f"{grid['measured']} of {grid['points']} points measured, {document['state']}, {document['seconds']:.0f} s"
    )
    for series in document["series"]:
        _say("")
        _say(_name(series))
        _print_rows(series)
        if series["drift"]["corrected"] or series["drift"]["void"]:
            _say(f"drift: {series['drift']['text']}")
    _say("")
    print_picks(document, document["series"])
    for fitted in document.get("schedules", ()):
        _print_schedules(fitted)
    for merge in grid["merged"]:
        _say(f"merged into {merge['kept']}: {', '.join(merge['dropped'])} ({merge['reason']})")
    for note in document["notes"]:
        _say(f"note: {note}")
    if "report" in document:
        _say(f"report: {document['report']['page']}")
    else:
        number = document["sweep"]
        _say(f"`farm sweep report {number}` writes the page, `farm sweep export {number}` the setting")


def _print_schedules(fitted: Mapping[str, Any]) -> None:
    """Where other schedules are better at a point, and what they gain."""
    better = [each for each in fitted["workloads"] if each["differs"]]
    batch = f", batch {fitted['batch']}" if fitted["batch"] > 1 else ""
    told = (
        f"schedules at {fitted['key']}{batch}: {len(better)} of {len(fitted['workloads'])} workloads have a better one"
    )
    if model := fitted["model"]:
        told += f"; the model takes {_change(model, 'latency_s', 1e3, 'ms')}"
        if model["before"]["energy_j"] and model["after"]["energy_j"]:
            told += f" and {_change(model, 'energy_j', 1e3, 'mJ')}"
    _say(told)
    for each in sorted(better, key=lambda each: each["ratio"]):
        times = f"{each['default_s'] * 1e6:.4g} to {each['best_s'] * 1e6:.4g} us"
        _say(f"  {each['name']} x{each['weight']}: {times}, {each['ratio'] - 1:+.1%}")


def _change(model: Mapping[str, Any], what: str, factor: float, unit: str) -> str:
    before, after = (model[which][what]["value"] for which in ("before", "after"))
    return f"{after * factor:.4g} {unit} instead of {before * factor:.4g} ({after / before - 1:+.1%})"


def print_picks(document: Mapping[str, Any], chosen: Sequence[Mapping[str, Any]]) -> None:
    """What to set, what it costs, how sure that is, and what comes next."""
    simulated = " (simulated)" if document["board"]["simulated"] else ""
    for series in chosen:
        picked = series["pick"]
        if picked is None:
            _say(f"no pick, {_name(series)}{simulated}: {series['no_pick']}")
        else:
            _say(f"pick, {_name(series)}{simulated}: {picked['text']}")
            for other in picked["runners_up"]:
                _say(f"  next: {other['key']}: {other['text']}")
        for other in series["unmeasured"]:
            _say(f"  {other['text']}; `farm sweep pick {document['sweep']} --measure` measures it")


def _print_rows(series: Mapping[str, Any]) -> None:
    has_power = any(row["power_w"] for row in series["rows"])
    rows = [row for row in series["rows"] if row["measured"]]
    time = sweep_words.seconds_scale(row["latency_s"]["value"] for row in rows)
    energy = sweep_words.joule_scale(row["energy_j"]["value"] for row in rows if row["energy_j"])
    columns = ["Operating point", f"Latency ({time.unit})", "95 % CI", "p95"]
    rails = list(dict.fromkeys(rail for row in series["rows"] for rail in row["rail_power_w"]))
    shown = [rail for rail in rails if rail in sorted(rails, key=lambda name: -_largest(series, name))[:_MOST_RAILS]]
    if has_power:
        columns += ["Power (W)", *shown, f"Energy ({energy.unit})", "95 % CI", "Above idle", "Inf./J x batch"]
    output.print_table(
        [*columns, "°C", "Visits", ""],
        [
            _cells(series, row, has_power, shown, (time, energy))
            for row in series["rows"]
            if row["measured"] or row["invalid"]
        ],
        left=(0, len(columns) + 2),
        empty="nothing measured",
    )
    if len(shown) < len(rails):
        _say(f"the {len(shown)} largest of {len(rails)} rails; all are in the CSV of `farm sweep report`")
    unseen = sum(not row["measured"] and not row["invalid"] for row in series["rows"])
    if unseen:
        _say(f"{unseen} points were not measured; `--json` has what is predicted of them")


def _largest(series: Mapping[str, Any], rail: str) -> float:
    """The most that a rail draws at any point."""
    return max((float(row["rail_power_w"].get(rail, 0.0)) for row in series["rows"]), default=0.0)


def _cells(
    series: Mapping[str, Any],
    row: Mapping[str, Any],
    has_power: bool,
    rails: Sequence[str],
    scales: tuple[sweep_words.Scale, sweep_words.Scale],
) -> list[Any]:
    time, joule = (scale.factor for scale in scales)
    measured = row["measured"]
    latency = row["latency_s"] if measured else None
    cells = [
        row["key"],
        _number(latency and latency["value"], time),
        _range(latency, time),
        _number(row["latency_p95_s"], time),
    ]
    if has_power:
        power, energy = (row["power_w"], row["energy_j"]) if measured else (None, None)
        above = row["energy_above_idle_j"]
        cells += [
            _number(power and power["value"]),
            *(_number(row["rail_power_w"].get(rail)) for rail in rails),
            _number(energy and energy["value"], joule),
            _range(energy, joule),
            _number(above and above["value"], joule),
            _number(row["inferences_per_joule"], series["batch"]) if measured else None,
        ]
    celsius = row["temperature_c"]
    return [*cells, None if celsius is None else f"{celsius:.0f}", row["visits"], _flags(series, row)]


def _flags(series: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    picked = series["pick"]
    words = ["PICK"] if picked and picked["key"] == row["key"] else []
    words += ["front"] if row["on_front"] else []
    words += ["anchor"] if row["key"] == series["anchor"] else []
    words += ["throttled"] if row["throttled"] else ["invalid"] if row["invalid"] else []
    return " ".join(words)


def _name(series: Mapping[str, Any]) -> str:
    return str(series["variant"]) + (f", batch {series['batch']}" if series["batch"] > 1 else "")


def _number(value: float | None, factor: float = 1.0) -> str | None:
    return None if value is None else f"{value * factor:.4g}"


def _range(estimate: Mapping[str, float] | None, factor: float) -> str | None:
    return None if estimate is None else f"{estimate['low'] * factor:.4g}–{estimate['high'] * factor:.4g}"


def _say(text: str) -> None:
    output.stdout.print(markup.escape(text), soft_wrap=True)
