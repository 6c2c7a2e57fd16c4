"""The schedules of one workload as families and MetaSchedule's rules span them: drawn, brought about, read back.

Decisions go in and scheduled functions come out; which decisions are worth trying is the tuners' business. Evaluated
schedules are remembered, which saves time and changes no answer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tvm
import tvm_ffi
from tvm.s_tir.schedule import Trace

from farm.errors import InternalError
from farm.search import gpus, traces, tvm_env
from farm.search.build import lowering
from farm.search.candidates import Candidate
from farm.search.families import rule
from farm.search.families.family import Plan, Prediction
from farm.search.graph.pipeline import PIPELINES
from farm.search.target import make_target
from farm.search.tuners.correction import Floats, Plans
from farm.search.tuners.cost_model import Features
from farm.search.tuners.decisions import Decision, Genome, Knob, ScheduleChoice, SchedulePlace, Tile, fit
from farm.search.tvm_env import ms
from farm.search.workloads import Workload

# What of a prediction a cost model sees: the whole, then these of its terms where a family has them.
_TERMS = ("compute", "far", "pad", "balance", "steps")
FEATURE_COUNT = 1 + len(_TERMS)
NO_PREDICTION = (0.0,) * FEATURE_COUNT
# Terms that add up, whose shares trials may correct, and those that are factors. Knobs that span a tile.
_ADDED, _FACTORS = ("compute", "transforms", "far", "pad"), ("balance", "steps")
_TILE = ("vectors", "pixels", "rows")
# A choice, and a share of the whole, in octaves of an option: what makes as much of a difference.
_CHOICE, _SHARE = 1.5, 3.0


class FamilySketch:
    """One knob a decision, the index of its option."""

    def __init__(self, outlook: rule.Outlook) -> None:
        """Of a function that a family reads."""
        self._outlook = outlook
        self._names = list(outlook.options)
        self.knobs: tuple[Knob, ...] = tuple(ScheduleChoice(len(options)) for options in outlook.options.values())

    @functools.cached_property
    def ranked(self) -> list[tuple[Decision, ...]]:
        """Decisions of all plans that make sense, the best predicted first."""
        return [self._index(plan) for _, plan in self._plans]

    @functools.cached_property
    def _plans(self) -> list[tuple[Prediction, Plan]]:
        return self._outlook.plans()

    def list_plans(self, most: int) -> Plans:
        """The first of `ranked` as what trials correct."""
        plans = self._plans[:most]
        columns = dict(self._list_facets(plans))
        log_s = np.log2([max(1e-12, prediction.seconds) for prediction, _ in plans])
        return Plans(self._outlook.family.name, tuple(columns), np.array(list(columns.values())).T, log_s)

    def _list_facets(self, plans: Sequence[tuple[Prediction, Plan]]) -> Iterator[tuple[str, Floats]]:
        """By name what plans are made of: octaves of options, 1 for a choice that is taken, shares of terms."""
        for name, options in self._outlook.options.items():
            taken = np.array([plan[name] for _, plan in plans], float)
            if min(options) > 0:
                yield name, np.log2(taken)
            else:
                for option in options:
                    yield f"{name}={option}", (taken == option) * _CHOICE
        if sizes := [name for name in _TILE if name in self._outlook.options]:
            yield "tile", np.log2([math.prod(plan[name] for name in sizes) for _, plan in plans])
        cycles = {name: np.array([p.terms.get(name, 0.0) for p, _ in plans]) for name in _ADDED}
        total = np.maximum(sum(cycles.values()), 1.0)
        for name, each in cycles.items():
            yield f"share of {name}", _SHARE * each / total
        for name in _FACTORS:
            yield f"cycles of {name}", np.log2([max(1e-3, p.terms.get(name, 1.0)) for p, _ in plans])

    def apply(self, schedule: Any, decisions: tuple[Decision, ...], seed: int) -> tuple[Decision, ...]:
        """Schedule the function; what is open is drawn. Returns the decisions taken.

        Raises ValueError for a plan that makes no sense, else what TVM raises.
        """
        if None in decisions:
            rng = random.Random(seed)
            fitting = [each for each in self.ranked if _agree(each, decisions)]
            if not fitting:
                raise ValueError("no plan has these options")
            decisions = rng.choice(fitting)
        plan = self._plan(decisions)
        if self._outlook.predict(plan) is None:
            raise ValueError(f"a plan that makes no sense: {dict(plan)}")
        self._outlook.apply(schedule, plan)
        return decisions

    def read(self, mark: tuple[str, Plan] | None) -> tuple[Decision, ...] | None:
        """The decisions of a marked trace, each the option nearest to the one it names; None for other families'."""
        if mark is None or mark[0] != self._outlook.family.name or set(mark[1]) != set(self._names):
            return None
        return self._index(mark[1])

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """The prediction as features: logarithms to base 2."""
        prediction = self._outlook.predict(self._plan(decisions))
        return NO_PREDICTION if prediction is None else _to_features(prediction)

    def _plan(self, decisions: tuple[Decision, ...]) -> Plan:
        options = self._outlook.options.values()
        return {
            name: each[decision]
            for name, each, decision in zip(self._names, options, decisions, strict=True)
            if isinstance(decision, int)
        }

    def _index(self, plan: Plan) -> tuple[Decision, ...]:
        return tuple(
            min(range(len(options)), key=lambda index: abs(options[index] - plan[name]))
            for name, options in self._outlook.options.items()
        )


def _agree(found: tuple[Decision, ...], wanted: tuple[Decision, ...]) -> bool:
    return all(theirs is None or mine == theirs for mine, theirs in zip(found, wanted, strict=True))


def _to_features(prediction: Prediction) -> tuple[float, ...]:
    values = (prediction.seconds * 1e9, *(prediction.terms.get(term, 0.0) for term in _TERMS))
    return tuple(math.log2(1.0 + max(0.0, value)) for value in values)


# A family none of whose so many best plans TVM takes does not serve a function.
_MOST_TRIED = 8
# Evaluated schedules remembered per task: about 2 KB each.
_REMEMBERED = 2048
# So many of a function's plans are put in order by what trials say; on a processor most have fewer.
_MOST_CORRECTED = 1024
_SAMPLERS = ("SamplePerfectTile", "SampleCategorical", "SampleComputeLocation")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A schedule that TVM accepts: its decisions as TVM took them, the hash of its code, features per store."""

    genome: Genome
    hash: str
    features: Features = dataclasses.field(repr=False, compare=False)


class _Sketch(Protocol):
    """One way to schedule a function: knobs, and what decisions on them lead to."""

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """What can be decided."""

    def apply(self, schedule: Any, decisions: tuple[Decision, ...], seed: int) -> tuple[Decision, ...]:
        """Schedule the function, drawing what is open; returns the decisions taken. Raises what TVM raises."""

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """What is predicted, as features of `FEATURE_COUNT` numbers."""


@dataclasses.dataclass(frozen=True)
class _StockSketch:
    """The instructions that MetaSchedule's rules write down, `at` those of the decisions."""

    instructions: tuple[Any, ...]
    at: tuple[int, ...]
    knobs: tuple[Knob, ...]
    shape: str

    def apply(self, schedule: Any, decisions: tuple[Decision, ...], seed: int) -> tuple[Decision, ...]:
        """Replay the instructions; TVM draws what is open, and puts right what does not go together."""
        taken = zip(self.at, decisions, strict=True)
        trace = Trace(
            list(self.instructions),
            {self.instructions[at]: _to_tvm(decision) for at, decision in taken if decision is not None},
        )
        trace.apply_to_schedule(schedule, remove_postproc=True)
        instructions = schedule.trace.insts
        return tuple(_plain(schedule.trace.get_decision(instructions[at])) for at in self.at)

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """Nothing is predicted of these."""
        return NO_PREDICTION


class ScheduleSpace:
    """All schedules of a workload for its target. Not thread-safe."""

    def __init__(self, workload: Workload, threads: int = 1) -> None:
        """`threads` is the most that extracting features may use. Raises UsageError where TVM refuses the target."""
        tvm_env.load()

        self._tvm, self._ms = tvm, ms
        self.workload = workload
        self._target = make_target(workload.target)
        self._module = tvm.ir.load_json(workload.module_json)
        self._entry = ms.database.MemoryDatabase().commit_workload(self._module)
        self._context = ms.TuneContext(
            self._module, target=self._target, space_generator="post-order-apply", rand_state=1, num_threads=threads
        )
        family = self._find_family()
        # In the order of the design spaces, which is the same for every random state.
        stock = [_read_sketch(space.trace) for space in self._context.generate_design_space()]
        self._sketches: list[_Sketch] = [family, *stock] if family else list(stock)
        # Where a family knows the function, MetaSchedule's own sketches only read what was measured before.
        self.drawn = range(1 if family else len(stock))
        self._extractor = ms.feature_extractor.PerStoreFeature()
        self._memory: collections.OrderedDict[tuple[Genome, int], Evaluated | None] = collections.OrderedDict()
        self._recent: dict[str, Any] = {}

    def _find_family(self) -> FamilySketch | None:
        pipeline = PIPELINES.get(self.workload.pipeline)
        if pipeline is None or not pipeline.canonical:
            return None
        for outlook in rule.list_outlooks(self._module, gpus.unit_of(self.workload.target)):
            sketch = FamilySketch(outlook)
            if any(self._make(sketch, decisions, 0) for decisions in sketch.ranked[:_MOST_TRIED]):
                return sketch
        return None

    @functools.cached_property
    def ranked(self) -> list[Genome]:
        """All schedules of which a prediction is had, the best first; none where no family knows the function."""
        first = self._sketches[0]
        return [Genome(0, decisions) for decisions in first.ranked] if isinstance(first, FamilySketch) else []

    @functools.cached_property
    def plans(self) -> Plans | None:
        """The first of `ranked` as trials may correct them; None where nothing is predicted."""
        first = self._sketches[0]
        return first.list_plans(_MOST_CORRECTED) if isinstance(first, FamilySketch) else None

    @functools.cached_property
    def rows(self) -> dict[Genome, int]:
        """Which row of `plans` a schedule is."""
        return {genome: row for row, genome in enumerate(self.ranked[:_MOST_CORRECTED])}

    @property
    def knobs(self) -> list[tuple[Knob, ...]]:
        """What can be decided, by sketch."""
        return [sketch.knobs for sketch in self._sketches]

    def undecided(self, sketch: int) -> Genome:
        """Everything to be drawn by TVM."""
        return Genome(sketch, (None,) * len(self._sketches[sketch].knobs))

    def evaluate(self, genomes: Sequence[tuple[Genome, int]]) -> list[Evaluated | None]:
        """What each leads to, None where TVM refuses it. With each comes the seed for decisions that are open."""
        fresh: dict[tuple[Genome, int], Any] = {}
        # A seed matters only where something is left open.
        keys = [(genome, seed if None in genome.decisions else 0) for genome, seed in genomes]
        for key in keys:
            if key not in self._memory and key not in fresh:
                fresh[key] = self._bring_about(*key)
        scheduled = {key: made for key, made in fresh.items() if made is not None}
        items = [self._ms.search_strategy.MeasureCandidate(schedule, []) for schedule, _ in scheduled.values()]
        features = self._extractor.extract_from(self._context, items) if items else []
        for key, made in fresh.items():
            if made is None:
                self._memory[key] = None
        for (key, (schedule, genome)), tensor in zip(scheduled.items(), features, strict=True):
            predicted = self._sketches[genome.sketch].describe(genome.decisions)
            stores = tensor.numpy().astype("float32")
            beside = np.tile(np.array(predicted, "float32"), (len(stores), 1))
            found = Evaluated(genome, _hash(schedule.mod), np.hstack([stores, beside]))
            self._memory[key] = self._memory[found.genome, 0] = found
            self._recent[found.hash] = schedule
        answers = []
        for key in keys:
            self._memory.move_to_end(key)
            answers.append(self._memory[key])
        while len(self._memory) > max(_REMEMBERED, len(keys)):
            self._memory.popitem(last=False)
        return answers

    def describe(self, found: Evaluated) -> Candidate:
        """The candidate to build and measure."""
        schedule = self._recent.get(found.hash)
        if schedule is None:
            made = self._bring_about(found.genome, 0)
            if made is None:
                raise InternalError(f"{self.workload.name}: a schedule that TVM took is refused when made again")
            schedule = made[0]
        arguments = self._ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        item = self._ms.search_strategy.MeasureCandidate(schedule, arguments)
        return Candidate(
            workload=self.workload.hash,
            hash=found.hash,
            arguments=tuple((tuple(int(d) for d in a.shape), str(a.dtype)) for a in arguments),
            trace_json=traces.dump(item, self._entry, self._target),
            module_json=self._tvm.ir.save_json(schedule.mod),
        )

    def release(self) -> None:
        """Let go of scheduled functions kept for `describe`; it makes them again where it has to."""
        self._recent.clear()

    def read(self, trace_json: str) -> Genome | None:
        """The decisions of a recorded trace, fitted to this workload's sizes; None where no sketch is like it.

        It may come from this workload, from another shape of it, or from the same one for another target.
        """
        try:
            [instructions, decisions], *_ = json.loads(trace_json)
            shape, given = traces.shape(instructions), dict(decisions)
        except (ValueError, TypeError, IndexError, KeyError):
            return None
        mark = rule.read_mark(instructions)
        for index, sketch in enumerate(self._sketches):
            if isinstance(sketch, FamilySketch):
                if (decisions_of_plan := sketch.read(mark)) is not None:
                    return Genome(index, decisions_of_plan)
            elif isinstance(sketch, _StockSketch) and sketch.shape == shape:
                taken = (_plain(given.get(at)) for at in sketch.at)
                return Genome(index, tuple(fit(d, knob) for d, knob in zip(taken, sketch.knobs, strict=True)))
        return None

    def replay(self, trace_json: str) -> str:
        """The scheduled function of a trace recorded for this very workload, in TVM's JSON. Raises InternalError.

        Without a trace, what the workload is compiled to without a record. Where that is a schedule of its family, it
        is refused: a search measures that one first, so it is a candidate as it is.
        """
        if not trace_json:
            if self.ranked:
                raise InternalError("what it is compiled to without a record is among its candidates")
            if gpus.is_gpu(self.workload.target):
                return str(self._tvm.ir.save_json(lowering.bind_rest(self._module, self._target)))
            return self.workload.module_json
        return str(self._tvm.ir.save_json(traces.restore(trace_json, self._entry, self._target).sch.mod))

    @functools.cached_property
    def structure(self) -> str:
        """Hash of the unscheduled function, whatever the target: equal functions take each other's schedules."""
        return _hash(self._module)

    def _bring_about(self, genome: Genome, seed: int) -> tuple[Any, Genome] | None:
        """The schedule with post-processors applied, as `traces.restore` makes it too, and the decisions taken.

        None where TVM refuses.
        """
        made = self._make(self._sketches[genome.sketch], genome.decisions, seed)
        return None if made is None else (made[0], Genome(genome.sketch, made[1]))

    def _make(
        self, sketch: _Sketch, decisions: tuple[Decision, ...], seed: int
    ) -> tuple[Any, tuple[Decision, ...]] | None:
        schedule = self._tvm.s_tir.Schedule(self._module, seed=seed + 1, error_render_level="none")
        try:
            taken = sketch.apply(schedule, decisions, seed)
            traces.finish(schedule, self._context)
        except (RuntimeError, ValueError, TypeError):  # what TVM raises where decisions do not go together
            return None
        return schedule, taken


def _read_sketch(trace: Any) -> _StockSketch:
    kept = trace.simplified(True)
    instructions = tuple(kept.insts)
    at = tuple(i for i, each in enumerate(instructions) if str(each.kind.name).startswith("Sample"))
    knobs: list[Knob] = []
    for index in at:
        instruction = instructions[index]
        name, decision = str(instruction.kind.name), _plain(kept.get_decision(instruction))
        if name not in _SAMPLERS:
            raise InternalError(f"MetaSchedule decides by {name}, which this search does not know")
        if isinstance(decision, tuple):
            extent = functools.reduce(lambda product, size: product * size, decision, 1)
            knobs.append(Tile(extent, len(decision), int(instruction.attrs[1])))
        else:
            knobs.append(ScheduleChoice(len(instruction.attrs[0])) if name == "SampleCategorical" else SchedulePlace())
    bare = Trace(list(instructions), {}).as_json()
    return _StockSketch(instructions, at, tuple(knobs), traces.shape(bare[0]))


def _plain(decision: Any) -> Decision:
    if decision is None:
        return None
    try:
        return tuple(int(size) for size in decision)
    except TypeError:
        return int(decision)


def _to_tvm(decision: Decision) -> Any:
    return list(decision) if isinstance(decision, tuple) else decision


def _hash(module: Any) -> str:
    return f"{int(tvm_ffi.structural_hash(module)) & (2**64 - 1):016x}"
