"""Names beside points: none covers another, none may be taken for a neighbour's."""

from __future__ import annotations

import random

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from farm.report.sweep_canvas import Label, write_labels


@pytest.mark.parametrize("seed", range(2))
def test_names_never_cover_each_other(seed: int) -> None:
    """However close points lie: the first name always stands, others only where there is room."""
    rng = random.Random(seed)
    places = [(rng.gauss(0.5, 0.1), rng.gauss(0.5, 0.1)) for _ in range(40)]
    figure = Figure(figsize=(8.4, 4.6))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    labels = [Label(place, f"{1000 + i} MHz", "#222222", 1 if i == 0 else 3) for i, place in enumerate(places)]
    written = write_labels(axes, labels, places, rings=places[:1])
    texts = [child for child in axes.get_children() if isinstance(child, Annotation)]
    assert len(texts) == written
    assert written >= 1
    assert "1000 MHz" in [text.get_text() for text in texts]
    boxes = [text.get_tightbbox() for text in texts]
    for index, box in enumerate(boxes):
        assert box is not None
        assert not any(other is not None and box.overlaps(other) for other in boxes[:index])
