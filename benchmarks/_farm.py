"""Tune, compile and time models with the product's own machinery, for the benchmarks that compare ways of doing so."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _machine
import numpy as np

from device_agent.protocol import Engine, Limits, RunSpec, Status
from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.campaign.machine import machine_lock
from farm.campaign.tuning import LocalTuning, Tuned
from farm.fleet.local import LocalFarm
from farm.inventory.board_types import BoardType
from farm.measure.session import BoardSession
from farm.models.inputs import InputSpec, make_inputs, read_inputs, resolve_inputs
from farm.models.source import ModelSource, resolve_model
from farm.report.progress import Progress, summary_line
from farm.search import tvm_env
from farm.settings import Settings
from farm.store import Store
from farm.values import Record

# Model runs are spread over this many rounds in which all programs take turns, so that drift treats them alike.
ROUNDS = 4
WARMUP_RUNS = 5
_NOTE_INTERVAL_S = 15.0


class Notes:
    """Tells stderr how a tuning goes."""

    def __init__(self) -> None:
        self._said_at = 0.0

    def note(self, text: str) -> None:
        _machine.say(f"  {text}")

    def progress(self, progress: Progress) -> None:
        if time.monotonic() - self._said_at > _NOTE_INTERVAL_S:
            self._said_at = time.monotonic()
            _machine.say(f"  {summary_line(progress)}")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its settled inputs."""

    source: ModelSource
    inputs: tuple[InputSpec, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.static_shape for spec in self.inputs}


def read_model(text: str) -> Model:
    """A model of the zoo, or an ONNX file."""
    source = resolve_model(text)
    return Model(source, resolve_inputs(read_inputs(source.load()), {}))


@dataclasses.dataclass(frozen=True)
class Run:
    """One tuning and the model compiled from its records. `trials` are the store's rows."""

    pipeline: str
    target: Mapping[str, Any]
    workloads: tuple[Any, ...]
    tuned: Tuned
    trials: tuple[Mapping[str, Any], ...]
    records: tuple[Record, ...]
    library: bytes = dataclasses.field(repr=False)
    prepare_s: float
    start_s: float
    compile_s: float
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """What every benchmark says of a tuning."""
        progress = self.tuned.progress
        return {
            "trials": self.tuned.trials,
            "trials_per_minute": _machine.round_to(progress.trials_per_minute, 3),
            "seconds_tuning": round(self.tuned.seconds_tuning, 1),
            "sum_of_best_ms": None if progress.latency_s is None else _machine.round_to(progress.latency_s * 1e3),
            "records": len(self.records),
            "workloads": len(self.workloads),
        }


Around = Callable[[LocalTuning, Sequence[Any]], contextlib.AbstractContextManager[Any]]


def tune(model: Model, settings: Settings, board_type: BoardType, trials: int, around: Around | None = None) -> Run:
    """Tune from nothing in a store of its own, then compile. `around` wraps the tuning, the farm being up."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home, Store(Path(home) / "farm.db") as store:
        settings = dataclasses.replace(settings, home=home)
        began = time.monotonic()
        with LocalTuning(settings, store, board_type, Notes()) as local:
            target = local.parts.target()  # answered once the search has loaded TVM
            start_s = time.monotonic() - began
            before = time.monotonic()
            workloads = local.load(model.source, model.inputs, ())
            prepare_s = time.monotonic() - before
            with around(local, workloads) if around else contextlib.nullcontext():
                tuned = local.tune("benchmark", model.source, workloads, trials, True, began)
            seconds = time.monotonic() - began
            trial_rows = store.fetch_trials(tuned.campaign)
            records = store.fetch_records(workloads=[workload.hash for workload in workloads])
        tvm_env.load()  # so that the first compilation is not charged with it
        before = time.monotonic()
        pipeline = workloads[0].pipeline if workloads else board_type.pipeline
        compiled = compile_model(model.source.load(), model.shapes, target, pipeline, records, board_type.link_triple)
        return Run(
            pipeline=pipeline,
            target=target,
            workloads=tuple(workloads),
            tuned=tuned,
            trials=tuple(trial_rows),
            records=tuple(records),
            library=compiled.library,
            prepare_s=prepare_s,
            start_s=start_s,
            compile_s=time.monotonic() - before,
            seconds=seconds,
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Something whole to time on the board."""

    engine: Engine
    library: bytes = dataclasses.field(repr=False)
    threads: int


@dataclasses.dataclass
class Timing:
    """Latency samples in seconds, in order, and the outputs of the first run."""

    samples: list[float]
    outputs: list[Any]


@dataclasses.dataclass
class Timings:
    """By program's name. `quiet` is whether the machine did nothing else when it began."""

    quiet: bool
    by_name: dict[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        return self.by_name[name]


def time_programs(
    settings: Settings, model: Model, programs: Mapping[str, Program], runs: int, quick: bool = False
) -> Timings:
    """Run each program at least `runs` times on an otherwise idle agent, in turns; no Ray, no search, no compiler."""
    named = make_inputs(model.inputs, settings.seed)
    ordered = {f"arg_{index:03d}": array for index, array in enumerate(named.values())}
    timings: dict[str, Timing] = {}
    with quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(quick)
        for _ in range(ROUNDS):
            for name, program in programs.items():
                spec = RunSpec(
                    program.engine,
                    runs=-(-runs // ROUNDS),
                    warmup=WARMUP_RUNS,
                    limits=Limits(settings.model_timeout_s, settings.model_memory_bytes, program.threads),
                )
                inputs = named if program.engine is Engine.ONNXRUNTIME else ordered
                outcome, outputs = session.run_model(spec, program.library, inputs)
                if outcome.status is not Status.OK:
                    raise SystemExit(f"{name} does not run: {outcome.status} {outcome.message}")
                timing = timings.setdefault(name, Timing([], [np.asarray(value) for value in outputs.values()]))
                timing.samples.extend(outcome.latency_s)
    return Timings(quiet, timings)


@contextlib.contextmanager
def quiet_board(settings: Settings) -> Iterator[BoardSession]:
    """A session with an agent of our own, beside which nothing of ours runs but a tracker."""
    with (
        machine_lock(),
        tempfile.TemporaryDirectory(prefix="farm-bench-logs-") as logs,
        LocalFarm(settings.tracker_port, Path(logs)) as farm,
        BoardSession(farm.tracker, farm.key) as session,
    ):
        yield session


def matches(timing: Timing, reference: Timing) -> bool:
    """Whether two programs computed the same."""
    return compare(timing.outputs, reference.outputs).matches
