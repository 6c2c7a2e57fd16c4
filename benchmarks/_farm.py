"""Tune, compile and time models with the product's own machinery, for the benchmarks that compare ways of doing so."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
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
from farm.campaign.plan_models import to_variant
from farm.campaign.submit import OneModelRequest
from farm.campaign.tune import Tuned
from farm.campaign.tune import tune as tuning
from farm.crew.local import LocalFarm, share_cores
from farm.errors import FarmError, UnavailableError
from farm.inventory.board_types import BoardType, require_board_type
from farm.measure.blocking import BlockingSession
from farm.models.inputs import InputSpec, make_inputs, read_inputs, resolve_inputs
from farm.models.source import ModelSource, resolve_model
from farm.processes.machine import machine_lock
from farm.report.campaign_rows import summary_line
from farm.search import tvm_env
from farm.search.traces import find_default
from farm.search.tvm_env import host_target, make_target
from farm.search.workloads import prepare_model
from farm.selection.decision import Records
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import FleetCampaign
from farm.values import DEFAULT_POINT, SEARCH_TRIAL, Record, Workload

# Model runs are spread over this many rounds in which all programs take turns, so that drift treats them alike. With
# four, seconds of other work on the machine (two threads a third slower) hit one program more than another.
ROUNDS = 12
WARMUP_RUNS = 5
_NOTE_INTERVAL_S = 15.0


class Notes:
    """Tells stderr how a tuning goes; see `farm.campaign.tune.TuneListener`."""

    def __init__(self) -> None:
        self._said_at = 0.0

    def note(self, text: str) -> None:
        _machine.say(f"  {text}")

    def show(self, campaign: FleetCampaign) -> None:
        if time.monotonic() - self._said_at > _NOTE_INTERVAL_S:
            self._said_at = time.monotonic()
            self.finish(campaign)

    def finish(self, campaign: FleetCampaign) -> None:
        progress = campaign.progress or {}
        _machine.say(f"  {summary_line(campaign.name, campaign.state, campaign.reason, campaign.budget, progress)}")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its settled inputs."""

    source: ModelSource
    inputs: tuple[InputSpec, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.static_shape for spec in self.inputs}

    def prepare(self, target: Mapping[str, Any], pipeline: str = "") -> list[Workload]:
        """Its workloads for a target, the heaviest first, by a pipeline (this machine's)."""
        pipeline = pipeline or require_board_type("local").pipeline
        return prepare_model(self.source.load(), self.shapes, target, pipeline).workloads


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
    compile_s: float
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """What every benchmark says of a tuning."""
        tuned = self.tuned
        counted = tuned.trials["ok"] + tuned.trials["candidate_faults"]
        per_minute = counted / tuned.seconds_tuning * 60 if tuned.seconds_tuning > 0 else 0.0
        return {
            "trials": tuned.trials,
            "trials_per_minute": _machine.round_to(per_minute, 3),
            "seconds_tuning": round(tuned.seconds_tuning, 1),
            "sum_of_best_ms": None if tuned.latency_s is None else _machine.round_to(tuned.latency_s * 1e3),
            "records": len(self.records),
            "workloads": len(self.workloads),
        }


class Tuner:
    """A home and a store of its own; `tuner` makes it."""

    def __init__(self, settings: Settings, store: Store, board_type: BoardType) -> None:
        self._settings, self._store, self._board_type = settings, store, board_type

    def tune(self, model: Model, trials: int) -> Run:
        """Tune from nothing, then compile as the product does: without the records that lost in the model itself."""
        began = time.monotonic()
        request = OneModelRequest(
            "benchmark", to_variant(model.source, model.inputs), self._board_type, trials, fresh=True
        )
        tuned = tuning(request, self._settings, self._store, Notes())
        seconds = time.monotonic() - began
        kind = self._board_type.name
        records = self._store.records.fetch(
            workloads=[workload.hash for workload in tuned.workloads], board_type=kind, operating_point=DEFAULT_POINT
        )
        decided = self._store.decisions.fetch(model_sha256=model.source.sha256, board_type=kind, simulated=False)
        tvm_env.load()  # so that the first compilation is not charged with it
        before = time.monotonic()
        pipeline = tuned.workloads[0].pipeline if tuned.workloads else self._board_type.pipeline
        compiled = compile_model(
            model.source.load(),
            model.shapes,
            tuned.target,
            pipeline,
            Records(records, decisions=decided),
            self._board_type.link_triple,
        )
        return Run(
            pipeline=pipeline,
            target=tuned.target,
            workloads=tuned.workloads,
            tuned=tuned,
            trials=tuple(self._store.trials.fetch(tuned.campaign, purpose=SEARCH_TRIAL)),
            records=tuple(records),
            library=compiled.library,
            compile_s=time.monotonic() - before,
            seconds=seconds,
        )


@contextlib.contextmanager
def tuner(settings: Settings, board_type: BoardType) -> Iterator[Tuner]:
    """A store of its own; models that are tuned in it share nothing but that."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home, Store(Path(home) / "farm.db") as store:
        yield Tuner(dataclasses.replace(settings, home=home), store, board_type)


def tune(model: Model, settings: Settings, board_type: BoardType, trials: int) -> Run:
    """Tune from nothing in a store of its own, then compile."""
    with tuner(settings, board_type) as farm:
        return farm.tune(model, trials)


@dataclasses.dataclass(frozen=True)
class Built:
    """A model compiled by the farm, and what is said of that."""

    library: bytes = dataclasses.field(repr=False)
    summary: Mapping[str, Any]


@contextlib.contextmanager
def builder(settings: Settings, board_type: BoardType, trials: int) -> Iterator[Callable[[Model], Built]]:
    """Yield what compiles a model: after `trials` trials, or with none as the farm compiles what has no record."""
    if trials:
        with tuner(settings, board_type) as farm:

            def tuned(model: Model) -> Built:
                run = farm.tune(model, trials)
                return Built(run.library, run.summary | {"pipeline": run.pipeline, "seconds": round(run.seconds, 1)})

            yield tuned
        return

    tvm_env.load()
    target = host_target(_machine.cores())

    def untuned(model: Model) -> Built:
        before = time.monotonic()
        compiled = compile_model(
            model.source.load(), model.shapes, target, board_type.pipeline, (), board_type.link_triple
        )
        summary = {"trials": {}, "workloads": compiled.workloads, "pipeline": compiled.pipeline}
        return Built(compiled.library, summary | {"seconds": round(time.monotonic() - before, 1)})

    yield untuned


def build_all(settings: Settings, models: Mapping[str, Model], trials: int) -> dict[str, Built | str]:
    """Each model compiled for this machine, or why it is not, by the names that were given."""
    built: dict[str, Built | str] = {}
    with builder(settings, require_board_type("local"), trials) as build:
        for name, model in models.items():
            try:
                built[name] = done = build(model)
                _machine.say(f"{name}: {done.summary}")
            except FarmError as error:
                built[name] = str(error)
                _machine.say(f"{name}: {error}")
    return built


def schedule(workload: Workload) -> Any:
    """The module that the farm compiles for a workload without a record; the one place that says which schedule."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = find_default(workload, entry, make_target(workload.target))
    return entry.mod if found is None else found.candidate.sch.mod


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


# Something that is timed elsewhere: runs it so many times to warm up and so many times timed.
Elsewhere = Callable[[int, int], Timing]


class ProgramFailed(SystemExit):
    """A program that does not run; ends a benchmark that does not expect it, with its reason."""


def time_programs(
    settings: Settings, model: Model, programs: Mapping[str, Program], runs: int, quick: bool = False
) -> Timings:
    """Time programs on an otherwise idle agent, in turns; no Ray, no search, no compiler."""
    with quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(quick)
        return Timings(quiet, time_in_turns(session, settings, model, programs, runs))


def time_in_turns(
    session: BlockingSession, settings: Settings, model: Model, programs: Mapping[str, Program | Elsewhere], runs: int
) -> dict[str, Timing]:
    """Run each program at least `runs` times, in rounds. Raises ProgramFailed."""
    named = make_inputs(model.inputs, settings.seed)
    ordered = {f"arg_{index:03d}": array for index, array in enumerate(named.values())}
    timings: dict[str, Timing] = {}
    per_round = -(-runs // ROUNDS)
    for _ in range(ROUNDS):
        for name, program in programs.items():
            if isinstance(program, Program):
                inputs = named if program.engine is Engine.ONNXRUNTIME else ordered
                if program.engine is Engine.NCNN:  # it has no batch dimension
                    inputs = {key: array[0] for key, array in inputs.items()}
                done = _run_on_board(session, settings, name, program, inputs, per_round)
            else:
                done = program(WARMUP_RUNS, per_round)
            timings.setdefault(name, Timing([], done.outputs)).samples.extend(done.samples)
    return timings


def _run_on_board(
    session: BlockingSession, settings: Settings, name: str, program: Program, inputs: Mapping[str, Any], runs: int
) -> Timing:
    limits = Limits(settings.model_timeout_s, settings.model_memory_bytes, program.threads)
    spec = RunSpec(program.engine, runs=runs, warmup=WARMUP_RUNS, limits=limits)
    outcome, outputs = session.run_model(spec, program.library, inputs)
    if outcome.status is not Status.OK:
        raise ProgramFailed(f"{name} does not run: {outcome.status} {outcome.message}")
    arrays = [np.asarray(value) for value in outputs.values()]
    return Timing(list(outcome.latency_s), [each[None] for each in arrays] if program.engine is Engine.NCNN else arrays)


@contextlib.contextmanager
def quiet_board(settings: Settings) -> Iterator[BlockingSession]:
    """A session with an agent of our own on the board's cores, beside which nothing of ours runs but a tracker."""
    cores = share_cores(settings.isolation)[0] if settings.isolation == "own-core" else None
    with (
        machine_lock(),
        tempfile.TemporaryDirectory(prefix="farm-bench-logs-") as logs,
        LocalFarm(settings.tracker_port, Path(logs), cores) as farm,
        BlockingSession(farm.tracker, farm.key) as session,
    ):
        yield session


def matches(timing: Timing, reference: Timing) -> bool:
    """Whether two programs computed the same."""
    return compare(timing.outputs, reference.outputs).matches


def run_command(command: Sequence[str], timeout_s: float) -> None:
    """Run a command quietly. Raises UnavailableError with its last line."""
    try:
        subprocess.run(command, capture_output=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{Path(command[0]).name} did not end within {timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or b"nothing").decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"{Path(command[0]).name} failed: {said[-1] if said else 'it said nothing'}") from error
