"""A sweep's result in words: what to set, what it costs against the fastest point, how sure that is.

Which point is picked was decided by the sweep; here it is only told. Texts are plain; the page marks them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm import units
from farm.report import sweep_variants
from farm.report.pages import PageAnswer
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Series
from farm.units import format_percent, format_point

_OBJECTIVES = {
    "energy": "the least energy per inference",
    "latency": "the least latency",
    "power": "the least power",
    "edp": "the least product of energy and latency",
}


def write_answers(document: Document) -> list[PageAnswer]:
    """One answer per series, tuned ones first."""
    return [_answer(document, series) for series in sweep_rows.order_series(document)]


def describe_goal(goal: Mapping[str, Any]) -> str:
    """What was asked for: `the least energy per inference, with a latency of at most 33 ms`."""
    limits = []
    if goal["deadline_s"]:
        what = "95th percentile of the latency" if goal.get("deadline_on_p95") else "latency"
        scale = units.seconds_scale([goal["deadline_s"]])
        limits.append(f"a {what} of at most {scale.text(goal['deadline_s'])}")
    if goal["max_power_w"]:
        limits.append(f"a power of at most {units.WATT.text(goal['max_power_w'])}")
    objective = _OBJECTIVES.get(goal["objective"], str(goal["objective"]))
    return objective + (f", with {' and '.join(limits)}" if limits else "")


def compare_variants(document: Document) -> list[str]:
    """The farm's code against untuned at the operating points where both were measured, per batch size."""
    sentences = []
    for variants in sweep_variants.pair_variants(document):
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
    """What ratios come to as a factor of at least one, with their range: `is 269 times as fast (260 – 280)`."""
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
        text = _sentence(series["no_pick"] or "the sweep ended before one was chosen")
        return PageAnswer("No operating point can be recommended.", text, name)
    rows = sweep_rows.counted(series)
    time = units.seconds_scale(each["latency_s"]["value"] for each in rows)
    value, interval = time.interval(row["latency_s"])
    costs = f"{value} {time.unit} ({interval})"
    if row["energy_j"]:
        energy = units.joule_scale(each["energy_j"]["value"] for each in rows if each["energy_j"])
        value, interval = energy.interval(row["energy_j"])
        costs += f" and {value} {energy.unit} ({interval})"
        if row["power_w"]:
            costs += f", at {units.WATT.text(row['power_w']['value'])}"
    measured = "" if row["measured"] else " as far as is predicted: this point was not measured"
    what = "An inference" if series["batch"] == 1 else f"A batch of {series['batch']}"
    then = "" if row["key"] == "default" else " then"
    sentences = [f"{what}{then} takes {costs}{measured}.", _against_fastest(series)]
    if len(sweep_rows.measured(series)) > 1:
        sentences.append(f"It was picked for {describe_goal(document['goal'])}.")
        sentences.append(_certainty(pick))
    return PageAnswer(_lead(row["key"]), " ".join(sentence for sentence in sentences if sentence), name)


def _certainty(pick: Mapping[str, Any]) -> str:
    told = "The chance that no other measured point is better"
    told += f" is {units.format_share(pick['certainty'])}"
    if pick.get("close") is not None:
        told += f", that none is better by more than 3 %: {units.format_share(pick['close'])}"
    return told + "."


def _lead(key: str) -> str:
    return "Leave the clocks as they are." if key == "default" else f"Set {format_point(key)}."


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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
