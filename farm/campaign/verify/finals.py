"""A campaign's finals: an end-to-end A/B test of each model, as recorded, as predicted, and mixed, on one board in
turns.

Kernels that are faster one by one may be slower in their model. The model is compiled from the fastest variant
(`ModelDecision`). Coroutines, as in `verification`; the rules are in `final_rules`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from device_agent.protocol import CPU, GPU, EnergySpec, Engine, FaultSide, Limits, Outcome, RunSpec, Status
from farm.artifacts import contenders, make, timing
from farm.artifacts.contenders import (
    ONNXRUNTIME,
    PREDICTED,
    RECORDED,
    UNTUNED,
    BuiltContenders,
    Contender,
    ContenderOrder,
)
from farm.artifacts.manifest import ModelFacts
from farm.artifacts.timing import Timed, Turns, Variant
from farm.artifacts.verify import compare
from farm.campaign.plan_estimate import count_functions, find_final_s
from farm.campaign.verify import final_rules, objectives
from farm.campaign.verify.coroutines import Loop, done, until
from farm.campaign.verify.programs import MAX_FAULTS, MAX_LOSSES, Preparations, VerificationWorker
from farm.errors import FarmError, PermanentError, UnavailableError
from farm.inventory.board_types import require_board_type
from farm.models.inputs import make_inputs
from farm.points.values import Objective, format_clocks
from farm.search import gpus
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order, TypeOrder
from farm.types.states import ModelDecision
from farm.values import name_workloads

# How long a final waits for a free board; its campaign stays open until then.
_WAIT_S = 600.0
# The limit for timing one contender: slow models get fewer runs.
_TIMING_S = 20.0
# The remaining part of a final that takes longer than estimated.
_LEAST_LEFT = 0.1
# A window of energy in each turn: rounds repeat it.
_ENERGY = EnergySpec(min_updates=20, limit_s=4.0, idle_s=0.0)
_LATE = UnavailableError(f"no board was free for it within {_WAIT_S:g} s")


class FinalKey(NamedTuple):
    """The key of a final."""

    model: str
    board_type: str
    point: str


@dataclasses.dataclass(eq=False)
class Stage:
    """Contenders that a board of a type times in turns. `is_begun`: a board does, `board` was the last that did.
    `watched`: the times of functions are wanted too, from extra runs after the timed ones.
    """

    key: FinalKey
    variants: Sequence[Variant]
    final: _Final
    watched: bool = False
    is_begun: bool = False
    losses: int = 0
    board: str = ""
    answer: Timed | FarmError | None = None


class Finals:
    """The finals of one campaign, begun once its workloads are verified."""

    def __init__(
        self,
        loop: Loop,
        worker: VerificationWorker,
        preparations: Preparations,
        campaign: int,
        order: Order,
        store: Store,
        settings: Settings,
    ) -> None:
        """Read earlier decisions from the store."""
        self._loop, self._worker, self._preparations = loop, worker, preparations
        self._campaign, self._order, self._store, self._settings = campaign, order, store, settings
        self.documents: list[dict[str, Any]] = [
            dict(each.evidence) for each in store.decisions.fetch(campaign=campaign)
        ]
        known = {FinalKey(each["model"], each["board_type"], each["point"]) for each in self.documents}
        self._by = Objective(order.objective)
        # Every model that has workloads on a type, at every point.
        self._left = [
            key
            for of_type in order.types
            for point, model in itertools.product(of_type.points, order.models)
            if count_functions(of_type.workloads, model.name)
            and (key := FinalKey(model.name, of_type.board_type, point)) not in known
        ]
        self._open: set[FinalKey] = set()
        self._expected_s = {key: find_final_s(order, key.model, key.board_type) for key in self._left}
        # When the first final began and when the last one ended; the estimated seconds of those that ended.
        self._began_s = self._changed_s = self._ended_s = 0.0
        self._stages: list[Stage] = []
        self._now_s = 0.0

    @property
    def done(self) -> bool:
        """Whether all are decided or given up for good."""
        return not self._left and not self._open

    @property
    def count(self) -> tuple[int, int]:
        """Return how many finals are over, and how many there are: each model on every type at every point."""
        ended = len(self.documents)
        return ended, ended + len(self._left) + len(self._open)

    @property
    def is_begun(self) -> bool:
        """Whether models are being compiled and timed."""
        return bool(self._open)

    @property
    def left_s(self) -> float:
        """Estimate the time of the finals that are left, at the pace of those before."""
        left_s = math.fsum(self._expected_s[key] for key in (*self._left, *self._open))
        if not self._open:
            return left_s
        if self._ended_s:
            left_s *= (self._changed_s - self._began_s) / self._ended_s
        return max(_LEAST_LEFT * left_s, left_s - (self._now_s - self._changed_s))

    def begin(self) -> None:
        left, self._left = self._left, []
        self._began_s = self._changed_s = self._now_s
        self._open.update(left)
        for key in left:
            self._loop.start(self._hold(key))

    def count_wanted(self, board_type: str) -> int:
        """Count the boards of a type that could be timing now."""
        return sum(stage.key.board_type == board_type for stage in self._stages)

    def tick(self, now_s: float) -> None:
        """Set the time; `now_s` is monotonic."""
        self._now_s = now_s

    def find(self, board_type: str) -> Stage | None:
        """Return the stage that a board of a type may begin."""
        return next((each for each in self._stages if each.key.board_type == board_type and not each.is_begun), None)

    async def run(self, stage: Stage, board: str) -> None:
        """Time a stage on a board. If the board is taken away, the stage restarts elsewhere."""
        stage.is_begun, stage.board = True, board
        try:
            stage.answer = await self._time(stage, board)
        finally:
            if stage.answer is None:
                stage.is_begun, stage.losses = False, stage.losses + 1
                if stage.losses >= MAX_LOSSES:
                    stage.answer = UnavailableError(f"{stage.losses} boards were lost while they timed it")

    # One final

    async def _hold(self, key: FinalKey) -> None:
        """Hold a final from its programs to its decision."""
        of_type = next(each for each in self._order.types if each.board_type == key.board_type)
        try:
            document = await self._decide(key, of_type)
        except FarmError as error:
            document = final_rules.describe_none(key._asdict(), of_type, error.message)
            self._store.events.add("model_not_timed", self._order.name, f"{_name(key)}: {error.message}")
        self.documents.append(document)
        self._open.discard(key)
        self._changed_s, self._ended_s = self._now_s, self._ended_s + self._expected_s[key]

    async def _decide(self, key: FinalKey, of_type: TypeOrder) -> dict[str, Any]:
        order = self._to_order(key, of_type)
        by = self._by
        watched = gpus.device_of(order.config) == CPU and not of_type.simulated and by is Objective.LATENCY
        plan = final_rules.plan_later if watched else final_rules.plan_mixes
        job = functools.partial(contenders.build, order, self._order.rivals, plan)
        built: BuiltContenders = await self._ask(job, key)
        final = _Final(key, of_type, order, built, self._settings)
        whole = timed = await self._measure(final, list(final.contenders), watched and bool(final.refused[PREDICTED]))
        final.drop_wrong(whole)
        ratios = final_rules.compare_in_place(built.parts, final_rules.list_layer_rounds(whole))
        if (
            mixes := final_rules.mix_in_place(built.parts, ratios, built.seconds)
            if watched
            else _join(built, whole, by)
        ):
            final.contenders |= await self._ask(functools.partial(contenders.build_mixes, order, mixes), key)
            final.refused |= mixes
            timed = await self._measure(final, list(final.refused))
            final.drop_wrong(timed)
        names = [name for name in final.refused if name in timed.samples]
        names = final_rules.drop_late(timed, names, self._order.deadline_s)
        rounds = final_rules.list_rounds(timed, by)
        verdict = final_rules.decide(rounds, names, last=True) if names else None
        if verdict is None:
            raise PermanentError("none of its programs computes what the model does")
        refused = final.refused[verdict.taken]
        sizes = {name: len(each.program) for name, each in final.contenders.items()}
        document = final_rules.describe(
            key._asdict(), of_type, built, whole, timed, verdict, refused, rounds, sizes, by
        )
        document["in_place"] = final_rules.describe_in_place(built.parts, ratios)
        document |= {"board": final.board, "threads": final.threads, "clocks": final.read_clocks(timed, verdict.taken)}
        self._store.decisions.save(
            ModelDecision(
                order.model.sha256,
                name_workloads(part.workload for part in built.parts),
                key.board_type,
                key.point,
                of_type.simulated,
                refused,
                document,
                self._campaign,
            )
        )
        self._store.events.add("model_timed", self._order.name, f"{_name(key)}: {document['said']}")
        return document

    async def _ask(self, job: Callable[[], Any], key: FinalKey) -> Any:
        """Return the result of compiling. Raises what that raises."""
        async with self._preparations:
            return await done(self._worker.compile(job, f"{key.model} was not compiled for {key.board_type}"))

    async def _measure(self, final: _Final, names: Sequence[str], watched: bool = False) -> Timed:
        """Time contenders in turns. Raises FarmError where no board does it in time, or none of them runs."""
        stage = Stage(final.key, final.to_variants(names), final, watched)
        self._stages.append(stage)
        until_s = self._now_s + _WAIT_S

        def find() -> Timed | FarmError | None:
            is_late = not stage.is_begun and self._now_s > until_s
            return _LATE if is_late and stage.answer is None else stage.answer

        try:
            answer: Timed | FarmError = await until(find)
        finally:
            self._stages.remove(stage)
        if isinstance(answer, FarmError):
            raise answer
        final.board = stage.board
        return answer

    async def _time(self, stage: Stage, board: str) -> Timed | FarmError:
        """Time rounds until they decide, or to the last look. Failures that are not the program's are tried again."""
        final, settings, faults = stage.final, self._settings, 0
        late, idle_s = set[str](), objectives.find_idle_s(self._by)
        energy = None if self._by is Objective.LATENCY else dataclasses.replace(_ENERGY, idle_s=idle_s)
        point = final.of_type.points[stage.key.point]
        limits = Limits(
            timeout_s=settings.model_timeout_s, memory_bytes=settings.model_memory_bytes, threads=final.threads
        )

        async def run(variant: Variant, spec: RunSpec) -> tuple[Outcome, Any] | FarmError:
            nonlocal faults
            while True:
                ended = await done(self._worker.run(board, point, spec, variant.program, dict(variant.inputs)))
                outcome: Outcome = ended.result
                # Its functions kept their deadlines: the host, which virtual boards share, may have been slow. TVM's
                # own code may really take that long.
                if outcome.status is Status.RUN_TIMEOUT and not variant.baseline and variant.name not in late:
                    late.add(variant.name)
                    continue
                if outcome.status.fault_side in (None, FaultSide.CANDIDATE):
                    return outcome, ended.outputs
                faults += 1
                if faults >= MAX_FAULTS:
                    return UnavailableError(f"{faults} runs failed: {outcome.status} {outcome.message}".rstrip())

        latency_s = None
        for variant in stage.variants:
            if variant.baseline or latency_s is not None:
                continue
            spec = RunSpec(variant.engine, runs=1, warmup=1, device=variant.device, limits=limits)
            answer = await run(variant, spec)
            if isinstance(answer, FarmError):
                return answer
            latency_s = max(answer[0].latency_s, default=None)
        if latency_s is None:
            return PermanentError("none of its programs runs on the board")
        runs = int(min(settings.model_runs, max(timing.ROUNDS, _TIMING_S / latency_s)))
        turns = Turns(stage.variants, runs, limits, warmup=min(timing.WARMUP_RUNS, -(-runs // timing.ROUNDS)))
        for number in range(final_rules.RULE.looks[-1]):
            for variant, spec in turns.list_round(number):
                is_watched = stage.watched and variant.name in final.refused
                answer = await run(variant, dataclasses.replace(spec, per_layer=is_watched, energy=energy))
                if isinstance(answer, FarmError):
                    return answer
                turns.take(number, variant, *answer)
                is_known = objectives.read_energy_j(answer[0].energy, self._by) is not None
                if energy and answer[0].status is Status.OK and not is_known:
                    return PermanentError(f"no energy of {variant.name} was measured")
            names = [name for name in final.refused if name in turns.timed.samples]
            if not names:
                return PermanentError("none of its programs runs on the board")
            is_look = number + 1 in final_rules.RULE.looks[:-1]
            rounds = final_rules.list_rounds(turns.timed, self._by)
            if is_look and final_rules.decide(rounds, names, last=False) is not None:
                break
        return turns.timed

    def _to_order(self, key: FinalKey, of_type: TypeOrder) -> ContenderOrder:
        about = next(each for each in self._order.models if each.name == key.model)
        model = ModelFacts(**about.model_dump(exclude={"lengths"}))
        kind = require_board_type(key.board_type).model_copy(update={"pipeline": of_type.pipeline})
        candidates = make.list_candidates(model.sha256, kind, of_type.simulated, self._store)
        return ContenderOrder(model, kind, key.point, of_type.simulated, of_type.target, candidates)


class _Final:
    """One running final: its contenders, the records that each leaves out, its latest timing."""

    def __init__(
        self, key: FinalKey, of_type: TypeOrder, order: ContenderOrder, built: BuiltContenders, settings: Settings
    ) -> None:
        self.key, self.of_type, self.board = key, of_type, ""
        # As many threads as the finished model gets; candidates on virtual boards get fewer.
        plan = make.find_target(order.board_type, order.simulated)
        self.threads = plan.threads if of_type.simulated else of_type.threads
        self.contenders: dict[str, Contender] = dict(built.contenders)
        differing = [part for part in built.parts if part.differs]
        self.refused: dict[str, Mapping[str, str]] = {
            RECORDED: {},
            PREDICTED: final_rules.refuse(differing),
            **built.mixes,
        }
        self._clusters = order.board_type.clusters
        self._device, self._wrong = gpus.device_of(order.config), dict[str, str]()
        self._inputs = make_inputs(built.inputs, settings.seed)

    def to_variants(self, names: Sequence[str]) -> list[Variant]:
        """Return contenders to be timed, without wrong ones, and equal code once."""
        same = {name for name in names if name == RECORDED and not self.refused[PREDICTED]}
        return [
            Variant(
                name,
                Engine.ONNXRUNTIME if name == ONNXRUNTIME else Engine.RELAX_VM,
                self.contenders[name].program,
                self._inputs if name == ONNXRUNTIME else timing.ordered(self._inputs),
                device=CPU if name == ONNXRUNTIME else self._device,
                baseline=name == UNTUNED,
            )
            for name in names
            if name not in same and name not in self._wrong
        ]

    def read_clocks(self, timed: Timed, name: str) -> str:
        """Return a contender's latest clocks."""
        clusters = {each.name: each.cpus for each in self._clusters if not each.isolated}
        return format_clocks(timed.outcomes[name], clusters, on_gpu=self._device == GPU)

    def drop_wrong(self, timed: Timed) -> None:
        """Drop contenders whose outputs differ from the other engine's, or from the prediction's."""
        reference = next((name for name in (ONNXRUNTIME, PREDICTED) if name in timed.outputs), None)
        for name in [name for name in timed.outputs if reference is not None and name != reference]:
            found = compare(timed.outputs[name], timed.outputs[reference or name], self.contenders[name].factor)
            timed.compared[name] = found
            if not found.matches:
                self._wrong[name] = timed.missing[name] = f"{Status.WRONG_RESULT}: {found.reason}"
                timed.samples.pop(name, None)


def _join(built: BuiltContenders, timed: Timed, by: Objective) -> dict[str, dict[str, str]]:
    """Return a mix of the mixes that gain alone; empty where there is none."""
    alive = {name: refused for name, refused in built.mixes.items() if name in timed.samples}
    if len(alive) < 2 or RECORDED not in timed.samples:
        return {}
    joined = final_rules.join_mixes(final_rules.list_rounds(timed, by), alive)
    return {} if joined is None else {f"{final_rules.MIXED} joined": joined}


def _name(key: FinalKey) -> str:
    return f"{key.model} on {key.board_type} at {key.point}"
