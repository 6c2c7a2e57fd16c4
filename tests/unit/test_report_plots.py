"""Charts: written, of one width, deterministic, and nothing runs out of the picture."""

from __future__ import annotations

import pathlib
import random

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from farm.report import campaign_charts, charts, drawing
from farm.report.charts import Chart, ChartAxis, Marks, Panel, PointName

POINTS = {
    "falling": [(n, 0.4 / n) for n in range(1, 129)],
    "one": [(8, 0.0005)],
    "flat": [(n, 0.01) for n in (4, 8, 12)],
}


def row(label: str, colour: str, median: float, low: float, high: float) -> tuple[str, str, dict[str, float]]:
    """A bar of the chart of latencies."""
    return label, colour, {"median": median, "ci_low": low, "ci_high": high}


ROWS = {
    "three far apart": [
        row("untuned TVM", charts.BASELINE, 0.396, 0.392, 0.401),
        row("tuned TVM", charts.OURS, 0.0098, 0.0096, 0.0101),
        row("ONNX Runtime", charts.RIVAL, 0.0046, 0.0045, 0.0050),
    ],
    "two close": [
        row("untuned TVM", charts.BASELINE, 0.0396, 0.037, 0.0421),
        row("tuned TVM", charts.OURS, 0.0390, 0.0381, 0.0399),
    ],
    "one": [row("tuned TVM", charts.OURS, 3.2e-5, 3.2e-5, 3.2e-5)],
    "seconds and a wide interval": [
        row("untuned TVM", charts.BASELINE, 5.41, 1.0, 30.0),
        row("a board with a rather long name", charts.OURS, 5.40, 5.3, 5.5),
    ],
    "a million times apart": [
        row("slow", charts.BASELINE, 12.0, 11.0, 13.0),
        row("fast", charts.OURS, 1e-5, 0.9e-5, 1.1e-5),
    ],
}


def draw_latency(
    path: pathlib.Path, name: str, title: str = "t", subtitle: str = "2 threads, 60 runs", simulated: bool = False
) -> None:
    """Write the chart of some rows."""
    chart = campaign_charts.plan_latency(path.stem, ROWS[name], title, subtitle, simulated=simulated)
    assert (path.parent / drawing.save(chart, path.parent).file) == path


def pixels(path: pathlib.Path) -> np.ndarray:
    """The picture as an array of bytes (height, width, 3)."""
    return np.asarray(Image.open(path).convert("RGB"))


def assert_whole(path: pathlib.Path) -> None:
    """Nothing touches the picture's edge, so nothing is cut off; and something is drawn."""
    image = pixels(path)
    assert image.shape[1] == round(drawing.WIDTH_INCHES * drawing.DPI)
    for edge in (image[:3], image[-3:], image[:, :3], image[:, -3:]):
        assert (edge == 255).all(), path
    assert (image < 128).mean() > 0.003


# The mark at the top takes room from the title alone.
@pytest.mark.parametrize(("name", "simulated"), [*((name, True) for name in ROWS), ("three far apart", False)])
def test_latency_chart_is_whole(tmp_path: pathlib.Path, name: str, simulated: bool) -> None:
    """Bars, values and labels fit for near, far, tiny and huge figures."""
    draw_latency(tmp_path / "latency.png", name, "squeezenet1.1 on local/worker", simulated=simulated)
    assert_whole(tmp_path / "latency.png")


@pytest.mark.parametrize("name", POINTS)
def test_progress_chart_is_whole(tmp_path: pathlib.Path, name: str) -> None:
    """Steps and line labels fit, with references near each other, and with none."""
    references = [("ONNX Runtime", charts.RIVAL, 0.0046), ("untuned", charts.BASELINE, 0.0047)]
    for lines in (references, []) if name == "one" else (references,):
        chart = campaign_charts.plan_progress("progress", POINTS[name], 0, lines, "squeezenet1.1", simulated=False)
        drawing.save(chart, tmp_path)
        assert_whole(tmp_path / "progress.png")


def test_lines_over_trials_end_at_the_last_trial() -> None:
    """Where the last gain came at trial 7 of 12, a campaign's lines and quickstart's end at 12."""
    curve = {"model": "mlp", "board_type": "jetson-nano", "point": "default", "steps": [[3, 2e-3], [7, 1e-3]]}
    for chart in (
        campaign_charts.plan_course([curve], 12, "vision", simulated=True),
        campaign_charts.plan_progress("p", [(3, 2e-3), (7, 1e-3)], 12, [], "m", simulated=False),
    ):
        assert max(next(chart.list_marks()).x) == 12


def test_a_rival_has_the_colour_of_its_verdict() -> None:
    """One that was faster, though not by enough to replace what was tried first, is not drawn as slower."""
    for verdict, (colour, label) in campaign_charts.VERDICTS.items():
        rival = {"candidate": "c", "ratio": 0.96, "low": 0.95, "high": 0.97, "rounds": 4, "verdict": verdict}
        winner = {"name": "conv2d", "board_type": "nano", "point": "default", "evidence": {"rivals": [rival]}}
        (marks,) = campaign_charts.plan_winners([winner], "vision", simulated=True).list_marks()
        assert (marks.colour, marks.name, marks.x) == (colour, label, (0.96,))
    assert len({colour for colour, _ in campaign_charts.VERDICTS.values()}) == len(campaign_charts.VERDICTS)


def test_long_and_foreign_texts_are_cut_not_lost(tmp_path: pathlib.Path) -> None:
    """A title longer than the picture ends in an ellipsis inside it; names are no formulas."""
    title = "a model with a $ long \x1b name$ " * 9
    draw_latency(tmp_path / "latency.png", "two close", title, "many words " * 40, True)
    assert_whole(tmp_path / "latency.png")


def test_simulated_is_written_in_red(tmp_path: pathlib.Path) -> None:
    """A chart of simulated figures differs from a real one where everybody sees it: red at the top right."""
    reds = []
    for simulated in (False, True):
        draw_latency(path := tmp_path / f"{simulated}.png", "two close", simulated=simulated)
        corner = pixels(path)[:120, 1000:].astype(int)
        reds.append(int(((corner[..., 0] > 150) & (corner[..., 1] < 90)).sum()))
    assert reds[0] == 0
    assert reds[1] > 500


def test_same_figures_same_file(tmp_path: pathlib.Path) -> None:
    """The file depends on the figures alone, so that reports can be compared."""
    for name in ("a.png", "b.png"):
        draw_latency(tmp_path / name, "two close")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("seed", range(2))
def test_names_never_cover_each_other(seed: int) -> None:
    """However close points lie: the bold name always stands, others only where there is room."""
    rng = random.Random(seed)
    x, y = (tuple(rng.gauss(0.5, 0.1) for _ in range(40)) for _ in "xy")
    names = tuple(PointName(*place, f"{1000 + i} MHz", bold=not i) for i, place in enumerate(zip(x, y, strict=True)))
    figure = Figure(figsize=(8.4, 4.6))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    panel = Panel(ChartAxis(), ChartAxis(), (Marks(x, y, charts.BLUE, shape="o"),), names=names)
    texts = drawing.write_names(axes, panel)
    assert "1000 MHz" in [text.get_text() for text in texts]
    boxes = [text.get_window_extent() for text in texts]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_a_chart_of_a_page_has_plain_texts() -> None:
    """A page finds and reads the texts of its charts, whose headline it has itself."""
    chart = Chart(
        "c", "A chart", "headline", "", (Panel(ChartAxis("trials"), ChartAxis("ms"), ()),), 2.0, simulated=True
    )
    svg = drawing.write_page_svg(chart)
    assert ">trials<" in svg
    assert "headline" not in svg
