"""The main job end to end on one machine: tune a model, compile it, check it, time it against others, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm import emulation
from farm.artifacts import compile
from farm.artifacts.contenders import PREDICTED, RIVALS
from farm.artifacts.make import find_target, to_config
from farm.artifacts.timing import ordered
from farm.campaign import submit
from farm.campaign.plan_models import to_variant
from farm.campaign.tune import Tuned, TuneListener, tune
from farm.connectivity.services import using_services
from farm.errors import FarmError, PermanentError
from farm.inventory.board_types import BoardType, require_board_type
from farm.models.inputs import InputSpec, make_inputs
from farm.models.source import ModelSource
from farm.points.values import Goal
from farm.processes.jobs import JobProcess, take_compiled
from farm.quickstart.document import make_document
from farm.report import campaign_charts, charts, drawing, model_pages, quickstart_page
from farm.report.sweep_page import write_sweep_report
from farm.selection.decision import Records
from farm.settings import Settings
from farm.store import Store
from farm.sweep.export import document as sweep_document
from farm.sweep.plan.order import SweepOrder, SweepPlace
from farm.sweep.run import runner
from farm.sweep.run.programs import COMPILED, UNTUNED, Arrays, SweepProgram
from farm.values import DEFAULT_POINT, Virtual

BOARD, BOARD_TYPE = "quickstart-nano", "jetson-nano"
# A few of the Nano's fifteen clocks, in its upper half: untuned code takes seconds there, and more below.
_CPU_FREQS = "710.4,921.6,1224,1479"
_WINDOW_S = 2.0
# For the virtual board to start and pass its first probe.
_WAIT_S = 120.0
# Every visit runs the program here once, the first ones a few times. Above this the step would take longer than all
# others.
SLOWEST_S = 0.6


def sweep_virtual_board(
    source: ModelSource,
    inputs: Arrays,
    compiled: Mapping[str, compile.Compiled],
    settings: Settings,
    store: Store,
    listener: TuneListener,
    folder: Path,
) -> dict[str, Any]:
    """Sweep, and write the page into `folder`; return its part of the quickstart's document. Raises FarmError.

    `compiled` has `untuned`, `compiled` or both, `inputs` the arrays in call order. The board is registered.
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
    number = runner.run_sweep(order, where, Goal(), False, settings, store, listener.note, made)
    document = sweep_document.make_document(store, number)
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
    """List the commands for the whole sweep."""
    options = ["--variants", f"{UNTUNED},{COMPILED}", "--cpu-freqs", _CPU_FREQS, "--exhaustive", "--out", "sweep"]
    options += [word for shape in shapes for word in ("--shape", shape)]
    model = source.origin.removeprefix(runner.ZOO)
    return [
        f"farm board add {BOARD} --virtual {BOARD_TYPE}",
        shlex.join(["farm", "sweep", "run", model, "--board", BOARD, *options]),
    ]


@contextlib.contextmanager
def _registered(store: Store) -> Any:
    """Register a virtual board for the block; an existing one of that name stays."""
    if any(row.name == BOARD for row in store.boards.fetch()):
        yield
        return
    store.boards.register(BOARD, BOARD_TYPE, Virtual(0), {"made-by": "quickstart"}, by="quickstart")
    try:
        yield
    finally:
        # Another client may have taken it meanwhile; then it stays.
        with contextlib.suppress(FarmError):
            store.boards.remove(BOARD, by="quickstart")


def _describe(compiled: compile.Compiled) -> str:
    made = f"{compiled.applied} of {compiled.workloads} functions from records"
    if not compiled.applied:
        made = "every function scheduled by prediction, no trial" if compiled.by_rule else "TVM's default schedules"
    return f"graph pipeline {compiled.pipeline}, {made}"


def _shorten(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = ("key", "measured", "latency_s", "power_w", "energy_j", "on_front")
    return [{name: row[name] for name in names} for row in rows]


@dataclasses.dataclass(frozen=True)
class QuickstartRequest:
    """The user's request. `since` is when the command began (monotonic seconds).

    `wait_s` limits the wait for another farm on this machine.
    """

    source: ModelSource
    inputs: tuple[InputSpec, ...]
    trials: int
    out: Path
    fresh: bool
    since: float
    sweep: bool = True
    wait_s: float = 0.0


def run(
    request: QuickstartRequest, settings: Settings, store: Store, board_type: BoardType, listener: TuneListener
) -> dict[str, Any]:
    """Run all steps; return the document that `--json` prints, after writing it and the report into `request.out`."""
    source = request.source
    listener.note("starting the local farm: tracker, agent, Ray")
    order = submit.OneModelRequest(
        "quickstart", to_variant(source, request.inputs), board_type, request.trials, fresh=request.fresh,
        wait_s=request.wait_s, rivals=RIVALS, since=request.since,
    )  # fmt: skip
    tuned = tune(order, settings, store, listener)
    target, workloads = tuned.target, tuned.workloads
    final = tuned.final or {}
    if not final.get("taken"):
        raise PermanentError(f"{source.name} is {final.get('said') or 'nothing that can be tuned'}")
    kind = board_type.name
    records = store.records.fetch(workloads=[w.hash for w in workloads], board_type=kind, operating_point=DEFAULT_POINT)
    decided = store.decisions.fetch(model_sha256=source.sha256, board_type=kind, simulated=False)
    book = Records(records, decisions=decided)
    shapes = {spec.name: spec.static_shape for spec in request.inputs}
    main = functools.partial(_compile, source, shapes, target, workloads[0].pipeline, book, board_type)
    others: dict[str, Callable[[], Any]] = {}
    if request.sweep:
        others[UNTUNED] = functools.partial(_compile_swept, source, shapes, (target, board_type))
        others[COMPILED] = functools.partial(_compile_swept, source, shapes, None)
    for name in find_slow(final):
        others.pop(name, None)
    # The virtual board and its agent start while the model is compiled, on two cores.
    with JobProcess() as first, JobProcess() as second, contextlib.ExitStack() as held:
        job, other_jobs = first.give(main), {name: second.give(job) for name, job in others.items()}
        if others:
            emulation.take_kept(settings.home_path)
            held.enter_context(_registered(store))
            with contextlib.suppress(FarmError):  # the sweep says what is missing
                held.enter_context(using_services(settings, [BOARD], listener.note))
        listener.note("compiling the model as it was fastest")
        compiled = take_compiled(job, source.name, say=listener.note)
        to_sweep = {}
        for name, other in other_jobs.items():
            listener.note(f"compiling {name} code for a virtual {BOARD_TYPE}")
            to_sweep[name] = take_compiled(other, source.name, say=listener.note) or compiled
        swept, left_out = _sweep(request, settings, store, listener, to_sweep, final)
    notes = [f"{name}: {reason}" for name, reason in final["missing"].items()]
    about = (source.name, request.since, request.out, settings.isolation)
    document = make_document(*about, tuned, final, compiled, records, notes)
    document |= {"sweep": swept, "left_out": left_out}
    _write(request.out, document, tuned, final, compiled)
    return document


def _compile(
    source: ModelSource,
    shapes: Mapping[str, tuple[int, ...]],
    target: Mapping[str, Any],
    pipeline: str,
    book: Records | None,
    board_type: BoardType,
) -> compile.Compiled:
    """Compile the model for a board. Loads TVM's compiler."""
    return compile.compile_model(source.load(), shapes, target, pipeline, book or [], board_type.link_triple)


def _compile_swept(
    source: ModelSource, shapes: Mapping[str, tuple[int, ...]], stock: tuple[Mapping[str, Any], BoardType] | None
) -> compile.Compiled | None:
    """Compile the model for the swept board: with stock TVM for a target, and its board, if that runs this machine's
    code; else with ours, None if the board runs this machine's code.
    """
    kind = require_board_type(BOARD_TYPE)
    own = kind if emulation.runs_own_code(kind) else None
    if own is not None:
        pipeline = own.pipeline if stock is None else compile.UNTUNED_PIPELINE
        return _compile(source, shapes, to_config(find_target(own, True)), pipeline, None, own)
    return None if stock is None else _compile(source, shapes, stock[0], compile.UNTUNED_PIPELINE, None, stock[1])


def _sweep(
    request: QuickstartRequest,
    settings: Settings,
    store: Store,
    listener: TuneListener,
    compiled: Mapping[str, compile.Compiled],
    final: Mapping[str, Any],
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Sweep the variants that are quick enough over the clocks of a virtual board.

    Returns the result with what is left out, why, and the commands that make it. None where no sweep was requested, it
    failed, or nothing is left out.
    """
    if not request.sweep:
        return None, None
    commands = list_commands(request.source, to_variant(request.source, request.inputs).shapes)
    slow = find_slow(final)
    what = "Untuned code was" if compiled else "The model was"
    left_out = {"what": what, "why": "; ".join(slow.values()), "commands": commands} if slow else None
    if not compiled:
        return None, left_out
    named = " and ".join(compiled)
    listener.note(f"sweeping {named} code over the CPU clocks of a virtual {BOARD_TYPE} (simulated)")
    arrays = ordered(make_inputs(request.inputs, settings.seed))
    try:
        swept = sweep_virtual_board(request.source, arrays, compiled, settings, store, listener, request.out / "sweep")
    except FarmError as error:  # the main job is done
        return None, {"what": "The model was", "why": f"the sweep failed: {error.message}", "commands": commands}
    return swept, left_out


def find_slow(final: Mapping[str, Any]) -> dict[str, str]:
    """Return the sweep's variants that do not run or take too long here, by name, and why."""
    slow = {}
    for name, timed in ((UNTUNED, final["variants"].get("untuned")), (COMPILED, final["variants"][final["taken"]])):
        if timed is None:
            slow[name] = f"{name} code does not run"
        elif timed["median"] > SLOWEST_S:
            slow[name] = f"{name} code takes {timed['median']:.1f} s a run on this machine"
    return slow


def _write(
    out: Path, document: dict[str, Any], tuned: Tuned, final: Mapping[str, Any], compiled: compile.Compiled
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    timed = {**final["variants"], "tuned": final["variants"][final["taken"]]}
    (out / "model.so").write_bytes(compiled.library)
    board = document["board"]
    title = f"{document['model']} on {board['type']}/{board['name']}"
    roles = {"untuned": charts.BASELINE, "onnxruntime": charts.RIVAL}
    rows, references = [], []
    ours = document["shipped"] if document["shipped"] == PREDICTED else "tuned"
    for name, label in quickstart_page.list_variants(document):
        if (figures := timed.get(name)) is not None:
            rows.append((label, roles.get(name, charts.OURS), figures))
            if name in (ours, "onnxruntime"):
                references.append((*rows[-1][:2], figures["median"]))
    threads = document["measurement"]["threads"]
    runs = {name: figures["count"] for name, figures in timed.items()}
    fewer = f" (untuned: {runs['untuned']})" if runs.get("untuned", runs["tuned"]) < runs["tuned"] else ""
    subtitle = f"median of {runs['tuned']} runs{fewer} with 95 % confidence interval, {threads} threads"
    simulated = board["simulated"]
    planned = [
        campaign_charts.plan_latency("latency", rows, title, subtitle, simulated=simulated),
        model_pages.plan_runs("runs", rows, f"{title}: runs", f"{runs['tuned']} runs{fewer}", simulated=simulated),
    ]
    if len(tuned.history) >= 2:
        trials = sum(int(task["counted"]) for task in tuned.tasks)
        planned.append(
            campaign_charts.plan_progress("progress", tuned.history, trials, references, title, simulated=simulated)
        )
    else:
        del document["report"]["progress_plot"]
    pictures = [drawing.save(chart, out) for chart in planned]
    files = ["model.so", *(["sweep/sweep.html"] if document["sweep"] else [])]
    quickstart_page.write_report(document, pictures, out, files)
