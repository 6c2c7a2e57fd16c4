"""Time any program on a held board: its metrics, power and energy, and what ran. Clocks are swept by `farm.sweep`."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

from device_agent.protocol import GPU, Engine
from farm.artifacts.checking import read_energy
from farm.artifacts.on_board import HeldForModels, find_board
from farm.artifacts.timing import Turns, Variant
from farm.crew.visits import plan_window, read_temperature_c
from farm.errors import PermanentError
from farm.measure.statistics import summarise
from farm.programs.metrics import TIME, ProgramMetric, read_runs
from farm.programs.order import ProgramOrder
from farm.store import Store
from farm.types.documents import MetricSummary, ProgramBench

_WINDOW_S, _WARMUP_RUNS = 2.0, 1


def require_fit(order: ProgramOrder, store: Store, board: str) -> None:
    """Refuse files for another processor than a board's, before it is taken. Raises UsageError."""
    kind, name = find_board(store, board)
    machine = kind.target.mtriple.partition("-")[0] if kind.target else platform.machine()
    order.require_fit({"architecture": machine, "simulated": name is not None and store.boards.require(name).simulated})


def bench(order: ProgramOrder, board: HeldForModels, runs: int) -> ProgramBench:
    """Run a program `runs` times after a warm-up, and longer where power needs it; its first settings are taken.

    Raises PermanentError where it does not run, or a run lacks a metric; UsageError as `ProgramOrder`.
    """
    [settings, *_] = order.list_settings().values()
    command, about, name = order.to_command(settings), board.description, order.name
    limits, energy = board.limits(board.cores), plan_window(about, _WINDOW_S).to_energy()
    variant = Variant(name, Engine.PROGRAM, b"", order.contents, command=command)
    timed = Turns([variant], runs, limits, rounds=1, warmup=_WARMUP_RUNS, energy=energy).run_all(board.run)
    if why := timed.missing.get(name):
        raise PermanentError(f"{name} does not run on {board.name}: {why}")
    outcome, samples, details = timed.outcomes[name], timed.samples[name], timed.describe_details(name)
    outputs = {str(index): array for index, array in enumerate(timed.outputs[name])}
    metrics = [metric for metric in order.read_metrics() if metric != TIME]
    found = read_runs(metrics, samples, outputs, outcome.details.stretch if outcome.details else 1.0)
    energy_j, power_w = read_energy(outcome)
    total = outcome.energy.busy.total if outcome.energy else None
    return ProgramBench(
        board=board.describe(),
        command=list(command.arguments),
        files=dict(command.files),
        sha256=order.sha256,
        exit_status=0,  # another one is an error
        output=outcome.details.output if outcome.details else "",
        operating_point=board.point,
        clocks=board.read_clocks(outcome, GPU),
        threads=limits.threads or 0,
        latency_s=dataclasses.asdict(summarise(samples)),
        metrics=[_summarise(metric, found[metric.name], power_w) for metric in metrics],
        energy_j=energy_j,
        energy_ci_j=outcome.energy.per_call_ci_j if outcome.energy else None,
        power_w=power_w,
        power_ci_w=total.power_ci_w if total else None,
        first_s=details["first_s"],
        peak_memory_bytes=details["peak_memory_bytes"],
        temperature_c=read_temperature_c(outcome.after.temperature_c if outcome.after else {}),
        doubt=timed.find_doubt(),
    )


def _summarise(metric: ProgramMetric, values: Sequence[float], power_w: float | None) -> MetricSummary:
    summary = summarise(values)
    per_unit_j = power_w * metric.to_seconds(summary.median) if power_w and metric.counted else None
    about = {"name": metric.name, "unit": metric.unit, "better": metric.better}
    return MetricSummary(**about, summary=dataclasses.asdict(summary), per_unit_j=per_unit_j)
