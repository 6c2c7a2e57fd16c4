"""Propose candidates of one workload with MetaSchedule's evolutionary search, and take results back.

Which workload is asked next is the scheduler's business (`farm.campaign.scheduler`).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from farm.errors import InternalError
from farm.search import cost_model, traces, tvm_env
from farm.search.workloads import Workload

_log = logging.getLogger(__name__)

# Rounds without any new candidate before a space counts as used up.
_MAX_BARREN_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """`population` is how many schedules evolve per proposal; benchmarks/search_cost.py says what that costs.

    `first_population` is how many random ones are drawn while the cost model knows too little to evolve against.
    Only with one thread does the same `seed` give the same candidates: with more, TVM hands out work as threads become
    free.
    """

    population: int = 64
    first_population: int = 16
    generations: int = 3
    eps_greedy: float = 0.1
    seed: int = 0
    threads: int = 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One scheduled version of a workload, in forms that travel between processes.

    `arguments` are (shape, dtype) of what its function takes: a weight that the schedule wants packed has the packed
    shape, which differs from the workload's own.

    `hash` is over the scheduled function, so two traces that end in the same code are one candidate. `trace_json`
    replays it; `module_json` is the scheduled function itself, ready to build.
    """

    workload: str
    hash: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    trace_json: str = dataclasses.field(repr=False)
    module_json: str = dataclasses.field(repr=False)


class WorkloadSearch:
    """The evolutionary search over one workload's schedules. Not thread-safe."""

    def __init__(self, workload: Workload, target: Any, model: cost_model.CostModel, settings: SearchSettings) -> None:
        tvm = tvm_env.load()
        import tvm.s_tir.meta_schedule as ms

        self._ms, self._tvm = ms, tvm
        self._workload = workload
        self._target = target
        self._model = model
        self._settings = settings
        self._module = tvm.ir.load_json(workload.module_json)
        self._database = ms.database.MemoryDatabase()
        self._entry = self._database.commit_workload(self._module)
        self._tvm_model = cost_model.as_tvm(model)
        self._context: Any = None
        self._spaces: Any = None
        self._batch = 0
        self._evolving = False
        self._open: dict[str, tuple[Any, cost_model.Features]] = {}
        self._seen: set[str] = set()
        self.exhausted = False

    def propose(self, count: int) -> list[Candidate]:
        """Up to `count` candidates that were not proposed before. Fewer, or none, where the space is used up."""
        self._prepare(count)
        fresh: dict[str, tuple[Candidate, Any]] = {}
        # The best of a population may all be known: recalled, or proposed before the cost model was ready. TVM never
        # returns the same ones twice, so asking again digs deeper, and in a space that is used up soon ends.
        for _ in range(_MAX_BARREN_ROUNDS):
            found = self._context.generate_measure_candidates()
            if not found:
                break
            for item in found:
                candidate = self._describe(item)
                if candidate.hash not in self._seen:
                    self._seen.add(candidate.hash)
                    fresh[candidate.hash] = candidate, item
            if fresh:
                break
        if not fresh:
            self.exhausted = True
            return []
        features = self._model.extract(self._context, [item for _, item in fresh.values()])
        for (candidate, item), matrix in zip(fresh.values(), features, strict=True):
            self._open[candidate.hash] = item, matrix
        return [candidate for candidate, _ in fresh.values()]

    def observe(self, results: list[tuple[str, float | None]]) -> None:
        """Learn from (candidate hash, median latency in seconds, or None for a fault of the candidate itself)."""
        known = [(self._open.pop(h), latency) for h, latency in results if h in self._open]
        self._model.learn(self._workload.hash, [f for (_, f), _ in known], [latency for _, latency in known])
        for (item, _), latency in known:
            if latency is not None:
                self._commit(item, latency)

    def forget(self, candidate: str) -> None:
        """A proposed candidate will not be measured (a fault of the board or the farm): teach nothing."""
        self._open.pop(candidate, None)

    def recall(self, known: list[tuple[str, str, float | None]]) -> None:
        """Know candidates of earlier runs, as (hash, trace, latency or None for its own fault): never proposed again.

        Good ones join the population and teach the cost model, as if they had been measured now.
        """
        self._seen.update(candidate for candidate, _, _ in known)
        good = []
        for candidate, trace_json, latency in known:
            if latency is not None:
                try:
                    good.append((traces.restore(trace_json, self._entry, self._target), latency))
                except InternalError as error:  # an old record that TVM takes no more must not stop a new run
                    _log.warning("%s: candidate %s is left out: %s", self._workload.name, candidate, error)
        if not good:
            return
        self._prepare(1)
        features = self._model.extract(self._context, [item for item, _ in good])
        self._model.learn(self._workload.hash, features, [latency for _, latency in good])
        for item, latency in good:
            self._commit(item, latency)

    def replay(self, trace_json: str) -> str:
        """The scheduled function that a candidate's trace leads to, in TVM's JSON."""
        return str(self._tvm.ir.save_json(traces.restore(trace_json, self._entry, self._target).sch.mod))

    def _prepare(self, count: int) -> None:
        """Point the search at `count` candidates: evolved ones once the cost model can tell them apart."""
        evolve = self._model.ready
        if self._context is None or evolve != self._evolving:
            self._context = self._make_context(evolve)
            self._evolving, self._batch = evolve, 0
        if self._batch != count:
            if self._batch:
                self._context.post_tuning()
            # TVM fixes the batch here. The search is told of no results and so never thinks that it is done.
            self._context.pre_tuning(2**30, count, self._spaces, self._database, self._tvm_model)
            self._batch = count

    def _make_context(self, evolve: bool) -> Any:
        settings = self._settings
        population = settings.population if evolve else settings.first_population
        context = self._ms.TuneContext(
            mod=self._module,
            target=self._target,
            space_generator="post-order-apply",
            search_strategy=self._ms.search_strategy.EvolutionarySearch(
                population_size=population,
                init_min_unmeasured=population // 2,
                # Evolving against scores that mean nothing yet would only cost time.
                genetic_num_iters=settings.generations if evolve else 0,
                eps_greedy=settings.eps_greedy,
            ),
            task_name=self._workload.name,
            rand_state=1 + (settings.seed * 1_000_003 + 2 * int(self._workload.hash, 16) + evolve) % (2**31 - 2),
            num_threads=settings.threads,
        )
        self._spaces = context.generate_design_space()
        return context

    def _commit(self, item: Any, latency_s: float) -> None:
        self._database.commit_tuning_record(traces.as_record(item, self._entry, self._target, latency_s))

    def _describe(self, item: Any) -> Candidate:
        import tvm_ffi

        module = item.sch.mod
        structure = int(tvm_ffi.structural_hash(module)) & (2**64 - 1)
        return Candidate(
            workload=self._workload.hash,
            hash=f"{structure:016x}",
            arguments=tuple((tuple(int(d) for d in a.shape), str(a.dtype)) for a in item.args_info),
            trace_json=traces.dump(item, self._entry, self._target),
            module_json=self._tvm.ir.save_json(module),
        )
