"""`farm program`: any program on a board. `farm sweep run --program` finds its clocks."""

from __future__ import annotations

from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import on_board, program_bench
from farm.cli import options, output, tables
from farm.cli import result as result_cli
from farm.cli.model_artifacts import Board, Wait
from farm.cli.model_board import Point
from farm.points import requests
from farm.points import values as point_values
from farm.programs.order import ProgramOrder
from farm.types.documents import ProgramBench
from farm.units import format_bytes
from farm.values import PROGRAM

app = typer.Typer(help="Any program: its time, metrics, power and energy on a board.", no_args_is_help=True)


@app.callback()
def _noun() -> None:
    """Keep `bench` a command of its own."""


@app.command("bench")
@output.command
def bench(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Program and arguments, quoted as one word.")],
    board: Board = "local",
    metric: options.Metrics = None,
    file: options.Files = None,
    begin: options.From = "",
    end: options.Until = "",
    shell: options.Shell = False,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Number of timed runs.")] = 10,
    operating_point: Point = "default",
    wait: Wait = "60s",
) -> output.Document:
    """Time a program on a board. Wall time and metrics with 95 % intervals, power, energy, memory, and what ran."""
    order = ProgramOrder(command, tuple(map(str, file or ())), shell, begin, end, tuple(metric or ()))
    point = requests.parse_point(operating_point)
    wait_s = options.read_duration_s("--wait", wait)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        program_bench.require_fit(order, store, board)
        with on_board.hold_board(settings, store, board, wait_s, f"bench {order.name}"[:80], output.note) as held:
            held.pin(point, operating_point)
            done = program_bench.bench(order, held, runs)
        document = done.model_dump(mode="json")
        result_cli.keep(store, PROGRAM, document, model=order.name, board=done.board, device="cpu")
    yield document
    _print(done)


def _print(done: ProgramBench) -> None:
    if done.doubt:
        output.say(f"do not rely on these times, {done.doubt}")
    rows = [("wall time", "s", done.latency_s), *((each.name, each.unit, each.summary) for each in done.metrics)]
    tables.print_table(
        ("Metric", "Unit", "Median", "95 % CI", "Min", "Max"),
        [
            (
                name,
                unit,
                f"{s['median']:.4g}",
                f"{s['ci_low']:.4g} – {s['ci_high']:.4g}",
                f"{s['min']:.4g}",
                f"{s['max']:.4g}",
            )
            for name, unit, s in rows
        ],
        left=(0, 1),
    )
    said = []
    for value, interval, unit in ((done.power_w, done.power_ci_w, "W"), (done.energy_j, done.energy_ci_j, "J per run")):
        if value is not None:
            said.append(f"{value:.3g}{f' ({interval[0]:.3g} – {interval[1]:.3g})' if interval else ''} {unit}")
    said += [f"{m.per_unit_j:.3g} J/{m.unit.partition('/')[0]} ({m.name})" for m in done.metrics if m.per_unit_j]
    said = said or ["no power: the board has no sensor"]
    said += [f"peak memory {format_bytes(done.peak_memory_bytes)}"] if done.peak_memory_bytes is not None else []
    board = done.board
    known = f" (simulated, {board['watts']}: nothing was measured on a real board)" if board["simulated"] else ""
    conditions = point_values.format_conditions(done.threads, done.clocks, done.operating_point)
    heat = "" if done.temperature_c is None else f", {done.temperature_c:.0f} °C after them"
    about = f"{board['type']}/{board['name']}{known}: {done.latency_s['count']:.0f} runs, {conditions}{heat}"
    output.say("; ".join(said), about)
