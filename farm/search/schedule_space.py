"""The schedules of one workload as MetaSchedule's rules span them: drawn, brought about, described, read back.

Decisions go in and scheduled functions come out; which decisions are worth trying is the tuners' business. Evaluated
schedules are remembered, which saves time and changes no answer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from farm.errors import InternalError
from farm.search import traces, tvm_env
from farm.search.cost_model import Features
from farm.search.decisions import Choice, Decision, Genome, Knob, Place, Tile, fit
from farm.search.strategy import Candidate
from farm.search.target import make_target
from farm.search.workloads import Workload

# Evaluated schedules remembered per task: about 2 KB each.
_REMEMBERED = 2048
_SAMPLERS = ("SamplePerfectTile", "SampleCategorical", "SampleComputeLocation")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A schedule that TVM accepts: its decisions as TVM took them, the hash of its code, features per store."""

    genome: Genome
    hash: str
    features: Features = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class _Sketch:
    """The instructions of one way to schedule, `at` those of the decisions, and what they may be."""

    instructions: tuple[Any, ...]
    at: tuple[int, ...]
    knobs: tuple[Knob, ...]
    shape: str


class ScheduleSpace:
    """All schedules of a workload for its target. Not thread-safe."""

    def __init__(self, workload: Workload, threads: int = 1) -> None:
        """`threads` is the most that extracting features may use. Raises UsageError where TVM refuses the target."""
        tvm = tvm_env.load()
        import tvm.s_tir.meta_schedule as ms

        self._tvm, self._ms = tvm, ms
        self.workload = workload
        self._target = make_target(workload.target)
        self._module = tvm.ir.load_json(workload.module_json)
        self._entry = ms.database.MemoryDatabase().commit_workload(self._module)
        self._context = ms.TuneContext(
            self._module, target=self._target, space_generator="post-order-apply", rand_state=1, num_threads=threads
        )
        # In the order of the design spaces, which is the same for every random state.
        self._sketches = [_read_sketch(space.trace) for space in self._context.generate_design_space()]
        self._postprocessors = list(self._context.space_generator.postprocs)
        self._extractor = ms.feature_extractor.PerStoreFeature()
        self._memory: collections.OrderedDict[tuple[Genome, int], Evaluated | None] = collections.OrderedDict()
        self._recent: dict[str, Any] = {}

    @property
    def knobs(self) -> list[tuple[Knob, ...]]:
        """What can be decided, by sketch."""
        return [sketch.knobs for sketch in self._sketches]

    def undecided(self, sketch: int) -> Genome:
        """Everything to be drawn by TVM."""
        return Genome(sketch, (None,) * len(self._sketches[sketch].at))

    def evaluate(self, genomes: Sequence[tuple[Genome, int]]) -> list[Evaluated | None]:
        """What each leads to, None where TVM refuses it. With each comes the seed for decisions that are open."""
        fresh: dict[tuple[Genome, int], Any] = {}
        # A seed matters only where something is left open.
        keys = [(genome, seed if None in genome.decisions else 0) for genome, seed in genomes]
        for key in keys:
            if key not in self._memory and key not in fresh:
                fresh[key] = self._bring_about(*key)
        scheduled = {key: schedule for key, schedule in fresh.items() if schedule is not None}
        items = [self._ms.search_strategy.MeasureCandidate(schedule, []) for schedule in scheduled.values()]
        features = self._extractor.extract_from(self._context, items) if items else []
        for key, schedule in fresh.items():
            if schedule is None:
                self._memory[key] = None
        for (key, schedule), tensor in zip(scheduled.items(), features, strict=True):
            found = Evaluated(
                self._taken(key[0].sketch, schedule), _hash(schedule.mod), tensor.numpy().astype("float32")
            )
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
        schedule = self._recent.get(found.hash) or self._bring_about(found.genome, 0)
        if schedule is None:
            raise InternalError(f"{self.workload.name}: a schedule that TVM took is refused when made again")
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
        for index, sketch in enumerate(self._sketches):
            if sketch.shape == shape:
                taken = (_plain(given.get(at)) for at in sketch.at)
                return Genome(index, tuple(fit(d, knob) for d, knob in zip(taken, sketch.knobs, strict=True)))
        return None

    def replay(self, trace_json: str) -> str:
        """The scheduled function of a trace recorded for this very workload, in TVM's JSON. Raises InternalError."""
        return str(self._tvm.ir.save_json(traces.restore(trace_json, self._entry, self._target).sch.mod))

    @functools.cached_property
    def structure(self) -> str:
        """Hash of the unscheduled function, whatever the target: equal functions take each other's schedules."""
        return _hash(self._module)

    def _bring_about(self, genome: Genome, seed: int) -> Any:
        """The schedule with post-processors applied, as `traces.restore` makes it too; None where TVM refuses."""
        from tvm.s_tir.schedule import Trace

        sketch = self._sketches[genome.sketch]
        taken = zip(sketch.at, genome.decisions, strict=True)
        trace = Trace(
            list(sketch.instructions),
            {sketch.instructions[at]: _to_tvm(decision) for at, decision in taken if decision is not None},
        )
        schedule = self._tvm.s_tir.Schedule(self._module, seed=seed + 1, error_render_level="none")
        try:
            trace.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            good = all(postprocessor.apply(schedule) for postprocessor in self._postprocessors)
        except (RuntimeError, ValueError, TypeError):  # what TVM raises where decisions do not go together
            return None
        return schedule if good else None

    def _taken(self, sketch: int, schedule: Any) -> Genome:
        """The decisions that TVM took, after drawing open ones and putting right what did not go together."""
        instructions, trace = schedule.trace.insts, schedule.trace
        decisions = (_plain(trace.get_decision(instructions[at])) for at in self._sketches[sketch].at)
        return Genome(sketch, tuple(decisions))


def _read_sketch(trace: Any) -> _Sketch:
    from tvm.s_tir.schedule import Trace

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
            knobs.append(Choice(len(instruction.attrs[0])) if name == "SampleCategorical" else Place())
    bare = Trace(list(instructions), {}).as_json()
    return _Sketch(instructions, at, tuple(knobs), traces.shape(bare[0]))


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
    import tvm_ffi

    return f"{int(tvm_ffi.structural_hash(module)) & (2**64 - 1):016x}"
