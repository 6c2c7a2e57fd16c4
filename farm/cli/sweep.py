"""`farm sweep`: measure a model over the clocks of a board, and choose the setting to ship."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder, on_board
from farm.cli import options, output, sweep_report, tables
from farm.cli.options import Aim, Deadline, MaxPower, Period, read_duration_s, read_goal
from farm.cli.sweep_report import Sweep
from farm.errors import UsageError
from farm.points import values
from farm.processes import machine
from farm.programs.order import ProgramOrder
from farm.report import sweep_page
from farm.store import Store
from farm.sweep import stored
from farm.sweep.export import document as export_document
from farm.sweep.plan import order as plan_order
from farm.sweep.run import programs, runner
from farm.units import format_minute

app = typer.Typer(help="Sweeps: latency, power and energy of a model over a board's clocks.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the report.")]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `farm sweep run` is asked for: the board, the points, the code or program, and the goal."""

    program: Annotated[
        str, typer.Option("--program", metavar="COMMAND", help="Program to sweep instead of a model.")
    ] = ""
    metric: options.Metrics = None
    file: options.Files = None
    begin: options.From = ""
    end: options.Until = ""
    in_shell: options.Shell = False
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="NAME=1,2", help="Settings of {NAME} in --program; repeatable."),
    ] = None
    at_least: Annotated[
        list[str] | None, typer.Option("--at-least", metavar="'NAME=10 UNIT'", help="Limit on a metric; repeatable.")
    ] = None
    at_most: Annotated[
        list[str] | None, typer.Option("--at-most", metavar="'NAME=10 UNIT'", help="Limit on a metric; repeatable.")
    ] = None

    board: Annotated[
        str | None,
        typer.Option(
            "--board",
            metavar="NAME",
            help="Name of a board; local: this machine.",
            autocompletion=options.complete_board,
        ),
    ] = None
    board_type: Annotated[
        str | None,
        typer.Option("--board-type", metavar="TYPE", help="Board type; points are spread over its free boards."),
    ] = None
    boards: Annotated[
        int | None, typer.Option("--boards", metavar="N", help="Largest number of boards of the type.")
    ] = None
    cpu_freqs: Annotated[
        list[str] | None,
        typer.Option(
            "--cpu-freqs", metavar="all|600,921.6MHz", help="CPU clocks, or CLUSTER=LIST; repeatable. Default: all."
        ),
    ] = None
    cores: Annotated[str, typer.Option("--cores", metavar="0-3/0,1", help="Sets of cores to be online.")] = ""
    gpu_freqs: Annotated[str, typer.Option("--gpu-freqs", metavar="all|LIST", help="GPU clocks.")] = ""
    mem_freqs: Annotated[
        str, typer.Option("--mem-freqs", metavar="all|none|LIST", help="Memory clocks. Default on a GPU: all.")
    ] = ""
    power_modes: Annotated[str, typer.Option("--power-modes", metavar="all|LIST", help="Power modes.")] = ""
    variants: Annotated[
        str,
        typer.Option(
            "--variants",
            metavar="compiled|untuned|tuned,…",
            help="Code to sweep. compiled: what `farm model compile` makes now; untuned: TVM's own; tuned: compiled, "
            "refused without a record.",
        ),
    ] = "compiled"
    batch: Annotated[str, typer.Option("--batch", metavar="1,4", help="Batch sizes.")] = "1"
    shape: options.Shapes = None
    deadline: Deadline = ""
    max_power: MaxPower = ""
    objective: Aim = ""
    period: Period = ""
    device: options.Device = "cpu"
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every point.")] = False
    budget_points: Annotated[
        int | None, typer.Option("--budget-points", metavar="N", help="Largest number of points to measure.")
    ] = None
    window: Annotated[
        str, typer.Option("--window", metavar="5s", help="Time for which a point is measured; sensors may need longer.")
    ] = "5s"

    def require_board(self) -> None:
        """Raise UsageError without a board to sweep on."""
        if self.board is None and self.board_type is None:
            raise UsageError("say which board to sweep on", "--board NAME, --board-type TYPE, or --board local.")
        if self.boards is not None and self.boards < 1:
            raise UsageError(f"--boards must be at least 1, not {self.boards}")

    def read_goal(self) -> tuple[values.Goal, bool]:
        """Return the goal, and whether the user named an objective. Raises UsageError."""
        goal = read_goal(values.Goal(), self.deadline, self.max_power, self.objective, self.period)
        if program := self.find_program():
            limits, latest_s = program.read_limits()
            deadline_s = min((each for each in (goal.deadline_s, latest_s) if each), default=None)
            metric = program.read_metrics()[0]
            goal = dataclasses.replace(goal, deadline_s=deadline_s, metric=metric, limits=tuple(limits))
        return goal, bool(self.objective or self.period)

    def find_program(self) -> ProgramOrder | None:
        """Return the program; None for a model. Raises UsageError."""
        lists = [tuple(map(str, e or ())) for e in (self.file, self.metric, self.vary, self.at_least, self.at_most)]
        if not self.program and any((*lists, self.begin, self.end, self.in_shell)):
            raise UsageError("--metric, --file, --from, --until, --shell, --vary and limits on metrics need --program")
        files, *others = lists
        texts = (self.in_shell, self.begin, self.end)
        return ProgramOrder(self.program, files, *texts, *others) if self.program else None

    def read_order(self, model: str) -> plan_order.SweepOrder:
        """Return the order. Raises UsageError."""
        program = self.find_program()
        if bool(model) is bool(program):
            raise UsageError(
                "which model?" if not model else "a sweep is of a model or of a program",
                "Say: farm sweep run MODEL --board NAME, or --program COMMAND instead of MODEL; or --resume ID.",
            )
        if program and (self.shape or self.batch != "1" or self.variants != programs.COMPILED):
            raise UsageError("--shape, --batch and --variants are for models", "--vary has settings of a program.")
        return plan_order.SweepOrder(
            program.name if program else model,
            tuple(self.shape or ()),
            tuple(program.list_settings()) if program else programs.read_variants(self.variants),
            programs.read_batches(self.batch),
            tuple(self.cpu_freqs or ()),
            self.cores,
            self.gpu_freqs,
            self.mem_freqs,
            self.power_modes,
            read_duration_s("--window", self.window, "500ms, 5s"),
            exhaustive=self.exhaustive,
            budget_points=self.budget_points,
            device=self.device,
            program=program,
        )


@app.command("run")
@output.command
@options.spread("asked", Asked)
def run(
    asked: Asked,
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="An ONNX or TFLite file, or a name of the zoo.")] = "",
    wait: Annotated[str, typer.Option("--wait", metavar="10m", help="Longest wait for a board.")] = "60s",
    out: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which points and visits, and how long; takes no board.")
    ] = False,
    resume: Annotated[
        int | None, typer.Option("--resume", metavar="ID", help="Go on with an interrupted sweep instead.")
    ] = None,
) -> output.Document:
    """Measure a model or a program over a board's clocks. Says which setting to ship; exit code 1 where none can be."""
    if out is not None:
        artifact_folder.require_room(out)
    if resume is not None:
        yield from _resume(resume, out)
        return
    order = asked.read_order(model)
    goal, named = asked.read_goal()
    asked.require_board()
    if dry_run:
        yield from _preview(order, asked, goal, named)
        return
    wait_s = read_duration_s("--wait", wait)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        kind, name = on_board.choose_board(store, asked.board_type, asked.board)
        where = plan_order.SweepPlace(kind.name, name, asked.boards, wait_s)
        sweep = runner.run_sweep(order, where, goal, named, settings, store, output.note)
        yield from _finish(store, sweep, out)


def _resume(sweep: int, out: Path | None) -> output.Document:
    """Go on with a sweep from the visits that it holds."""
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        runner.resume_sweep(sweep, settings, store, output.note)
        yield from _finish(store, sweep, out)


def _preview(order: plan_order.SweepOrder, asked: Asked, goal: values.Goal, named: bool) -> output.Document:
    with options.open_store_to_show() as store:
        kind, name = on_board.choose_board(store, asked.board_type, asked.board)
        found = runner.preview_sweep(order, plan_order.SweepPlace(kind.name, name, asked.boards), goal, named, store)
    yield found.to_dict(order)
    for line in plan_order.describe(found, order):
        output.say(line)


@app.command("list")
@output.command
def list_sweeps() -> output.Document:
    """List the sweeps in the store, the newest first."""
    with options.open_store_to_show() as store:
        rows = store.session.read_each("the sweep", store.sweeps.fetch(), stored.summarise)
    yield rows
    tables.print_table(
        ("Sweep", "Model", "Board type", "Series", "Points", "Visits", "State", "Started"),
        [
            (
                row.sweep,
                row.model,
                row.board_type + (" (simulated)" if row.simulated else ""),
                ", ".join(row.series),
                row.points,
                row.visits,
                row.state,
                format_minute(row.started_at),
            )
            for row in rows
        ],
        spare=("Visits", "Series", "Started"),
        left=(1, 2, 3, 6, 7),
        empty="no sweeps yet; `farm sweep run MODEL --board NAME` makes one",
    )


@app.command("show")
@output.command
def show(
    sweep: Sweep,
    other: Annotated[int | None, typer.Argument(metavar="[OTHER]", help="Number of a sweep to compare with.")] = None,
    out: Out = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Compare even a simulated with a real one.")] = False,
) -> output.Document:
    """Show what a sweep measured, and its pick. With OTHER: compare two, at the points that both measured.

    --out writes a report: a page with pictures and tables, CSV and JSON.
    """
    if other is not None:
        yield from sweep_report.compare(sweep, other, mixed)
        return
    with options.open_store_to_show() as store:
        document = export_document.make_document(store, sweep)
    if out is not None:
        document["report"] = sweep_page.write_sweep_report(document, out)
    yield document
    sweep_report.print_sweep(document)
    if out is not None:
        print(document["report"]["page"])


@app.command("pick")
@output.command
def pick(
    sweep: Sweep,
    deadline: Deadline = "",
    max_power: MaxPower = "",
    objective: Aim = "",
    period: Period = "",
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant", metavar="NAME|xN|NAMExN", help="Variant and batch size, as `tuned x4`; default: all."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure first what is predicted to be better; needs the board.")
    ] = False,
) -> output.Document:
    """Choose the setting to ship, among the points that were measured.

    Exit code 1, and the old pick stays, where none keeps the limits.

    What is asked for here is what `show`, `report` and `export` answer from then on.
    """
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        machine.close_abandoned_sweeps(store)
        before = stored.goal_from_dict(store.sweeps.require(sweep).goal)
        goal = read_goal(before, deadline, max_power, objective, period)
        if measure:
            runner.resume_sweep(sweep, settings, store, output.note, goal)

        document = export_document.make_document(store, sweep, goal)
        chosen = export_document.find_series(document, variant)
    picks = [
        {key: each[key] for key in ("variant", "batch", "pick", "no_pick", "unmeasured", "drift")} for each in chosen
    ]
    if error := export_document.find_failure(document | {"series": chosen}, every=True):
        error.hint = "The pick stays as it was. --variant says which series are meant."
    else:
        with options.open_store(settings) as store:
            store.sweeps.keep_goal(sweep, stored.goal_to_dict(goal))
    about = {key: document[key] for key in ("sweep", "model", "board", "goal")}
    yield output.Failed({**about, "picks": picks}, error)
    sweep_report.print_picks(document, chosen)


def _finish(store: Store, sweep: int, out: Path | None) -> output.Document:
    """Yield a sweep that has just ended; it failed where it was voided, or has no pick."""
    document = export_document.make_document(store, sweep)
    if out is not None:
        document["report"] = sweep_page.write_sweep_report(document, out)
    yield output.Failed(document, export_document.find_failure(document))
    sweep_report.print_sweep(document)


app.command("export")(sweep_report.export)
