"""A sweep's result in words: the clocks to set, their cost against the fastest point, the confidence.

The sweep chose the point. Texts are plain; the page marks them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm import units
from farm.report.pages import PageAnswer
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series, VariantRatio
from farm.units import format_percent, format_point

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
    lead, then = f"Set {format_point(row['key'])}.", " then"
    if row["key"] == "default":
        lead, then = "Leave the clocks as they are.", ""
    sentences = [f"{what}{then} takes {costs}{measured}.", _against_fastest(series)]
    several, goal = len(sweep_rows.measured(series)) > 1, document["goal"]
    if several or goal["deadline_s"] or goal["max_power_w"]:
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
