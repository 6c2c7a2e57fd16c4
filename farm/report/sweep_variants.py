"""The farm's code against untuned at the operating points where both were measured: one table, a row per point.

The picture of both is `sweep_plots.py`'s, the sentence that sums them up `sweep_answer.py`'s.
"""

from __future__ import annotations

import dataclasses

from farm import units
from farm.report.pages import Content, PageTable, make_table
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, VariantRatio

TUNED, UNTUNED, COMPILED = "tuned", "untuned", "compiled"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both variants at one point."""

    untuned: Row
    tuned: Row

    @property
    def key(self) -> str:
        """The operating point."""
        return str(self.tuned["key"])

    def ratio(self, quantity: str) -> VariantRatio | None:
        """The farm's code over untuned; None where either has no figure."""
        over, under = self.tuned[quantity], self.untuned[quantity]
        return sweep_rows.divide(over, under) if over and under else None


@dataclasses.dataclass(frozen=True)
class Variants:
    """The pairs of one batch size, slow clocks as in the other tables. `name` is what the sweep calls our code."""

    name: str
    batch: int
    pairs: tuple[Pair, ...]


def pair_variants(document: Document) -> list[Variants]:
    """By batch size; none where only one variant was swept, or no point was measured with both."""
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


@dataclasses.dataclass(frozen=True)
class VariantComparison:
    """A table as text: `lines` begin with the point; `intervals` stand below the ratios, "" elsewhere."""

    head: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    intervals: tuple[tuple[str, ...], ...]


def tabulate(variants: Variants) -> VariantComparison:
    """Latency, power and energy of both beside each other, and their ratio."""
    rows = [row for pair in variants.pairs for row in (pair.untuned, pair.tuned)]
    time = units.seconds_scale(row["latency_s"]["value"] for row in rows)
    joule = units.joule_scale(row["energy_j"]["value"] for row in rows if row["energy_j"])
    quantities = [("latency", "latency_s", time)]
    if any(row["power_w"] for row in rows):
        quantities.append(("power", "power_w", units.WATT))
    if any(row["energy_j"] for row in rows):
        quantities.append(("energy", "energy_j", joule))
    head: list[str] = []
    for name, _, scale in quantities:
        head += [f"{name}, {scale.unit}: {UNTUNED}", variants.name, "ratio"]
    lines, intervals = [], []
    for pair in variants.pairs:
        cells, below = [], []
        for _, quantity, scale in quantities:
            ratio = pair.ratio(quantity)
            cells += [_value(pair.untuned, quantity, scale), _value(pair.tuned, quantity, scale)]
            cells.append(units.NOTHING if ratio is None else units.format_number(ratio.value))
            below += [
                "",
                "",
                "" if ratio is None else f"{units.format_number(ratio.low)} – {units.format_number(ratio.high)}",
            ]
        lines.append(tuple(cells))
        intervals.append(tuple(below))
    return VariantComparison(tuple(head), tuple(pair.key for pair in variants.pairs), tuple(lines), tuple(intervals))


def list_variants(document: Document) -> list[PageTable]:
    """The tables for the page, one per batch size."""
    tables = []
    for variants in pair_variants(document):
        table = tabulate(variants)
        common = units.find_common_words(table.keys)
        rows: list[list[Content]] = [
            [units.format_point(key, common), *zip(cells, notes, strict=True)]
            for key, cells, notes in zip(table.keys, table.lines, table.intervals, strict=True)
        ]
        batch = f", batch {variants.batch}" if len(sweep_rows.list_batches(document)) > 1 else ""
        simulated = ", simulated" if document["board"]["simulated"] else ""
        caption = f"{variants.name} over {UNTUNED}{batch}{simulated}; below each ratio its 95 % interval"
        tables.append(make_table(["operating point", *table.head], rows, caption=caption))
    return tables


def _value(row: Row, quantity: str, scale: units.Scale) -> str:
    return scale.interval(row[quantity])[0] if row[quantity] else units.NOTHING
