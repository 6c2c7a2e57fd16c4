"""What a trial costs the host in core-seconds, by phase: our search and builds against stock MetaSchedule's.

Both sides search the same convolution and the same dense layer in this process, one after the other, and compile what
they propose. Nothing is measured: latencies are drawn at random, which changes what is found, not what finding costs. A
part of the trials comes first and is not counted, so that both cost models are at work. Stock is its evolutionary
search and XGBoost model with their defaults, 64 candidates at a time, and LocalBuilder's own build and export without
its processes, which cost more. Imports count on neither side. Default budget: about 6 minutes on two cores.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _campaigns
import _machine

import farm.settings

PHASES = ("proposing", "learning", "compiling", "linking")
# Stock's model ranks at random until it knows 100 candidates; ours of a campaign ranks after 16.
STOCK_BATCH, STOCK_WARM_BATCHES, OUR_WARM_TRIALS = 64, 2, 32

KINDS = ("conv2d", "dense")
SEED = 0


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=128, help="counted, per workload and side (default: 128)")
    parser.add_argument("--builds", type=int, default=24, help="of these compiled, per workload and side (default: 24)")
    parser.add_argument("--population", type=int, default=512, help="stock's (default: 512, its own default)")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.builds, options.population = 8, 2, 32
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("host_cost", vars(options) | settings_of(options), measure(options, folder))


def settings_of(options: Any) -> dict[str, Any]:
    base = farm.settings.load()
    return {
        "ours": {"population": base.population, "generations": base.generations, "batch": base.batch, "tuner": "xgb"},
        "stock": {
            "search": f"evolutionary, population {options.population}, 4 generations; the defaults are 512 and 4",
            "cost_model": "xgb: the default",
            "batch": stock_batch(options),
            "export": "tar of objects, linked on the board: the default",
        },
    }


def stock_batch(options: Any) -> int:
    return min(STOCK_BATCH, options.trials)


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    from farm.campaign.plan_models import survey_model
    from farm.inventory.board_types import require_board_type
    from farm.models.inputs import read_inputs, resolve_inputs
    from farm.models.source import resolve_model
    from farm.search import tvm_env

    tvm_env.load()
    source = resolve_model(str(_campaigns.make_model(folder / "two.onnx", 56, ("conv", "dense"))))
    inputs = resolve_inputs(read_inputs(source.load()), {})
    workloads, pipeline = survey_model(source, inputs, require_board_type("local"))
    workloads = [workload for workload in workloads if workload.kind in KINDS][: 1 if options.quick else None]
    quiet = _machine.wait_until_quiet(options.quick)
    rows = []
    for workload in workloads:
        _machine.say(f"{workload.name}: ours")
        ours = run_ours(workload, options)
        _machine.say(f"{workload.name}: stock; minutes of silence follow")
        stock = run_stock(workload, options, folder)
        ratio = _machine.round_to(stock["total"] / ours["total"], 3)
        rows.append({"workload": workload.name, "ours": ours, "stock": stock, "ratio": ratio})
    totals = {side: sum(row[side]["total"] for row in rows) / len(rows) for side in ("ours", "stock")}
    return {
        "machine_quiet": quiet,
        "pipeline": pipeline,
        "core_s_is": "processor time of all threads and of the linker, per trial",
        "core_s_per_trial": {side: _machine.round_to(total, 3) for side, total in totals.items()},
        "ratio": _machine.round_to(totals["stock"] / totals["ours"], 3),
        "workloads": rows,
    }


class Meter:
    """Processor time of this process and of the children that it waited for, by phase. Phases do not nest."""

    def __init__(self) -> None:
        self.core_s: dict[str, float] = collections.defaultdict(float)
        self.counts: collections.Counter[str] = collections.Counter()
        self.counted = False

    @contextlib.contextmanager
    def phase(self, name: str, count: int = 0) -> Iterator[None]:
        began = spent_s()
        try:
            yield
        finally:
            if self.counted:
                self.core_s[name] += spent_s() - began
                self.counts[name] += count

    def summarise(self, wall_s: float) -> dict[str, Any]:
        """Per trial: proposing and learning shared out over all of them, building over those that were built."""
        each = {name: self.core_s[name] / max(1, self.counts[name]) for name in PHASES}
        return {
            "trials": self.counts["proposing"],
            "builds": self.counts["compiling"],
            "by_phase": {name: _machine.round_to(value, 3) for name, value in each.items()},
            "total": _machine.round_to(sum(each.values()), 4),
            "wall_s": round(wall_s, 1),
        }


def spent_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def draw(rng: random.Random) -> float:
    """A latency between 1 and 10 ms."""
    return 10 ** rng.uniform(-3, -2)


def run_ours(workload: Any, options: Any) -> dict[str, Any]:
    """A campaign's search and the compiler behind it, fed as the engine feeds them."""
    from farm.search.codegen import lowering
    from farm.search.tuners import campaign_search, decisions

    base, meter, rng = farm.settings.load(), Meter(), random.Random(SEED)
    search = campaign_search.CampaignSearch("xgb", None, SEED, base.population, base.generations, _machine.cores())
    search.open("key", decisions.SearchTask(workload, "local", "default", decisions.derive_traits(workload.target)))
    began, warm, done = time.monotonic(), min(OUR_WARM_TRIALS, options.trials), 0
    while done < warm + options.trials:
        meter.counted = done >= warm
        with meter.phase("proposing"):
            candidates, exhausted = search.propose("key", base.batch)
        meter.counts["proposing"] += len(candidates) if meter.counted else 0
        if exhausted or not candidates:
            break
        done += len(candidates)
        if meter.counted:
            left = options.builds - meter.counts["compiling"]
            with linking(lowering, meter):
                for candidate in candidates[: max(0, left)]:
                    with without("linking", meter), meter.phase("compiling", 1):
                        lowering.build_candidate(candidate.module_json, workload.target)
        with meter.phase("learning", len(candidates)):
            search.observe("key", [(candidate.hash, draw(rng)) for candidate in candidates])
    return meter.summarise(time.monotonic() - began)


@contextlib.contextmanager
def linking(builder: Any, meter: Meter) -> Iterator[None]:
    """Charge the linker's time to a phase of its own."""
    link: Callable[..., Any] = builder.linker.link_candidate

    def metered(*arguments: Any) -> Any:
        with meter.phase("linking", 1):
            return link(*arguments)

    builder.linker.link_candidate = metered
    try:
        yield
    finally:
        builder.linker.link_candidate = link


@contextlib.contextmanager
def without(inner: str, meter: Meter) -> Iterator[None]:
    """Take what `inner` cost inside of the block off the phase that surrounds it."""
    before = meter.core_s[inner]
    try:
        yield
    finally:
        if meter.counted:
            meter.core_s["compiling"] -= meter.core_s[inner] - before


def run_stock(workload: Any, options: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The loop of `ms.tune_tasks` for one task, with its own parts."""
    import tvm.s_tir.meta_schedule as ms
    from tvm.s_tir.meta_schedule.builder import local_builder

    from farm.search import traces
    from farm.search.tvm_env import make_target

    tvm, meter, rng = __import__("tvm"), Meter(), random.Random(SEED)
    module, target = tvm.ir.load_json(workload.module_json), make_target(workload.target)
    database = ms.database.MemoryDatabase()
    entry, model = database.commit_workload(module), ms.cost_model.XGBModel()
    context = ms.TuneContext(
        mod=module,
        target=target,
        space_generator="post-order-apply",
        search_strategy=ms.search_strategy.EvolutionarySearch(population_size=options.population),
        task_name=workload.kind,
        rand_state=SEED + 1,
        num_threads="physical",
    ).clone()
    batch = stock_batch(options)
    context.pre_tuning(1 << 20, batch, context.generate_design_space(), database, model)
    began, warm, done = time.monotonic(), (1 if options.quick else STOCK_WARM_BATCHES) * batch, 0
    while done < warm + options.trials:
        meter.counted = done >= warm
        with meter.phase("proposing"):
            candidates = list(context.generate_measure_candidates() or ())
        meter.counts["proposing"] += len(candidates) if meter.counted else 0
        if not candidates:
            break
        done += len(candidates)
        if meter.counted:
            left = max(0, options.builds - meter.counts["compiling"])
            build_stock(local_builder, meter, [each.sch.mod for each in candidates[:left]], target)
        latencies = [draw(rng) for _ in candidates]
        results = [ms.runner.RunnerResult(run_secs=[latency], error_msg=None) for latency in latencies]
        with meter.phase("learning", len(candidates)):
            context.notify_runner_results(candidates, results)
            model.update(context, candidates, results)
            for item, latency in zip(candidates, latencies, strict=True):
                database.commit_tuning_record(traces.as_record(item, entry, target, latency))
    return meter.summarise(time.monotonic() - began)


def build_stock(local_builder: Any, meter: Meter, modules: Sequence[Any], target: Any) -> None:
    """What a worker of LocalBuilder does with each."""
    for module in modules:
        with meter.phase("compiling", 1):
            built = local_builder.default_build(module, target, None)
        with meter.phase("linking", 1):
            path = local_builder.default_export(built)
        shutil.rmtree(pathlib.Path(path).parent)


if __name__ == "__main__":
    main()
