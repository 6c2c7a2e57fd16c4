"""The live view: what it says, and that it fits the terminal that it is drawn on."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from farm.report.progress import Progress, WorkloadProgress, draw, summary_line

NAME = "depthwise_conv2d_add_relu 3x3/2 112x112x64>64"


def progress(workloads: int = 3, **fields: object) -> Progress:
    """A run in the middle of its budget."""
    lines = tuple(
        WorkloadProgress(i, f"{NAME} #{i}", 1.5e8, 2, 0.001 if i else None, 4 * i, i == 1) for i in range(workloads)
    )
    values: dict[str, object] = {
        "workloads": lines,
        "trials": 30,
        "budget": 120,
        "latency_s": 0.0123,
        "boards": 1,
        "boards_busy": 1,
        "faults": {"candidate_faults": 2, "board_faults": 0, "farm_faults": 1},
        "elapsed_s": 60.0,
        "phase": "measuring",
    }
    return Progress(**(values | fields))  # type: ignore[arg-type]


def render(progress: Progress, width: int, height: int | None = None, terminal: bool = True) -> list[str]:
    """What a console of this size shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None)
    console.print(draw(progress, height, width if terminal else None))
    return file.getvalue().rstrip("\n").split("\n")


def test_the_table_has_the_known_columns() -> None:
    """FLOP in full, GFLOPS, latency and weighted latency in microseconds, trials, and a mark where all is done."""
    lines = render(progress(), 200, terminal=False)
    titles = " ".join(lines[:3])
    for title in ("ID", "Name", "FLOP", "Weight", "(GFLOPS)", "Latency", "Weighted", "Trials", "Done"):
        assert title in titles
    assert lines[5].split()[-7:] == ["150,000,000", "2", "150.00", "1,000.0", "2,000.0", "4", "Y"]


def test_what_is_unknown_is_a_dash() -> None:
    """A workload without a good trial has no speed and no latency, rather than zero."""
    lines = render(progress(), 200, terminal=False)
    assert lines[4].split()[-6:] == ["150,000,000", "2", "–", "–", "–", "0"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (60, 20), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    """No line is wider, none is folded, and with many workloads the table is no higher than the terminal."""
    lines = render(progress(workloads=100), width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("trials "))]
    rows = [line for line in table if line.split()[0].isdecimal()]
    assert [row.split()[0] for row in rows] == [str(i) for i in range(len(rows))]
    [rest] = [line for line in table if line.lstrip().startswith("…")]
    assert f" {100 - len(rows)} li" in rest


def test_a_narrow_terminal_keeps_the_names() -> None:
    """At 80 columns the columns that say least go, and more than half of a long name stays."""
    lines = render(progress(), 80, 24)
    assert "FLOP " not in " ".join(lines[:3])
    assert NAME[:25] in lines[5]


def test_names_are_not_markup() -> None:
    """Brackets in a name are shown as they are."""
    line = WorkloadProgress(0, "[red]x[/]", 1.0, 1, None, 0, False)
    assert "[red]x[/]" in "\n".join(render(dataclasses.replace(progress(), workloads=(line,)), 120))


def test_the_summary_says_how_far_and_how_long() -> None:
    """Trials, pace, faults by side, and the time left at the pace so far."""
    text = summary_line(progress())
    for part in ("trials 30/120", "12.30 ms", "boards busy 1/1", "30 trials/min", "candidate 2, farm 1", "ETA 3:00"):
        assert part in text
    assert "board 0" not in text


def test_before_the_first_trial_there_is_no_pace() -> None:
    """Nothing is divided by zero, and no time is promised."""
    fresh = progress(trials=0, elapsed_s=0.0, latency_s=None, faults={})
    assert fresh.eta_s is None
    assert fresh.trials_per_minute == 0
    assert "ETA" not in summary_line(fresh)
    assert "faults: none" in summary_line(fresh)
    assert progress(trials=130).eta_s == 0
