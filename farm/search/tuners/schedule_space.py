"""The schedules of one workload as families and MetaSchedule's rules define them: draw, apply, restore from a trace.

Tuners choose decisions; here they become scheduled functions. Evaluated schedules are cached.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tvm
from tvm.s_tir.schedule import Trace

from farm.errors import InternalError
from farm.search import gpus, traces, tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.families.family import Plan, Prediction, read_mark
from farm.search.graph.pipelines import is_canonical
from farm.search.tuners.cost_model import Features, Floats, Plans
from farm.search.tuners.decisions import Candidate, Decision, Genome, Knob, ScheduleChoice, SchedulePlace, Tile, fit
from farm.search.tvm_env import make_target, ms
from farm.values import Workload

# Features of a prediction: its total, then these terms where a family has them.
_TERMS = ("compute", "far", "pad", "balance", "steps")
FEATURE_COUNT = 1 + len(_TERMS)
NO_PREDICTION = (0.0,) * FEATURE_COUNT
# Additive terms, whose shares trials may correct, and factors. Knobs that span a tile.
_ADDED, _FACTORS = ("compute", "transforms", "far", "pad"), ("balance", "steps")
_TILE = ("vectors", "pixels", "rows")
# Scale of a choice and of a share relative to an octave of an option.
_CHOICE, _SHARE = 1.5, 3.0
# A family of whose best plans TVM refuses this many does not serve a function.
_MOST_TRIED = 8
# Evaluated schedules cached per task: about 2 KB each.
_REMEMBERED = 2048
# Plans that the correction orders; on CPUs most functions have fewer.
_MOST_CORRECTED = 1024
_SAMPLERS = ("SamplePerfectTile", "SampleCategorical", "SampleComputeLocation")


class FamilySketch:
    """A family's sketch: one knob per option list, decided by index."""

    def __init__(self, outlook: rule.Outlook) -> None:
        """`outlook` is a function as read by a family."""
        self._outlook = outlook
        self._names = list(outlook.options)
        self.knobs: tuple[Knob, ...] = tuple(ScheduleChoice(len(options)) for options in outlook.options.values())

    @functools.cached_property
    def ranked(self) -> list[tuple[Decision, ...]]:
        """Decisions of all valid plans, the best predicted first."""
        return [self._index(plan) for _, plan in self._plans]

    @functools.cached_property
    def _plans(self) -> list[tuple[Prediction, Plan]]:
        return self._outlook.plans()

    def list_plans(self, most: int) -> Plans:
        """Return the first `most` of `ranked` for the correction."""
        plans = self._plans[:most]
        columns = dict(self._list_facets(plans))
        log_s = np.log2([max(1e-12, prediction.seconds) for prediction, _ in plans])
        return Plans(self._outlook.family.name, tuple(columns), np.array(list(columns.values())).T, log_s)

    def _list_facets(self, plans: Sequence[tuple[Prediction, Plan]]) -> Iterator[tuple[str, Floats]]:
        """Yield the named facets of plans: octaves of options, choices as 0 or 1, shares of terms."""
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
        """Schedule the function, drawing open decisions; return the decisions taken.

        Raises ValueError for an invalid plan, and TVM's errors.
        """
        if None in decisions:
            rng = random.Random(seed)
            fitting = [each for each in self.ranked if _agree(each, decisions)]
            if not fitting:
                raise ValueError("no plan has these options")
            decisions = rng.choice(fitting)
        plan = self._plan(decisions)
        if self._outlook.predict(plan) is None:
            raise ValueError(f"invalid plan {dict(plan)}")
        self._outlook.apply(schedule, plan)
        return decisions

    def read(self, mark: tuple[str, Plan] | None) -> tuple[Decision, ...] | None:
        """Read the decisions of a marked trace, each rounded to the nearest option; None for another family's."""
        if mark is None or mark[0] != self._outlook.family.name or set(mark[1]) != set(self._names):
            return None
        return self._index(mark[1])

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """Return the prediction as features in log2."""
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


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A schedule that TVM accepts: its decisions as applied, the hash of its code, features per store."""

    genome: Genome
    hash: str
    features: Features = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class _StockSketch:
    """The instructions of MetaSchedule's rules; `at` are those of the decisions."""

    instructions: tuple[Any, ...]
    at: tuple[int, ...]
    knobs: tuple[Knob, ...]
    shape: str

    def apply(self, schedule: Any, decisions: tuple[Decision, ...], seed: int) -> tuple[Decision, ...]:
        """Replay the instructions; TVM draws open decisions and repairs inconsistent ones."""
        taken = zip(self.at, decisions, strict=True)
        trace = Trace(
            list(self.instructions),
            {self.instructions[at]: _to_tvm(decision) for at, decision in taken if decision is not None},
        )
        trace.apply_to_schedule(schedule, remove_postproc=True)
        instructions = schedule.trace.insts
        return tuple(_plain(schedule.trace.get_decision(instructions[at])) for at in self.at)

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """Return no prediction."""
        return NO_PREDICTION


_Sketch = FamilySketch | _StockSketch


class ScheduleSpace:
    """All schedules of a workload for its target. Not thread-safe."""

    def __init__(self, workload: Workload, threads: int = 1) -> None:
        """`threads` limits the extraction of features. Raises UsageError where TVM refuses the target."""
        tvm_env.load()

        self.workload = workload
        self._target = make_target(workload.target)
        self._module = tvm.ir.load_json(workload.module_json)
        self._entry = ms.database.MemoryDatabase().commit_workload(self._module)
        self._context = ms.TuneContext(
            self._module, target=self._target, space_generator="post-order-apply", rand_state=1, num_threads=threads
        )
        family = self._find_family()
        # The order of the design spaces does not depend on the random state.
        stock = [_read_sketch(space.trace) for space in self._context.generate_design_space()]
        self._sketches: list[_Sketch] = [family, *stock] if family else list(stock)
        # With a family, MetaSchedule's sketches only restore earlier measurements.
        self.drawn = range(1 if family else len(stock))
        self._extractor = ms.feature_extractor.PerStoreFeature()
        self._memory: collections.OrderedDict[tuple[Genome, int], Evaluated | None] = collections.OrderedDict()
        self._recent: dict[str, Any] = {}

    def _find_family(self) -> FamilySketch | None:
        if not is_canonical(self.workload.pipeline):
            return None
        for outlook in rule.list_outlooks(self._module, gpus.unit_of(self.workload.target)):
            sketch = FamilySketch(outlook)
            if any(self._make(sketch, decisions, 0) for decisions in sketch.ranked[:_MOST_TRIED]):
                return sketch
        return None

    @functools.cached_property
    def ranked(self) -> list[Genome]:
        """All predicted schedules, the best first; none without a family."""
        first = self._sketches[0]
        return [Genome(0, decisions) for decisions in first.ranked] if isinstance(first, FamilySketch) else []

    @functools.cached_property
    def plans(self) -> Plans | None:
        """The first of `ranked` for the correction; None without a prediction."""
        first = self._sketches[0]
        return first.list_plans(_MOST_CORRECTED) if isinstance(first, FamilySketch) else None

    @functools.cached_property
    def rows(self) -> dict[Genome, int]:
        """Rows of `plans` by schedule."""
        return {genome: row for row, genome in enumerate(self.ranked[:_MOST_CORRECTED])}

    @property
    def knobs(self) -> list[tuple[Knob, ...]]:
        """The knobs by sketch."""
        return [sketch.knobs for sketch in self._sketches]

    def undecided(self, sketch: int) -> Genome:
        """Return a schedule of which TVM draws everything."""
        return Genome(sketch, (None,) * len(self._sketches[sketch].knobs))

    def evaluate(self, genomes: Sequence[tuple[Genome, int]]) -> list[Evaluated | None]:
        """Evaluate schedules, each with a seed for open decisions; None where TVM refuses one."""
        fresh: dict[tuple[Genome, int], Any] = {}
        # The seed matters only for open decisions.
        keys = [(genome, seed if None in genome.decisions else 0) for genome, seed in genomes]
        for key in keys:
            if key not in self._memory and key not in fresh:
                fresh[key] = self._schedule(*key)
        scheduled = {key: made for key, made in fresh.items() if made is not None}
        items = [ms.search_strategy.MeasureCandidate(schedule, []) for schedule, _ in scheduled.values()]
        features = self._extractor.extract_from(self._context, items) if items else []
        for key, made in fresh.items():
            if made is None:
                self._memory[key] = None
        for (key, (schedule, genome)), tensor in zip(scheduled.items(), features, strict=True):
            predicted = self._sketches[genome.sketch].describe(genome.decisions)
            stores = tensor.numpy().astype("float32")
            beside = np.tile(np.array(predicted, "float32"), (len(stores), 1))
            found = Evaluated(genome, workloads.hash_structure(schedule.mod), np.hstack([stores, beside]))
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
        """Make the candidate to build and measure."""
        schedule = self._recent.get(found.hash)
        if schedule is None:
            made = self._schedule(found.genome, 0)
            if made is None:
                raise InternalError(f"{self.workload.name}: TVM refuses a schedule that it accepted before")
            schedule = made[0]
        arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        item = ms.search_strategy.MeasureCandidate(schedule, arguments)
        return Candidate(
            workload=self.workload.hash,
            hash=found.hash,
            arguments=tuple((tuple(int(d) for d in a.shape), str(a.dtype)) for a in arguments),
            trace_json=traces.dump(item, self._entry, self._target),
            module_json=tvm.ir.save_json(schedule.mod),
        )

    def release(self) -> None:
        """Free the scheduled functions kept for `describe`, which can make them again."""
        self._recent.clear()

    def read(self, trace_json: str) -> Genome | None:
        """Read the decisions of a recorded trace, fitted to this workload's sizes; None where no sketch matches.

        The trace may come from this workload, another shape of it, or another target.
        """
        try:
            [instructions, decisions], *_ = json.loads(trace_json)
            shape, given = traces.shape(instructions), dict(decisions)
        except (ValueError, TypeError, IndexError, KeyError):
            return None
        mark = read_mark(instructions)
        for index, sketch in enumerate(self._sketches):
            if isinstance(sketch, FamilySketch):
                if (decisions_of_plan := sketch.read(mark)) is not None:
                    return Genome(index, decisions_of_plan)
            elif sketch.shape == shape:
                taken = (_plain(given.get(at)) for at in sketch.at)
                return Genome(index, tuple(fit(d, knob) for d, knob in zip(taken, sketch.knobs, strict=True)))
        return None

    def replay(self, trace_json: str) -> str:
        """Return the scheduled function of a trace recorded for this workload, in TVM's JSON. Raises InternalError.

        An empty trace stands for the default schedule. Where that is a family's it is refused, since it is measured as
        a candidate.
        """
        if not trace_json:
            if self.ranked:
                raise InternalError("the default schedule is among the candidates")
            if gpus.is_gpu(self.workload.target):
                return str(tvm.ir.save_json(lowering.bind_rest(self._module, self._target)))
            return self.workload.module_json
        return str(tvm.ir.save_json(traces.restore(trace_json, self._entry, self._target).sch.mod))

    @functools.cached_property
    def structure(self) -> str:
        """Hash of the unscheduled function without the target: equal functions share schedules."""
        return workloads.hash_structure(self._module)

    def _schedule(self, genome: Genome, seed: int) -> tuple[Any, Genome] | None:
        """Return the post-processed schedule, as `traces.restore` makes it, and the decisions taken, or None."""
        made = self._make(self._sketches[genome.sketch], genome.decisions, seed)
        return None if made is None else (made[0], Genome(genome.sketch, made[1]))

    def _make(
        self, sketch: _Sketch, decisions: tuple[Decision, ...], seed: int
    ) -> tuple[Any, tuple[Decision, ...]] | None:
        schedule = tvm.s_tir.Schedule(self._module, seed=seed + 1, error_render_level="none")
        try:
            taken = sketch.apply(schedule, decisions, seed)
            traces.finish(schedule, self._context)
        except (RuntimeError, ValueError, TypeError):  # TVM refuses inconsistent decisions
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
            raise InternalError(f"this search does not support MetaSchedule's {name}")
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
