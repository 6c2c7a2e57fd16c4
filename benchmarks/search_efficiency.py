"""How many trials the search needs to come within 5 % of what stock MetaSchedule finds with its whole budget.

Stock is its evolutionary search and its XGBoost cost model with their defaults, told the same latencies. Ours starts
cold, and warm from a random search on another board type. Both types are this machine: they differ in their target
(width of vectors), so that a schedule's latency differs too. A candidate runs on one thread and is timed by its
processor time, the least of several samples, so that other work here matters little; its latency is kept by its hash,
so that it is the same for both sides. Nothing here measures how long searching takes.
Default budget: 3 workloads x 3 seeds x 64 trials, about half an hour on two cores.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import _machine

PIPELINE = "graph/2"
WORKLOADS = {
    "mobilenet_v2": ("depthwise_conv2d_add_clip 3x3 28x28x192>192", "conv2d_add 1x1 28x28x144>32"),
    "resnet18": ("conv2d_add_relu 3x3/2 28x28x128>256",),
}
WITHIN = 1.05
SAMPLES, LEAST_S, MOST_COPIES = 5, 0.004, 64
# Types of boards: this machine with all of its vectors, and with those of every x86-64.
TYPES = {"wide": {}, "narrow": {"mcpu": "x86-64-v2"}}
FOREIGN_SEED = 1000


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=64, help="stock's budget per workload (default: 64)")
    parser.add_argument("--batch", type=int, default=8, help="candidates per proposal of ours (default: 8)")
    parser.add_argument("--stock-batch", type=int, default=32, help="of stock's; its own default is 64 (default: 32)")
    parser.add_argument("--foreign", type=int, default=64, help="trials on the other board type (default: 64)")
    parser.add_argument("--seeds", type=int, default=3, help="how often all is done (default: 3)")
    parser.add_argument("--tuner", default="xgb", help="ours (default: xgb)")
    parser.add_argument("--loss", default="", help="of the cost model (default: the product's)")
    parser.add_argument("--drawn", type=int, default=96, help="random schedules for what vectors tell (default: 96)")
    parser.add_argument("--only", default="", help="workloads whose name contains this (default: all three)")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.stock_batch, options.foreign, options.seeds, options.drawn = 16, 8, 16, 1, 16
    # Candidates run alone; TVM reads this when it loads.
    os.environ["TVM_NUM_THREADS"] = "1"
    with _machine.only_json() as emit, _machine.scratch():
        emit("search_efficiency", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    from farm.search import tvm_env

    tvm_env.load()
    host = tvm_env.host_target(1)
    types = {name: host | changes for name, changes in TYPES.items()}
    timer = Timer(options.quick)
    rows, vectors = [], {}
    wide, narrow = (make_workloads(types[name]) for name in ("wide", "narrow"))
    for mine, other in zip(wide, narrow, strict=True):
        if options.only not in mine.name:
            continue
        if options.drawn:
            vectors[mine.name] = judge_vectors(options, timer, mine)
            _machine.say(f"{mine.name}: {vectors[mine.name]}")
        for seed in range(options.seeds):
            rows.append(compare(options, timer, mine, other, seed))
            _machine.say(f"{mine.name} seed {seed}: {rows[-1]}")
    return {
        "trials_is": "until within 5 % of the best of stock's whole budget; null: not within the same budget",
        "types": {"tuned": "wide", "other": "narrow", "targets": types},
        "runs": rows,
        "workloads": {name: summarise([r for r in rows if r["workload"] == name]) for name in names_of(rows)},
        "all": summarise(rows) if rows else None,
        "vectors": vectors,
        "timed": timer.count,
    }


def names_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["workload"] for row in rows))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Trials as shares of stock's budget; a run that never came there counts as the whole budget."""
    result: dict[str, Any] = {"runs": len(rows)}
    for side in ("stock", "cold", "warm"):
        shares = [(row[side]["trials"] or row["budget"]) / row["budget"] for row in rows]
        result[side] = {
            "share_of_budget": _machine.spread(shares),
            "never": sum(row[side]["trials"] is None for row in rows),
            "best_over_stocks": _machine.spread([row[side]["best_s"] / row["stock"]["best_s"] for row in rows]),
        }
    return result


def make_workloads(config: dict[str, Any]) -> list[Any]:
    """Real ones, as the models' import leaves them: small and large, none of which Winograd's algorithm takes."""
    import _farm

    found = []
    for name, wanted in WORKLOADS.items():
        by_name = {each.name: each for each in _farm.read_model(name).prepare(config, PIPELINE)}
        found += [by_name[each] for each in wanted]
    return found


@dataclasses.dataclass
class _Program:
    """A function and its arguments in turns; `calls` is how many last long enough to be timed."""

    function: Any
    turns: Iterator[list[Any]]
    calls: int = 1

    def sample(self) -> float:
        """Processor seconds of a call."""
        while True:
            began = time.process_time()
            for _ in range(self.calls):
                self.function(*next(self.turns))
            taken = time.process_time() - began
            if taken >= LEAST_S:
                return taken / self.calls
            self.calls = max(2 * self.calls, int(1.2 * self.calls * LEAST_S / max(taken, 1e-6)))


class Timer:
    """Builds and times candidates; each once.

    With `cold_bytes` the second argument, a convolution's weights, is one of copies of so many bytes in all, in turns:
    in a model, weights come from beyond L2.
    """

    def __init__(self, quick: bool, cold_bytes: int = 0, samples: int = SAMPLES) -> None:
        self._cold_bytes = cold_bytes
        self._latency_s: dict[tuple[str, str], float | None] = {}
        self._samples = 2 if quick else samples
        self.count = 0
        # Processor seconds that building and timing took.
        self.seconds = 0.0

    def time(self, workload: Any, candidate: str, module_json: str, arguments: Any) -> float | None:
        """Processor seconds of one call; None where it does not build or run."""
        [seconds] = self.time_in_turns(workload, [(candidate, module_json, arguments)])
        return seconds

    def time_in_turns(self, workload: Any, candidates: Sequence[tuple[str, str, Any]]) -> list[float | None]:
        """The same of several, of which each is described as above: the least of what each takes, in turns.

        What else a machine does for seconds at a time is then the same for all.
        """
        began = time.process_time()
        loaded: dict[tuple[str, str], _Program | None] = {}
        for candidate, module_json, arguments in candidates:
            key = workload.hash, candidate
            if key not in self._latency_s and key not in loaded:
                self.count += 1
                loaded[key] = self._load(workload, module_json, arguments)
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in loaded}
        for _ in range(self._samples):
            for key, program in loaded.items():
                if program is not None:
                    taken[key].append(program.sample())
        self._latency_s |= {key: min(samples, default=None) for key, samples in taken.items()}
        self.seconds += time.process_time() - began
        return [self._latency_s[workload.hash, candidate] for candidate, _, _ in candidates]

    def _load(self, workload: Any, module_json: str, arguments: Any) -> _Program | None:
        import numpy as np
        import tvm

        from farm.search.codegen import lowering

        random = np.random.default_rng(0)
        try:
            library = lowering.build_candidate(module_json, workload.target)
        except (RuntimeError, ValueError, TypeError):
            return None
        with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
            path = pathlib.Path(folder) / "candidate.so"
            path.write_bytes(library)
            function = tvm.runtime.load_module(str(path))["main"]
        tensors = [tvm.runtime.tensor(random.standard_normal(shape).astype(dtype)) for shape, dtype in arguments]
        function(*tensors)
        return _Program(function, itertools.cycle(self._list_copies(tensors)))

    def _list_copies(self, tensors: list[Any]) -> list[list[Any]]:
        import tvm

        if not self._cold_bytes or len(tensors) < 3:
            return [tensors]
        first, weights, *others = tensors
        values = weights.numpy()
        count = min(MOST_COPIES, max(1, self._cold_bytes // values.nbytes))
        return [tensors, *([first, tvm.runtime.tensor(values), *others] for _ in range(count - 1))]


def judge_vectors(options: Any, timer: Timer, workload: Any) -> dict[str, Any]:
    """What the length of vectors tells of random schedules: its rank correlation with speed, and the best of four
    schedules (mean) of the quarter with the longest, over the best of any four.
    """
    import numpy as np

    from farm.search.tuners import strategies
    from farm.search.tuners.cost_model import measure_vectors
    from farm.search.tuners.history import TaskHistory
    from farm.search.tuners.schedule_space import ScheduleSpace
    from farm.search.tuners.warm_start import spearman

    history = TaskHistory(ScheduleSpace(workload, 1), traits_of(workload), FOREIGN_SEED, "vectors")
    drawn = strategies.draw_new(history, options.drawn)
    described = [history.space.describe(each) for each in drawn]
    latencies = [timer.time(workload, each.hash, each.module_json, each.arguments) for each in described]
    known = [(measure_vectors(e.features), latency) for e, latency in zip(drawn, latencies, strict=True) if latency]
    vectors, times = np.array(known).T
    quarter = times[np.argsort(-vectors, kind="stable")[: len(times) // 4]]
    rng = np.random.default_rng(0)

    def best_of_four(values: Any) -> float:
        return float(np.mean([rng.choice(values, 4, replace=False).min() for _ in range(1000)]))

    return {
        "schedules": len(known),
        "rank_correlation": round(spearman(vectors, -times), 2),
        "best_of_four": round(best_of_four(quarter) / best_of_four(times), 2),
    }


def compare(options: Any, timer: Timer, mine: Any, other: Any, seed: int) -> dict[str, Any]:
    began = time.process_time()
    stock = run_stock(options, timer, mine, seed)
    goal = WITHIN * min(stock)
    cold, _ = run_ours(options, timer, mine, seed, [])
    foreign = find_foreign(options, timer, other, seed)
    warm, warm_note = run_ours(options, timer, mine, seed, foreign)
    sides = {"stock": stock, "cold": cold, "warm": warm}
    return {
        "workload": mine.name,
        "seed": seed,
        "budget": options.trials,
        **{
            side: {"trials": _machine.trials_until(latencies, goal), "best_s": _machine.round_to(min(latencies))}
            for side, latencies in sides.items()
        },
        "curve": {
            side: [_machine.round_to(min(found[: n + 1])) for n in range(len(found))] for side, found in sides.items()
        },
        "warm_start": warm_note,
        "processor_s": round(time.process_time() - began),
    }


def traits_of(workload: Any) -> Any:
    from farm.search.tuners.decisions import derive_traits

    return derive_traits(workload.target)


def run_ours(options: Any, timer: Timer, workload: Any, seed: int, foreign: list[Any]) -> tuple[list[float], str]:
    """The campaign's search with stock's budget."""
    from farm.search.tuners.campaign_search import CampaignSearch
    from farm.search.tuners.decisions import SearchTask

    base = _settings()
    search = CampaignSearch(options.tuner, options.loss or None, seed, base.population, base.generations, 1)
    search.open("t", SearchTask(workload, "wide", "default", traits_of(workload)))
    note = str(search.warm_start("t", foreign)) if foreign else ""
    latencies: list[float] = []
    while len(latencies) < options.trials:
        candidates, _ = search.propose("t", options.batch)
        if not candidates:
            break
        results = [(c.hash, timer.time(workload, c.hash, c.module_json, c.arguments)) for c in candidates]
        search.observe("t", results)
        latencies += [float("inf") if latency is None else latency for _, latency in results]
    return latencies[: options.trials], note


def find_foreign(options: Any, timer: Timer, workload: Any, seed: int) -> list[Any]:
    """What a search for the other type of boards left in the store."""
    from farm.search.tuners.campaign_search import CampaignSearch
    from farm.search.tuners.decisions import ForeignTrial, SearchTask

    base = _settings()
    traits = traits_of(workload)
    search = CampaignSearch("xgb", None, FOREIGN_SEED + seed, base.population, base.generations, 1)
    search.open("f", SearchTask(workload, "narrow", "default", traits))
    trials: list[Any] = []
    for _ in range(options.foreign // options.batch):
        candidates, _ = search.propose("f", options.batch)
        results = [(c.hash, timer.time(workload, c.hash, c.module_json, c.arguments)) for c in candidates]
        search.observe("f", results)
        trials += [
            ForeignTrial(workload, "narrow", "default", traits, c.hash, c.trace_json, latency)
            for c, (_, latency) in zip(candidates, results, strict=True)
            if latency is not None
        ]
    return trials


def run_stock(options: Any, timer: Timer, workload: Any, seed: int) -> list[float]:
    """MetaSchedule as `tune_tasks` drives it, but for the measuring."""
    import tvm.s_tir.meta_schedule as ms
    import tvm_ffi
    from tvm import ir

    from farm.search.tvm_env import make_target

    module, target = ir.load_json(workload.module_json), make_target(workload.target)
    context = ms.TuneContext(
        module,
        target=target,
        space_generator="post-order-apply",
        search_strategy="evolutionary",
        task_name=workload.name,
        rand_state=1 + seed,
        num_threads=_machine.cores(),
    )
    database, model = ms.database.MemoryDatabase(), ms.cost_model.XGBModel()
    entry = database.commit_workload(module)
    context.pre_tuning(options.trials, options.stock_batch, context.generate_design_space(), database, model)
    latencies: list[float] = []
    while len(latencies) < options.trials and (items := context.generate_measure_candidates()):
        results = []
        for item in items:
            structure = f"{int(tvm_ffi.structural_hash(item.sch.mod)) & (2**64 - 1):016x}"
            arguments = [(tuple(int(d) for d in a.shape), str(a.dtype)) for a in item.args_info]
            latency = timer.time(workload, structure, ir.save_json(item.sch.mod), arguments)
            latencies.append(float("inf") if latency is None else latency)
            results.append(
                ms.runner.RunnerResult(None if latency is None else [latency], None if latency else "failed")
            )
            if latency is not None:
                database.commit_tuning_record(
                    ms.database.TuningRecord(item.sch.trace, entry, [latency], target, item.args_info)
                )
        context.notify_runner_results(items, results)
        model.update(context, items, results)
    return latencies


def _settings() -> Any:
    import farm.settings

    return farm.settings.load()


if __name__ == "__main__":
    main()
