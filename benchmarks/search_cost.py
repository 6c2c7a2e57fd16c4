"""What a proposed candidate costs the host, in core-seconds by phase, for several sizes of the evolutionary search.

Nothing is built or measured: latencies are drawn at random, which changes what is found but not what finding costs.
Default budget: about 3 minutes on two cores.
"""

from __future__ import annotations

import collections
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import _machine

import farm.settings

# (population, generations): this project's default comes from its settings; the last one is MetaSchedule's default.
SIZES = ((32, 3), (64, 3), (128, 3), (256, 3), (512, 4))
HEAVIEST = 3
# MetaSchedule's profiler names its phases so; what it counts under neither is charged to `other`.
SAMPLING = ("EvoSearch/SampleInitPopulation", "EvoSearch/PickBestFromDatabase")
EVOLVING = ("EvoSearch/Evolve/Mutation", "EvoSearch/PickWithEpsGreedy")
PHASES = ("sampling", "evolution", "features", "cost_model", "serialisation", "other")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--model", default="squeezenet1.1", help="zoo name or ONNX file (default: squeezenet1.1)")
    parser.add_argument("--rounds", type=int, default=3, help="proposals per workload and size (default: 3)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    with _machine.only_json() as emit, _machine.scratch():
        emit("search_cost", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    from farm.campaign.survey import survey_model
    from farm.inventory.board_types import require_board_type
    from farm.models.inputs import read_inputs, resolve_inputs
    from farm.models.source import resolve_model
    from farm.search import tvm_env

    tvm_env.load()
    base = farm.settings.load()
    source = resolve_model(options.model)
    inputs = resolve_inputs(read_inputs(source.load()), {})
    workloads, pipeline = survey_model(source, inputs, require_board_type("local"))
    workloads = workloads[:HEAVIEST]
    quiet = _machine.wait_until_quiet(options.quick)
    sizes = SIZES[1:2] if options.quick else SIZES
    return {
        "machine_quiet": quiet,
        "default": {"population": base.population, "generations": base.generations, "batch": base.batch},
        "pipeline": pipeline,
        "core_s_is": "processor time of all threads per candidate; medians over workloads and rounds",
        "random": first_batch(base, workloads),
        "evolved": [
            {"population": population, "generations": generations}
            | measure_size(base, workloads, population, generations, options.rounds)
            for population, generations in sizes
        ],
    }


class Meter:
    """Processor time of this process, all threads together, by phase. Phases do not nest."""

    def __init__(self) -> None:
        self.core_s: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.core_s[name] += time.process_time() - began


def metered_model(meter: Meter, seed: int, threads: int, warmup: int) -> Any:
    """The product's cost model, each of its parts timed."""
    from farm.search.cost_model import CostModel

    class Metered(CostModel):
        def extract(self, context: Any, candidates: list[Any]) -> Any:
            with meter.phase("features"):
                return super().extract(context, candidates)

        def score(self, features: Any) -> Any:
            with meter.phase("cost_model"):
                return super().score(features)

        def learn(self, workload: str, features: Any, latency_s: Any) -> None:
            with meter.phase("cost_model"):
                super().learn(workload, features, latency_s)

    return Metered(seed, threads, warmup)


def metered_search(meter: Meter, *arguments: Any) -> Any:
    """The product's search, the making of its answers timed."""
    from farm.search.strategy import WorkloadSearch

    class Metered(WorkloadSearch):
        def _describe(self, item: Any) -> Any:
            with meter.phase("serialisation"):
                return super()._describe(item)

    return Metered(*arguments)


def first_batch(base: Any, workloads: Sequence[Any]) -> dict[str, Any]:
    """Random candidates, as drawn before the cost model knows anything."""
    rows = []
    for workload in workloads:
        meter = Meter()
        model = metered_model(meter, base.seed, _machine.cores(), 1 << 30)
        search = make_search(meter, model, workload, base, base.population, base.generations)
        rows.append(propose(search, meter, base.batch))
    return summarise(rows)


def measure_size(base: Any, workloads: Sequence[Any], population: int, generations: int, rounds: int) -> dict[str, Any]:
    """Evolved candidates, once the cost model has seen some of each workload."""
    _machine.say(f"population {population}, {generations} generations")
    rows = []
    for workload in workloads:
        meter = Meter()
        model = metered_model(meter, base.seed, _machine.cores(), 2 * base.batch)
        search = make_search(meter, model, workload, base, population, generations)
        rng = random.Random(base.seed)
        while not model.ready and not search.exhausted:
            teach(search, search.propose(base.batch), rng)
        for _ in range(rounds):
            row = propose(search, meter, base.batch, rng)
            if row["candidates"]:
                rows.append(row)
    return summarise(rows)


def make_search(meter: Meter, model: Any, workload: Any, base: Any, population: int, generations: int) -> Any:
    from farm.search.strategy import SearchSettings
    from farm.search.target import make_target

    settings = SearchSettings(population=population, generations=generations, seed=base.seed, threads=_machine.cores())
    return metered_search(meter, workload, make_target(workload.target), model, settings)


def teach(search: Any, candidates: Sequence[Any], rng: random.Random) -> None:
    """Latencies between 1 and 10 ms."""
    search.observe([(candidate.hash, 10 ** rng.uniform(-3, -2)) for candidate in candidates])


def propose(search: Any, meter: Meter, count: int, rng: random.Random | None = None) -> dict[str, Any]:
    """One proposal, and what it and the learning from its results cost in all."""
    import tvm.s_tir.meta_schedule as ms

    meter.core_s.clear()
    began, began_cpu = time.perf_counter(), time.process_time()
    with ms.Profiler() as profiler:
        candidates = search.propose(count)
    wall_s = time.perf_counter() - began
    if rng is not None:
        teach(search, candidates, rng)
    total = time.process_time() - began_cpu
    core_s = dict(meter.core_s)
    rest = max(0.0, total - sum(core_s.values()))
    # The profiler knows wall time only; the rest of the processor time is shared out in its proportions.
    walls = {str(name): float(seconds) for name, seconds in profiler.get().items()}
    shares = {
        "sampling": sum(walls.get(name, 0.0) for name in SAMPLING),
        "evolution": sum(walls.get(name, 0.0) for name in EVOLVING),
    }
    known = sum(shares.values())
    for name, wall in shares.items():
        core_s[name] = rest * wall / known if known else 0.0
    core_s["other"] = 0.0 if known else rest
    return {"candidates": len(candidates), "wall_s": wall_s, "total": total, "core_s": core_s, "profile": walls}


def summarise(rows: Sequence[Any]) -> dict[str, Any]:
    """Per candidate."""
    if not rows:
        return {"proposals": 0}
    return {
        "proposals": len(rows),
        "candidates": sum(row["candidates"] for row in rows),
        "wall_s_per_candidate": _machine.spread([r["wall_s"] / r["candidates"] for r in rows], digits=3),
        "core_s_per_candidate": _machine.spread([r["total"] / r["candidates"] for r in rows], digits=3),
        "by_phase": {
            phase: _machine.spread([r["core_s"].get(phase, 0.0) / r["candidates"] for r in rows], digits=3)["median"]
            for phase in PHASES
        },
    }


if __name__ == "__main__":
    main()
