"""Time whole models on one board: a single one, or several in turns, so that drift affects all alike.

Callers hold the board and run the programs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from device_agent.protocol import CPU, Command, EnergySpec, Engine, Limits, Outcome, RunDetails, RunSpec, Status
from farm.artifacts.verify import OutputComparison
from farm.errors import PermanentError
from farm.measure.statistics import SampleSummary, summarise

# Number of rounds. Background load can slow two threads by a third to a half for seconds at a time, which with few
# rounds would cover half of them.
ROUNDS = 8
WARMUP_RUNS = 5
# Untuned code is so slow that fewer runs suffice and many would dominate the time.
BASELINE_RUNS, BASELINE_WARMUP_RUNS, BASELINE_ROUNDS = 15, 1, 3

# Latencies are doubtful where, of at least so many runs, one in ten takes this many times the median, or the standard
# deviation exceeds this fraction of it; or where other processes use this many cores.
_MOST_P90, _MOST_STD, _FEWEST_RUNS, _MOST_OTHER_LOAD = 1.25, 0.5, 30, 0.5

# Runs a program on inputs in the order of its arguments.
Run = Callable[[RunSpec, bytes, dict[str, Any]], "tuple[Outcome, dict[str, Any]]"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A program to time. A `needed` one that does not run ends the timing; a `baseline` gets fewer runs."""

    name: str
    engine: Engine
    program: bytes = dataclasses.field(repr=False)
    inputs: Mapping[str, Any] = dataclasses.field(repr=False)
    needed: bool = False
    device: str = CPU
    baseline: bool = False
    load_timeout_s: float | None = None
    command: Command | None = None


@dataclasses.dataclass
class Timed:
    """Latencies in seconds and outputs by variant, the last outcome of each, and why a variant has none.

    `rounds` has each round's medians by number; `compared` holds comparisons of outputs. `details` are one per block,
    for which the worker reloads the program.
    """

    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    outputs: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    rounds: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    # By round and variant, in J an inference, where it was measured.
    energies: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    above_idle: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    compared: dict[str, OutputComparison] = dataclasses.field(default_factory=dict)
    details: dict[str, list[RunDetails]] = dataclasses.field(default_factory=dict)
    # By turn: CPU use of other processes in cores, and the load average afterwards.
    other_loads: list[float] = dataclasses.field(default_factory=list)
    loads_1min: list[float] = dataclasses.field(default_factory=list)

    def summary(self, name: str) -> SampleSummary | None:
        """Summarise a variant's latencies."""
        return summarise(self.samples[name]) if self.samples.get(name) else None

    def describe_details(self, name: str) -> dict[str, Any]:
        """Return first inference (s, median of blocks), peak memory (bytes, largest) and layers; None if unknown.

        `instances_s` are the median latencies of all instances, empty where there was one.
        """
        found = self.details.get(name, [])
        firsts = [each.first_s for each in found if each.first_s is not None]
        peaks = [each.peak_memory_bytes for each in found if each.peak_memory_bytes is not None]
        others = [statistics.median(each) for each in zip(*(each.others_s for each in found), strict=False)]
        layers = next((each.layers for each in reversed(found) if each.layers), ())
        return {
            "first_s": statistics.median(firsts) if firsts else None,
            "peak_memory_bytes": max(peaks, default=None),
            "layers": [dataclasses.asdict(each) for each in layers],
            "instances_s": [statistics.median(self.samples[name]), *others] if others else [],
        }

    def find_doubt(self) -> str:
        """Return why the latencies are doubtful, by scatter and load; "" where they are not."""
        found = {name: summary for name in self.samples if (summary := self.summary(name)) is not None}
        long = [name for name, summary in found.items() if summary.count >= _FEWEST_RUNS]
        name = max(long, key=lambda each: _find_scatter(found[each]), default="")
        worst = found.get(name)
        other = statistics.median(self.other_loads) if self.other_loads else 0.0
        is_busy = other > _MOST_OTHER_LOAD
        if not is_busy and (worst is None or _find_scatter(worst) <= 1):
            return ""
        said = [f"other processes used {other:.1f} cores"] if is_busy else []
        said += [f"the load average was {max(self.loads_1min):.1f}"] if self.loads_1min else []
        if worst is not None:
            said.append(
                f"one run in ten took over {worst.p90 / worst.median:.2f} times the median, "
                f"the standard deviation is {worst.std / worst.median * 100:,.0f} % of it"
            )
        cause = "the board was too busy" if is_busy else f"equal runs of {name} differ too much"
        return f"{cause}: {', '.join(said)}. Measure again while nothing else runs"


def _find_scatter(summary: SampleSummary) -> float:
    """Return the scatter of runs relative to a quiet board's limit."""
    return max(summary.p90 / summary.median / _MOST_P90, summary.std / summary.median / _MOST_STD)


class Turns:
    """The schedule of turns: which variant runs next, how often, and its results (`timed`).

    Each variant runs `runs` times over `rounds`, baselines at most `BASELINE_RUNS` times; extra rounds have no
    baselines. `energy` and layers are measured in each variant's last turn.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        runs: int,
        limits: Limits,
        *,
        rounds: int = ROUNDS,
        warmup: int = WARMUP_RUNS,
        energy: EnergySpec | None = None,
        per_layer: bool = False,
        instances: int = 1,
    ) -> None:
        self.timed = Timed()
        self._variants, self._runs, self._limits = variants, runs, limits
        self._rounds, self._warmup, self._energy, self._per_layer = rounds, warmup, energy, per_layer
        self._instances = instances

    def list_round(self, number: int) -> Iterator[tuple[Variant, RunSpec]]:
        """Yield the runs of a round, counted from 0; pass each result to `take` before the next."""
        for variant in self._variants:
            if variant.name in self.timed.missing or not (now := self._count(variant, number)):
                continue
            turns = self._turns(variant)
            # TensorRT is timed by a program of its own, beside which the agent reads no energy.
            apart = variant.engine is Engine.TENSORRT
            deadline_s = variant.load_timeout_s
            yield (
                variant,
                RunSpec(
                    variant.engine,
                    runs=now,
                    warmup=BASELINE_WARMUP_RUNS if variant.baseline else self._warmup,
                    device=variant.device,
                    instances=self._instances,
                    limits=dataclasses.replace(self._limits, load_timeout_s=deadline_s) if deadline_s else self._limits,
                    energy=self._energy if number == turns[-1] and not apart else None,
                    per_layer=self._per_layer and number == turns[-1] and variant.engine is Engine.RELAX_VM,
                    command=variant.command,
                ),
            )

    def take(self, number: int, variant: Variant, outcome: Outcome, outputs: Mapping[str, Any]) -> None:
        """Record the result of a turn. Raises PermanentError where a needed variant does not run."""
        timed, name = self.timed, variant.name
        if outcome.status is not Status.OK:
            if variant.needed:
                raise PermanentError(
                    f"the {name} model does not run on the board: {outcome.status} {outcome.message}".rstrip()
                )
            timed.missing[name] = f"{outcome.status}: {outcome.message}"
            timed.samples.pop(name, None)
            return
        timed.samples.setdefault(name, []).extend(outcome.latency_s)
        timed.rounds.setdefault(number, {})[name] = statistics.median(outcome.latency_s)
        if outcome.energy is not None and outcome.energy.per_call_j is not None:
            timed.energies[number, name] = outcome.energy.per_call_j
            if (outcome.energy.above_idle_j or 0.0) > 0:
                timed.above_idle[number, name] = float(outcome.energy.above_idle_j or 0.0)
        timed.outputs[name] = [np.asarray(value) for value in outputs.values()]
        timed.outcomes[name] = outcome
        if outcome.other_load is not None:
            timed.other_loads.append(outcome.other_load)
        if outcome.after is not None and outcome.after.load_1min is not None:
            timed.loads_1min.append(outcome.after.load_1min)
        if outcome.details is not None:
            timed.details.setdefault(name, []).append(outcome.details)

    def run_all(self, run: Run) -> Timed:
        """Time every variant. Raises PermanentError where a needed one does not run."""
        for number in range(self._rounds):
            # The second of two may find a warmer board or cache, so the order alternates.
            for variant, spec in list(self.list_round(number))[:: -1 if number % 2 else 1]:
                self.take(number, variant, *run(spec, variant.program, dict(variant.inputs)))
        return self.timed

    def _turns(self, variant: Variant) -> range:
        return range(0, self._rounds, -(-self._rounds // BASELINE_ROUNDS) if variant.baseline else 1)

    def _count(self, variant: Variant, number: int) -> int:
        turns = self._turns(variant)
        if number >= self._rounds:
            return 0 if variant.baseline else max(1, self._runs // self._rounds)
        if number not in turns:
            return 0
        wanted, turn = min(self._runs, BASELINE_RUNS) if variant.baseline else self._runs, turns.index(number)
        return wanted * (turn + 1) // len(turns) - wanted * turn // len(turns)


def describe_runs(runs: int, rounds: int = ROUNDS) -> str:
    """Describe how `runs` runs of each variant were timed, for reports."""
    return (
        f"{runs} timed runs per variant in {rounds} alternating blocks "
        f"(of untuned code {min(runs, BASELINE_RUNS)} in {BASELINE_ROUNDS}), "
        f"{WARMUP_RUNS} warm-up runs ({BASELINE_WARMUP_RUNS} of untuned code) dropped before each"
    )


def ordered(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Name inputs by position, since the model's names may not be valid file names."""
    return {f"arg_{index:03d}": array for index, array in enumerate(arrays.values())}
