"""What a certified board's core can do beside its type, and what programs take there beside the core's model.

What a core can do: `farm.services.core_probe`. Programs are micro-kernels and small models without a record, on one
core and on all. They are counted in the emulator's process, on this machine (`device_agent/emulated/pricing.py`);
constants are fitted to that in `farm.services.calibrate_model`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol import CountedSegment, Engine, Limits, OperatingPoint, PinStatus, RunSpec, Status
from device_agent.protocol.interpreters import python_command
from farm import emulation
from farm.artifacts.compile import compile_model
from farm.errors import DeadlineError, InternalError, PermanentError, UnavailableError
from farm.inventory.board_types import BoardType, Target
from farm.inventory.core_figures import find_differing, list_values, say_figures
from farm.inventory.core_types import CoreType, find_core_type
from farm.measure.arrays import pack_arrays
from farm.models.inputs import make_inputs, read_inputs, resolve_inputs
from farm.models.source import resolve_model
from farm.processes.compile_subprocess import compile_in_subprocess
from farm.search import streams
from farm.search.build import golden
from farm.services import core_probe
from farm.services.calibrate_model import PricedRun
from farm.services.certify_hardware import HardwareChecks
from farm.services.checks import Doubt, Work
from farm.settings import Settings

# Small enough to be emulated in seconds, alone and together; the last one is what published figures are of.
MODELS = ("mnist_cnn", "cifar_resnet20", "squeezenet1.1")
_RUNS, _WARMUP = 7, 2
_COUNT_TIMEOUT_S = 240.0
# How often a user hears that counting goes on.
_TELL_S = 5.0
# What docs/fidelity.md hopes for: in the middle, and at worst.
_MIDDLE, _WORST = 0.20, 0.40
_LEARN = "It throttles, is of another type, or `farm board calibrate-model REPORT` has predictions go by it."
_MODELLED = "The model of its core and the figures of its type disagree: docs/fidelity.md says what each is good for."
_FIT = "`farm board calibrate-model REPORT` fits the model's two constants to this report."

Say = Callable[[str], None]


def _say_nothing(text: str) -> None:
    """Take a line of progress that no caller wants."""


@dataclasses.dataclass(frozen=True)
class PricedProgram:
    """Code for the board, and what it is given; run on so many threads, one after the other."""

    name: str
    engine: Engine
    entry: str
    library: bytes = dataclasses.field(repr=False)
    inputs: Mapping[str, Any] = dataclasses.field(repr=False)
    threads: tuple[int, ...]


def plan_prices(
    settings: Settings, models: Sequence[str] = MODELS, say: Say = _say_nothing
) -> Callable[[HardwareChecks], list[tuple[str, Work]]]:
    """What `certify_board` takes as more checks. `say` gets lines of progress: they take a minute and more."""
    return lambda hardware: [
        ("core", lambda: ask_core(hardware, say)),
        ("prices", lambda: price_programs(hardware, settings, models, say)),
    ]


def ask_core(hardware: HardwareChecks, say: Say = _say_nothing) -> str | Doubt:
    """What the core can do at its highest clocks; it is in the facts, too. Raises FarmError."""
    kind, about = hardware.kind, hardware.session.description
    if kind.target is None:
        return "not asked: its type names no target"
    core = find_core_type(kind.target.mcpu, kind.target.mtriple.partition("-")[0])
    if core is None or about.architecture != kind.target.mtriple.partition("-")[0]:
        return f"not asked: it runs code for {about.architecture}, as virtual boards may"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(_NotHeldError):  # its clocks are its own: it is asked at those
            stack.enter_context(_held_highest(hardware))
        say(f"core: running its kernels, for about {core_probe.TIME_LIMIT_S:.0f} s at most")
        figures = core_probe.probe_core(hardware.session, core, kind.target.to_tvm(), _count_cores(hardware))
    typical = core.list_figures()
    hardware.facts["core"] = figures.to_dict() | {"type": typical}
    differing = find_differing(list_values(hardware.facts["core"]), typical)
    said = f"{len(figures.found)} figures at {figures.clock_hz / 1e6:.0f} MHz"
    if figures.unknown:
        said += f", not told: {', '.join(figures.unknown)}"
    if not differing:
        return f"{said}; as its type has them"
    said += f"; {say_figures(differing, typical)}"
    return Doubt(said, _MODELLED if about.simulated else _LEARN)


def price_programs(
    hardware: HardwareChecks, settings: Settings, models: Sequence[str], say: Say = _say_nothing
) -> str | Doubt:
    """Run the programs at the highest clocks, and price them; both are in the facts. Raises FarmError."""
    kind, about = hardware.kind, hardware.session.description
    core = emulation.find_core(kind)
    if core is None or kind.target is None:
        return "not compared: there is no model of its cores"
    if about.architecture != kind.target.mtriple.partition("-")[0]:
        return f"not compared: it runs code for {about.architecture}, as virtual boards may"
    try:
        natives = emulation.prepare(dataclasses.replace(settings, virtual_code=emulation.EMULATED))
    except UnavailableError as error:
        return Doubt(f"not compared: {error.message}", error.hint)
    assert natives is not None
    cores = _count_cores(hardware)
    programs = [_take_golden(hardware.require_kernel()), *_build_apart(kind, kind.target, cores, models, say)]
    hz, measured_s, missing = _measure(hardware, settings, programs, say)
    programs = [each for each in programs if each.name not in missing]
    if not programs:
        raise PermanentError("; ".join(missing.values()))
    counted, uncounted = _count(kind, natives, settings, programs, say)
    runs = []
    for (name, threads), rows in counted.items():
        segments = tuple(CountedSegment(*row) for row in rows)
        runs.append(PricedRun(name, threads, measured_s[name, threads], hz, segments))
    if not runs:
        raise PermanentError("; ".join(uncounted.values()))
    said = _judge(hardware, core, runs)
    if missing or uncounted:
        detail = said.detail if isinstance(said, Doubt) else said
        return Doubt("; ".join([*missing.values(), *uncounted.values(), detail]), _FIT)
    return said


def _judge(hardware: HardwareChecks, core: CoreType, runs: Sequence[PricedRun]) -> str | Doubt:
    assert core.pipeline is not None
    constants = (core.pipeline.wait_cycles, core.pipeline.crowding)
    rows, errors = [], []
    for run in runs:
        price_s = run.price_s(core, *constants)
        errors.append((abs(price_s / run.measured_s - 1), f"{run.name} on {run.threads}"))
        row = {"program": run.name, "threads": run.threads, "hz": run.hz, "measured_s": run.measured_s}
        rows.append(row | {"priced_s": price_s, "segments": [dataclasses.astuple(each) for each in run.segments]})
    hardware.facts["prices"] = {"core": core.name, **dict(zip(("wait_cycles", "crowding"), constants, strict=True))}
    hardware.facts["prices"]["runs"] = rows
    middle, (worst, which) = statistics.median(each for each, _ in errors), max(errors)
    said = f"{len(runs)} runs: prices are off by {middle:.0%} in the middle, by {worst:.0%} at worst ({which})"
    return Doubt(said, _FIT) if middle > _MIDDLE or worst > _WORST else said


def _take_golden(kernel: golden.GoldenKernel) -> PricedProgram:
    return PricedProgram("golden matmul", Engine.KERNEL, golden.ENTRY, kernel.library, golden.make_inputs(), (1,))


def _build_apart(kind: BoardType, target: Target, cores: int, models: Sequence[str], say: Say) -> list[PricedProgram]:
    threads = tuple(sorted({1, cores}))
    found = [resolve_model(name) for name in models]
    inputs = [resolve_inputs(read_inputs(source.load()), {}) for source in found]
    shapes = [{each.name: each.static_shape for each in one} for one in inputs]
    say(f"prices: compiling {', '.join(models)}")
    job = functools.partial(_build, kind, target, cores, models, shapes)
    built = compile_in_subprocess(job, "the code to be priced", say=say)
    given = [*(each.make_inputs(cores) for each in streams.STREAMS), *(make_inputs(each, 0) for each in inputs)]
    names = [*((each.name, Engine.KERNEL, streams.ENTRY) for each in streams.STREAMS)]
    names += [(name, Engine.RELAX_VM, "main") for name in models]
    return [
        PricedProgram(*about, library, arrays, threads)
        for about, library, arrays in zip(names, built, given, strict=True)
    ]


def _build(
    kind: BoardType, target: Target, cores: int, models: Sequence[str], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> list[bytes]:
    """The libraries: streams, then models without a record. Loads TVM's compiler."""
    config = target.to_tvm()
    made = [streams.build(each, config, cores) for each in streams.STREAMS]
    for name, shape in zip(models, shapes, strict=True):
        model = resolve_model(name).load()
        made.append(compile_model(model, shape, config, kind.pipeline, (), kind.link_triple).library)
    return made


def _list_runs(programs: Sequence[PricedProgram]) -> list[tuple[PricedProgram, int]]:
    return [(program, threads) for program in programs for threads in program.threads]


def _measure(
    hardware: HardwareChecks, settings: Settings, programs: Sequence[PricedProgram], say: Say
) -> tuple[float, dict[tuple[str, int], float], dict[str, str]]:
    """The clock of its open clusters, what every run took there, and why programs do not run."""
    taken_s: dict[tuple[str, int], float] = {}
    missing: dict[str, str] = {}
    with _held_highest(hardware) as reached:
        hz = float(min(hz for name, hz in reached.cpu_freq_hz.items() if name in _list_open(hardware.kind)))
        runs = _list_runs(programs)
        for number, (program, threads) in enumerate(runs, 1):
            if program.name in missing:
                continue
            say(f"prices: running {program.name} on {threads} thread{'s' * (threads > 1)} ({number} of {len(runs)})")
            limits = Limits(
                timeout_s=settings.model_timeout_s, memory_bytes=settings.model_memory_bytes, threads=threads
            )
            spec = RunSpec(
                program.engine, entry=program.entry, runs=_RUNS, warmup=_WARMUP, return_outputs=False, limits=limits
            )
            outcome, _ = hardware.session.run_model(spec, program.library, dict(program.inputs))
            if outcome.status is not Status.OK:
                missing[program.name] = f"{program.name} does not run: {outcome.status} {outcome.message}"
                continue
            taken_s[program.name, threads] = statistics.median(outcome.latency_s)
    return hz, taken_s, missing


class _NotHeldError(PermanentError):
    """The board does not hold its highest clocks."""


@contextlib.contextmanager
def _held_highest(hardware: HardwareChecks) -> Iterator[OperatingPoint]:
    """The highest clocks for the length of a block; gives what was reached. Raises _NotHeldError, BoardUnsafeError."""
    clocks = hardware.before
    high = {one.name: max(one.available_hz) for one in clocks.clusters if one.available_hz and one.online}
    memory_hz = max(clocks.memory.available_hz) if clocks.memory and clocks.memory.available_hz else None
    report = hardware.pin(OperatingPoint(cpu_freq_hz=high, memory_freq_hz=memory_hz))
    if report.status is not PinStatus.OK or report.reached is None:
        hardware.unpin()
        raise _NotHeldError(f"the highest clocks are not held: {report.message}")
    try:
        yield report.reached
    finally:
        hardware.unpin()


def _count_cores(hardware: HardwareChecks) -> int:
    """How many of its cores a program gets."""
    kind, online = hardware.kind, len(hardware.session.description.cores_online)
    assert kind.target is not None
    return min(kind.target.num_cores, online or kind.target.num_cores)


def _list_open(kind: BoardType) -> set[str]:
    return {cluster.name for cluster in kind.clusters if not cluster.isolated}


def _run_telling(command: Sequence[str], what: str, say: Say) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `say` gets `what` and how long it has taken. Raises DeadlineError."""
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while True:
                taken_s = time.monotonic() - began_s
                if taken_s >= _COUNT_TIMEOUT_S:
                    raise DeadlineError(f"the emulator did not count the programs within {_COUNT_TIMEOUT_S:g} s")
                say(f"{what}, {taken_s:.0f} s so far")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_TELL_S)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
        finally:
            process.kill()


def _count(
    kind: BoardType, natives: Path, settings: Settings, programs: Sequence[PricedProgram], say: Say
) -> tuple[dict[tuple[str, int], list[Any]], dict[str, str]]:
    """The segments of every run, and why programs cannot be priced. Raises InternalError, DeadlineError."""
    runs = _list_runs(programs)
    with tempfile.TemporaryDirectory(prefix="farm-priced-") as name:
        folder, jobs = Path(name), []
        for number, program in enumerate(programs):
            library, inputs = folder / f"{number}.so", folder / f"{number}.npz"
            library.write_bytes(program.library)
            inputs.write_bytes(pack_arrays(program.inputs))
            about = {"program": str(library), "inputs": str(inputs), "memory_bytes": settings.model_memory_bytes}
            about |= {"engine": str(program.engine), "entry": program.entry}
            jobs += [about | {"threads": threads} for threads in program.threads]
        order = folder / "order.json"
        order.write_text(json.dumps({"board_type": kind.name, "natives": str(natives), "jobs": jobs}))
        command = python_command("-m", "device_agent.emulated.pricing", str(order))
        done = _run_telling(command, f"prices: counting what {len(runs)} runs execute", say)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(runs):
        last = done.stderr.strip().rsplit("\n", 1)[-1]
        raise InternalError(f"the emulator's process ended with {done.returncode}: {last}")
    counted, missing = {}, {}
    for (program, threads), answer in zip(runs, answers, strict=True):
        if "segments" in answer:
            counted[program.name, threads] = answer["segments"]
        else:
            missing[program.name] = f"{program.name} cannot be priced: {answer['message']}"
    return counted, missing
