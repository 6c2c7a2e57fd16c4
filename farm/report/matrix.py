"""The matrix of kept results: models and precisions x boards, with the gain over the best rival; as CSV, text, page."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from farm import foreign, units
from farm.report import charts, drawing, pages
from farm.report.charts import Chart, ChartAxis, Marks, Panel, Reference
from farm.report.results import OURS, SCORES, Costs, Figure, list_figures, say_latency, say_score
from farm.store.results import StoredResult

_HEAD = ("model", "precision", "batch", "board", "rival", "log2_gain", "latency_s", "rival_s", "fps", "energy_j")


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """Our newest figures of a model on a board type, and of the best rival in the same result (None: none ran)."""

    model: str
    place: str
    simulated: bool
    figure: Figure
    rival: Figure | None
    result: int
    scores: dict[str, float]

    @property
    def gain(self) -> float | None:
        """Return log2 of the rival's latency over ours: 1 is twice as fast; None where the latencies are doubtful."""
        return math.log2(self.rival.median_s / self.figure.median_s) if self.rival and not self.figure.doubt else None

    @property
    def is_faster(self) -> bool:
        """Say whether we are faster than the rival, the 95 % intervals being apart."""
        return self.rival is not None and not self.figure.doubt and self.figure.high_s < self.rival.low_s


def make_matrix(results: Iterable[StoredResult]) -> list[MatrixCell]:
    """Return one cell for each model, precision, batch and place, from its newest result; the greatest gain first.

    A doubtful result goes after all others, and one with rivals before one without. Scores come from the newest
    evaluation. `results`: newest first.
    """
    cells: dict[tuple[str, str, str, int], MatrixCell] = {}
    scores: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for result in results:
        figures = list_figures(result)
        place = result.board_type + (" GPU" if result.device == "gpu" else "")
        place += " (simulated)" if result.simulated else ""
        rivals = [each for each in figures if each.is_rival]
        best = min(rivals, key=lambda each: each.median_s, default=None)
        for each in figures:
            if each.code != OURS:
                continue
            key = (result.model, place, each.precision, each.batch)
            if each.scores:
                scores.setdefault(key, dict(each.scores))
            found_cell = MatrixCell(result.model, place, result.simulated, each, best, result.id, {})
            known = cells.get(key)
            if known is None or _rank(found_cell) < _rank(known):
                cells[key] = found_cell
    found = [dataclasses.replace(cell, scores=scores.get(key, {})) for key, cell in cells.items()]
    return sorted(found, key=lambda each: (each.gain is None, -(each.gain or 0.0), each.model, each.place))


def _rank(cell: MatrixCell) -> tuple[bool, bool]:
    return bool(cell.figure.doubt), cell.rival is None


def say_doubts(cells: Sequence[MatrixCell]) -> list[str]:
    """Return what to know of the cases that count for nothing; [] where there are none."""
    results = sorted({each.result for each in cells if each.figure.doubt})
    numbers = ", ".join(map(str, results))
    return [f"Doubtful, and not counted: results {numbers}; `farm result show` says why"] if results else []


def write_csv(cells: Sequence[MatrixCell], costs: Costs) -> str:
    """Return one line for each cell, in SI units."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_HEAD, *SCORES, "per_million", "currency", "per_battery", "result", "doubt"])
    for each in cells:
        figure, rival = each.figure, each.rival
        row = [each.model, figure.precision, figure.batch, each.place, rival.code if rival else "", each.gain]
        row += [figure.median_s, rival.median_s if rival else None, figure.fps, figure.energy_j]
        row += [each.scores.get(name) for name in SCORES]
        row += [costs.price(figure), costs.currency, costs.count(figure), each.result, figure.doubt]
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])
    return out.getvalue()


def list_columns(cells: Sequence[MatrixCell], costs: Costs) -> tuple[list[str], list[list[str | None]]]:
    """Return headings and rows of texts for people; columns without any value are left out."""
    columns: dict[str, list[str | None]] = {
        "Model": [each.model for each in cells],
        "Precision": [each.figure.precision for each in cells],
        "Batch": [str(each.figure.batch) for each in cells],
        "Board": [each.place for each in cells],
        "Best rival": [each.rival.code if each.rival else None for each in cells],
        "log2 gain": [None if each.gain is None else f"{each.gain:+.2f}" for each in cells],
        "Latency (ms)": [say_latency(each.figure) for each in cells],
        "FPS": [f"{each.figure.fps:,.1f}" for each in cells],
        "Energy (mJ)": [
            None if each.figure.energy_j is None else units.format_number(each.figure.energy_j * 1e3) for each in cells
        ],
        **{
            head: [say_score(name, each.scores[name]) if name in each.scores else None for each in cells]
            for name, head in SCORES.items()
        },
        f"{costs.currency} per million": [_say(costs.price(each.figure), ",.2f") for each in cells],
        "Per battery": [_say(costs.count(each.figure), ",.0f") for each in cells],
    }
    kept = {head: texts for head, texts in columns.items() if any(texts)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _say(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def plan_chart(cells: Sequence[MatrixCell]) -> Chart | None:
    """Plan the gains: a row for each model and precision, a colour for each board; None without a rival."""
    shown = [each for each in cells if each.gain is not None]
    if not shown:
        return None
    names = list(dict.fromkeys(_name(each) for each in shown))
    places = sorted({each.place for each in shown})
    marks = []
    for index, place in enumerate(places):
        mine = [each for each in shown if each.place == place]
        marks.append(
            Marks(
                tuple(float(each.gain or 0.0) for each in mine),
                tuple(-float(names.index(_name(each))) for each in mine),
                charts.COLOURS[index % len(charts.COLOURS)],
                place,
                shape="o",
                size=9.0,
                texts=tuple(f"{each.figure.median_s * 1e3:.3g} ms" for each in mine) if len(places) == 1 else (),
            )
        )
    reach = max(1.0, *(abs(each.gain or 0.0) for each in shown)) * 1.15
    axis = ChartAxis("log2 of the best rival's latency over ours: 1 is twice as fast", -reach, reach)
    return Chart(
        "matrix",
        "Gain over the best rival by model, precision and board",
        f"Faster than the best rival in {sum(each.is_faster for each in shown)} of {len(shown)} cases",
        "right of 0: tvm-farm is faster",
        (Panel(axis, ChartAxis(rows=tuple(names)), tuple(marks), (Reference(charts.INK, "as fast", x=0.0),)),),
        1.0 + 0.34 * len(names),
        all(each.simulated for each in shown),
    )


def _name(cell: MatrixCell) -> str:
    batch = f", batch {cell.figure.batch}" if cell.figure.batch > 1 else ""
    return f"{foreign.say_plainly(cell.model)[:40]} {cell.figure.precision}{batch}"


def write_matrix(cells: Sequence[MatrixCell], costs: Costs, folder: Path) -> dict[str, str]:
    """Write page, Markdown, CSV and the chart into `folder`, made if need be; return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    chart = plan_chart(cells)
    pictures = [drawing.save(chart, folder)] if chart else []
    head, rows = list_columns(cells, costs)
    left = [head.index(each) for each in ("Model", "Precision", "Board", "Best rival") if each in head]
    table = pages.make_table(head, [[each or "–" for each in row] for row in rows], left)
    simulated = [each for each in cells if each.simulated]
    page = pages.ReportPage(
        title="Models x boards",
        subtitle=f"{len(cells)} cases from kept results, the newest of each",
        simulated="figures of boards marked so come from models of hardware." if simulated else "",
        answers=(),
        summary=[f"{each}." for each in (chart.headline if chart else "No comparison counts", *say_doubts(cells))],
        sections=(pages.Section("Results", [table]),),
        footer="Written by farm result matrix.",
    )
    return pages.write_page(folder, "matrix", page, pictures, {"csv": write_csv(cells, costs)})
