"""Charts: written, of one width, deterministic, and nothing runs out of the picture."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from farm.report import campaign_page, canvas
from farm.report.canvas import LatencyRow, ProgressPoint, Reference

ROWS = {
    "three far apart": [
        LatencyRow("untuned TVM", 0.396, canvas.BASELINE, 0.392, 0.401),
        LatencyRow("tuned TVM", 0.0098, canvas.OURS, 0.0096, 0.0101, "40.4× faster than untuned"),
        LatencyRow("ONNX Runtime", 0.0046, canvas.RIVAL, 0.0045, 0.0050, "tuned takes 2.13× as long"),
    ],
    "two close": [
        LatencyRow("untuned TVM", 0.0396, canvas.BASELINE, 0.037, 0.0421),
        LatencyRow("tuned TVM", 0.0390, canvas.OURS, 0.0381, 0.0399, "1.02× faster than untuned"),
    ],
    "one without interval": [LatencyRow("tuned TVM", 3.2e-5, canvas.OURS)],
    "seconds and a wide interval": [
        LatencyRow("untuned TVM", 5.41, canvas.BASELINE, 1.0, 30.0, "a remark of some length beside it"),
        LatencyRow("a board with a rather long name", 5.40, canvas.OURS, 5.3, 5.5),
    ],
    "a million times apart": [
        LatencyRow("slow", 12.0, canvas.BASELINE, 11.0, 13.0, "remark"),
        LatencyRow("fast", 1e-5, canvas.OURS, 0.9e-5, 1.1e-5, "remark"),
    ],
}
POINTS = {
    "falling": [ProgressPoint(n, 0.4 / n) for n in range(1, 129)],
    "one": [ProgressPoint(8, 0.0005)],
    "flat": [ProgressPoint(n, 0.01) for n in (4, 8, 12)],
}


def pixels(path: pathlib.Path) -> np.ndarray:
    """The picture as an array of bytes (height, width, 3)."""
    return np.asarray(Image.open(path).convert("RGB"))


def assert_whole(path: pathlib.Path) -> None:
    """Nothing touches the picture's edge, so nothing is cut off; and something is drawn."""
    image = pixels(path)
    assert image.shape[1] == round(canvas.WIDTH_INCHES * canvas.DPI)
    for edge in (image[:3], image[-3:], image[:, :3], image[:, -3:]):
        assert (edge == 255).all()
    assert (image < 128).mean() > 0.005


# The mark at the top takes room from the title alone.
@pytest.mark.parametrize(("name", "simulated"), [*((name, True) for name in ROWS), ("three far apart", False)])
def test_latency_chart_is_whole(tmp_path: pathlib.Path, name: str, simulated: bool) -> None:
    """Bars, values, remarks and labels fit for near, far, tiny and huge figures."""
    path = tmp_path / "latency.png"
    canvas.plot_latency(path, ROWS[name], "squeezenet1.1 on local/worker", "2 threads, 60 runs", simulated=simulated)
    assert_whole(path)


@pytest.mark.parametrize("name", POINTS)
def test_progress_chart_is_whole(tmp_path: pathlib.Path, name: str) -> None:
    """Steps and line labels fit, with references near each other, and with none."""
    path = tmp_path / "progress.png"
    references = [Reference("ONNX Runtime", 0.0046, canvas.RIVAL), Reference("untuned", 0.0047, canvas.BASELINE)]
    for lines in (references, []) if name == "one" else (references,):
        canvas.plot_progress(path, POINTS[name], "squeezenet1.1", "best so far", references=lines)
        assert_whole(path)


def test_lines_over_trials_end_at_the_last_trial(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last gain came at trial 7 of 12, a campaign's lines and quickstart's end at 12."""
    figures: list[Figure] = []
    for name in ("finish", "save"):
        real = getattr(canvas, name)

        def keep(figure: Figure, *rest: Any, real: Any = real) -> Any:
            figures.append(figure)
            return real(figure, *rest)

        monkeypatch.setattr(canvas, name, keep)
    curve = {"model": "mlp", "board_type": "jetson-nano", "point": "default", "steps": [[3, 2e-3], [7, 1e-3]]}
    campaign_page.plot_course(tmp_path, [curve], 12, "vision", simulated=True)
    canvas.plot_progress(tmp_path / "p.png", [ProgressPoint(3, 2e-3), ProgressPoint(7, 1e-3)], "m", "s", trials=12)
    assert len({id(figure) for figure in figures}) == 2
    for figure in figures:
        assert max(x for x in figure.axes[0].lines[0].get_xdata()) == 12


def test_long_texts_are_cut_not_lost(tmp_path: pathlib.Path) -> None:
    """A title longer than the picture ends in an ellipsis inside it."""
    path = tmp_path / "latency.png"
    canvas.plot_latency(path, ROWS["two close"], "a model with a long name " * 9, "many words " * 40, simulated=True)
    assert_whole(path)


def test_simulated_is_written_in_red(tmp_path: pathlib.Path) -> None:
    """A chart of simulated figures differs from a real one where everybody sees it: red at the top right."""
    reds = []
    for simulated in (False, True):
        path = tmp_path / f"{simulated}.png"
        canvas.plot_latency(path, ROWS["two close"], "t", "s", simulated=simulated)
        corner = pixels(path)[:120, 1000:].astype(int)
        reds.append(int(((corner[..., 0] > 150) & (corner[..., 1] < 90)).sum()))
    assert reds[0] == 0
    assert reds[1] > 500


def test_same_figures_same_file(tmp_path: pathlib.Path) -> None:
    """The file depends on the figures alone, so that reports can be compared."""
    for name in ("a.png", "b.png"):
        canvas.plot_latency(tmp_path / name, ROWS["two close"], "t", "s")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
