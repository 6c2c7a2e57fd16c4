"""The last step of quickstart: the model, untuned and tuned, over the CPU clocks of a virtual board; which one to ship.

What is swept is the board's own code, scheduled by prediction; where virtual boards run this machine's code, what was
just timed on it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm import emulation
from farm.artifacts import compile
from farm.campaign.tune import TuneListener
from farm.errors import FarmError
from farm.inventory.board_types import BoardType, require_board_type
from farm.models.source import ModelSource
from farm.points.values import Goal
from farm.report.sweep_page import write_sweep_report
from farm.settings import Settings
from farm.store import Store
from farm.sweep.export.document import make_document
from farm.sweep.plan.order import SweepOrder, SweepPlace
from farm.sweep.run import runner
from farm.sweep.run.programs import COMPILED, UNTUNED, Arrays, SweepProgram
from farm.values import Virtual

BOARD, BOARD_TYPE = "quickstart-nano", "jetson-nano"
# A few of the Nano's fifteen clocks, spread over its upper half: untuned code takes seconds there, and below it more.
_CPU_FREQS = "710.4,921.6,1224,1479"
_WINDOW_S = 2.0
# For the virtual board to start and pass its first probe.
_WAIT_S = 120.0
# Every visit runs the program here once, the first ones a few times. Above this the step would take longer than all
# others.
SLOWEST_S = 0.6


def find_own_type() -> BoardType | None:
    """The board's type where it runs its own code; None where it runs this machine's."""
    kind = require_board_type(BOARD_TYPE)
    return kind if emulation.runs_own_code(kind) else None


def sweep_virtual_board(
    source: ModelSource,
    inputs: Arrays,
    compiled: Mapping[str, compile.Compiled],
    settings: Settings,
    store: Store,
    listener: TuneListener,
    folder: Path,
) -> dict[str, Any]:
    """Sweep, and write the page into `folder`; returns what the quickstart's document says of it. Raises FarmError.

    `compiled` has `untuned`, `compiled` or both, `inputs` the arrays in call order. The board is the store's for so
    long only.
    """
    began = time.monotonic()
    made = [SweepProgram(name, 1, each.library, inputs, _describe(each)) for name, each in compiled.items()]
    order = SweepOrder(
        source.origin.removeprefix(runner.ZOO),
        variants=tuple(compiled),
        cpu_freqs=(_CPU_FREQS,),
        window_s=_WINDOW_S,
        exhaustive=True,
    )
    where = SweepPlace(BOARD_TYPE, BOARD, None, _WAIT_S)
    with _registered(store):
        number = runner.run_sweep(order, where, Goal(), False, settings, store, listener.note, made)
    document = make_document(store, number)
    paths = write_sweep_report(document, folder)
    return {
        "sweep": number,
        "board": document["board"],
        "state": document["state"],
        "seconds": time.monotonic() - began,
        "series": [
            {
                "variant": each["variant"],
                "about": _describe(compiled[each["variant"]]),
                "front": each["front"],
                "pick": each["pick"],
                "rows": _shorten(each["rows"]),
            }
            for each in document["series"]
        ],
        "report": paths,
    }


def list_commands(source: ModelSource, shapes: Sequence[str]) -> list[str]:
    """What a user types to have the whole sweep."""
    options = ["--variants", f"{UNTUNED},{COMPILED}", "--cpu-freqs", _CPU_FREQS, "--exhaustive", "--out", "sweep"]
    options += [word for shape in shapes for word in ("--shape", shape)]
    model = source.origin.removeprefix(runner.ZOO)
    return [
        f"farm board add {BOARD} --virtual {BOARD_TYPE}",
        shlex.join(["farm", "sweep", "run", model, "--board", BOARD, *options]),
    ]


@contextlib.contextmanager
def _registered(store: Store) -> Any:
    """A virtual board of that name; one that was there already stays."""
    if any(row["name"] == BOARD for row in store.fetch_boards()):
        yield
        return
    store.register_board(BOARD, BOARD_TYPE, Virtual(0), {"made-by": "quickstart"}, by="quickstart")
    try:
        yield
    finally:
        # Somebody may have taken it meanwhile, since it can be seen; then it is theirs to remove.
        with contextlib.suppress(FarmError):
            store.remove_board(BOARD, by="quickstart")


def _describe(compiled: compile.Compiled) -> str:
    made = f"{compiled.applied} of {compiled.workloads} functions from records"
    if not compiled.applied:
        made = "every function scheduled by prediction, no trial" if compiled.by_rule else "TVM's default schedules"
    return f"graph pipeline {compiled.pipeline}, {made}"


def _shorten(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = ("key", "measured", "latency_s", "power_w", "energy_j", "on_front")
    return [{name: row[name] for name in names} for row in rows]
