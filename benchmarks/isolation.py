"""Compare the ways of keeping the host out of a measurement's way where the host is the board (FARM_ISOLATION).

For each mode the same model is tuned with the same budget. Three fixed probe candidates are measured again and again
among the trials, and in quiet before and after: how far the former are from the latter is the error that the mode
lets into a trial. Then the models that came out are timed in turns on an idle machine.

With `own-core` the board has only half of the cores, and trials are timed on those: its probes are compared with quiet
measurements on the same cores, and its model is tuned for half of the machine. The compiled models are all timed
twice, on all cores and on the cores that `own-core` gives to the board.
Default budget: 3 modes x 2 seeds x 64 trials, about 12 minutes on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import _machine

import farm.settings
from device_agent.protocol import Engine, Limits, MeasureSpec, Outcome, Status, TensorSpec
from farm.campaign.engine.host import share_cores
from farm.values import DEFAULT_POINT

MODES = ("exclusive", "own-core", "none")
PROBED_WORKLOADS = 3
# Candidates drawn per probed workload; the fastest of them becomes the probe, since slow ones hide interference.
DRAWN = 6


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--model", default="squeezenet1.1", help="zoo name or ONNX file (default: squeezenet1.1)")
    parser.add_argument("--trials", type=int, default=64, help="per mode and seed (default: 64)")
    parser.add_argument("--seeds", type=int, default=2, help="tunings per mode (default: 2)")
    parser.add_argument("--every", type=int, default=2, help="trials per probe measurement (default: 2)")
    parser.add_argument("--quiet-samples", type=int, default=24, help="quiet measurements per run (default: 24)")
    parser.add_argument("--runs", type=int, default=60, help="timed runs of each compiled model (default: 60)")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.seeds, options.quiet_samples, options.runs = 16, 1, 6, 8
    with _machine.only_json() as emit, _machine.scratch():
        emit("isolation", vars(options), measure(options))


@dataclasses.dataclass(frozen=True)
class Probe:
    """One candidate that is measured over and over."""

    name: str
    spec: MeasureSpec
    library: bytes = dataclasses.field(repr=False)

    def with_threads(self, threads: int) -> MeasureSpec:
        return dataclasses.replace(self.spec, limits=dataclasses.replace(self.spec.limits, threads=threads))


@dataclasses.dataclass
class Samples:
    """Medians of probe measurements (probe's name, seconds), in quiet and among trials."""

    quiet: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    busy: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def relative_errors(self, which: str) -> list[float]:
        """Each measurement's distance from its probe's median in quiet, as a share of that."""
        truth = {
            name: statistics.median(value for other, value in self.quiet if other == name)
            for name in {name for name, _ in self.quiet}
        }
        return [value / truth[name] - 1 for name, value in getattr(self, which) if name in truth]


def measure(options: Any) -> dict[str, Any]:
    import _farm

    from farm.inventory.board_types import require_board_type

    base = farm.settings.load()
    model = _farm.read_model(options.model)
    board_type = require_board_type("local")
    probes = make_probes(base, model, board_type)
    runs: dict[tuple[str, int], Any] = {}
    samples = {mode: Samples() for mode in MODES}
    quiet = []
    for seed in range(options.seeds):
        for mode in MODES:
            _machine.say(f"{mode}, seed {seed}: {options.trials} trials")
            settings = dataclasses.replace(base, isolation=mode, seed=seed)
            os.environ["FARM_ISOLATION"] = mode  # for the engine's process

            threads = len(share_cores(mode)[0])
            quiet.append(_machine.wait_until_quiet(options.quick))
            measure_quietly(settings, probes, threads, options.quiet_samples // 2, samples[mode])
            with probed(probes, threads, options.every, samples[mode]):
                runs[mode, seed] = _farm.tune(model, settings, board_type, options.trials)
            quiet.append(_machine.wait_until_quiet(options.quick))
            measure_quietly(settings, probes, threads, options.quiet_samples // 2, samples[mode])
    latency, idle = time_models(base, model, runs, options)
    modes = {mode: describe(mode, runs, samples[mode], latency, options.seeds) for mode in MODES}
    return {
        "machine_quiet": all([*quiet, idle]),
        "probes": [{"workload": probe.name, "bytes": len(probe.library)} for probe in probes],
        "probe_error_is": "relative to the same probe's median in quiet on the same cores; bias is the median error, "
        "q10 and q90 its deciles, abs_p90 what nine in ten measurements stay below",
        "modes": modes,
        "conclusion": conclude(modes),
    }


def make_probes(base: Any, model: Any, board_type: Any) -> list[Probe]:
    """For each of the heaviest workloads the fastest of some random candidates, as a library."""
    import _farm

    from farm.search import tvm_env
    from farm.search.build import builder
    from farm.search.target import host_target
    from farm.search.tuners.campaign_search import CampaignSearch
    from farm.search.tuners.tasks import SearchTask, derive_traits

    _machine.say("making probes")
    tvm_env.load()
    target = host_target(_machine.cores())
    workloads = model.prepare(target, board_type.pipeline)
    search = CampaignSearch("random", None, 0, base.population, base.generations, _machine.cores())
    drawn: list[Probe] = []
    for workload in workloads[:PROBED_WORKLOADS]:
        search.open(workload.hash, SearchTask(workload, "one", DEFAULT_POINT, derive_traits(target)))
        for candidate in search.propose(workload.hash, DRAWN)[0]:
            spec = MeasureSpec(
                arguments=tuple(TensorSpec(shape, dtype) for shape, dtype in candidate.arguments),
                number=base.measure_number,
                repeat=base.measure_repeat,
                min_repeat_s=base.measure_min_repeat_s,
                limits=Limits(base.measure_timeout_s, base.measure_memory_bytes),
            )
            with contextlib.suppress(Exception):  # a random candidate need not compile
                drawn.append(Probe(workload.name, spec, builder.build_candidate(candidate.module_json, target)))
    best: dict[str, tuple[float, Probe]] = {}
    with _farm.quiet_board(base) as session:
        for probe in drawn:
            latency = median_s(session.measure(probe.with_threads(_machine.cores()), probe.library))
            if latency is not None:
                best[probe.name] = min(best.get(probe.name, (latency, probe)), (latency, probe), key=lambda one: one[0])
    return [probe for _, probe in best.values()]


def median_s(outcome: Outcome) -> float | None:
    return statistics.median(outcome.latency_s) if outcome.status is Status.OK else None


def measure_quietly(settings: Any, probes: Sequence[Probe], threads: int, count: int, into: Samples) -> None:
    """Measure probes in turns on the cores that the board has in this mode, with nothing else going on."""
    import _farm

    with _farm.quiet_board(settings) as session:
        for index in range(count):
            probe = probes[index % len(probes)]
            if (latency := median_s(session.measure(probe.with_threads(threads), probe.library))) is not None:
                into.quiet.append((probe.name, latency))


@contextlib.contextmanager
def probed(probes: Sequence[Probe], threads: int, every: int, into: Samples) -> Iterator[None]:
    """Have the board held in the block measure a probe before every so many trials."""
    from farm.campaign.engine import boards, engine_board
    from farm.crew.held_board import Ended, HeldBoard, Job, Request, measuring

    orders = [(probe.name, measuring(probe.with_threads(threads), probe.library)) for probe in probes]

    class ProbedBoard(HeldBoard):
        """Puts a probe in front of trials, and keeps what came of it; the engine knows nothing of it."""

        def __init__(self) -> None:
            super().__init__()
            self._trials = 0

        def ask(self, request: Request) -> Future[Ended]:
            if request.job in trials:
                if self._trials % every == 0:
                    name, probe = orders[self._trials // every % len(orders)]
                    asked = super().ask(dataclasses.replace(request, job=probe))
                    asked.add_done_callback(functools.partial(note_probe, name))
                self._trials += 1
            return super().ask(request)

    def note_probe(name: str, asked: Future[Ended]) -> None:
        found = None if asked.cancelled() else asked.result().result
        if isinstance(found, Outcome) and (latency := median_s(found)) is not None:
            into.busy.append((name, latency))

    trials: set[Job] = set()

    def note_trial(spec: MeasureSpec, library: bytes) -> Job:
        trials.add(job := measuring(spec, library))
        return job

    with mock.patch.object(engine_board, "HeldBoard", ProbedBoard), mock.patch.object(boards, "measuring", note_trial):
        yield


def time_models(
    base: Any, model: Any, runs: Mapping[tuple[str, int], Any], options: Any
) -> tuple[dict[tuple[str, int, str], float], bool]:
    """Median latency of each compiled model on all cores and on half of them."""
    import _farm

    every_core = max(int(run.target["num-cores"]) for run in runs.values())
    threads = {"all_cores": every_core, "half": min(int(run.target["num-cores"]) for run in runs.values())}
    programs = {
        f"{mode} {seed} {label}": _farm.Program(Engine.RELAX_VM, run.library, count)
        for label, count in threads.items()
        for (mode, seed), run in runs.items()
    }
    _machine.say(f"timing {len(programs)} programs in turns")
    timed = _farm.time_programs(base, model, programs, options.runs, options.quick)
    keys = [(mode, seed, label) for mode, seed in runs for label in threads]
    return {key: statistics.median(timed[" ".join(map(str, key))].samples) for key in keys}, timed.quiet


def describe(
    mode: str, runs: Mapping[tuple[str, int], Any], samples: Samples, latency: Mapping[Any, float], seeds: int
) -> dict[str, Any]:
    mine = [runs[mode, seed] for seed in range(seeds)]
    good = [row for run in mine for row in run.trials if row["status"] == Status.OK]
    widths = [
        (max(values) - min(values)) / statistics.median(values)
        for values in (row["outcome"]["latency_s"] for row in good)
    ]
    return {
        "board_cores": int(mine[0].target["num-cores"]),
        "width_within_trials": _machine.spread(widths, digits=3),
        "probe_error_in_quiet": errors(samples.relative_errors("quiet")),
        "probe_error_among_trials": errors(samples.relative_errors("busy")),
        "trials_per_minute": _machine.spread([run.tuned.trials_per_minute for run in mine], digits=3),
        "seconds_tuning": _machine.spread([run.tuned.seconds_tuning for run in mine], digits=3),
        "trials": [run.tuned.trials for run in mine],
        "model_latency_ms": {
            label: _machine.spread([latency[mode, seed, label] for seed in range(seeds)], 1e3)
            for label in ("all_cores", "half")
        },
    }


def errors(values: Sequence[float]) -> dict[str, Any]:
    if len(values) < 2:
        return {"count": len(values)}
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    absolute = statistics.quantiles(map(abs, values), n=10, method="inclusive")
    figures = {"bias": statistics.median(values), "q10": deciles[0], "q90": deciles[-1], "abs_p90": absolute[-1]}
    return {"count": len(values)} | {key: round(value, 4) for key, value in figures.items()}


def conclude(modes: Mapping[str, Any]) -> dict[str, Any]:
    """Which mode is best at what."""

    def best(figure: Any, take: Any = min) -> str:
        known = {mode: figure(facts) for mode, facts in modes.items()}
        return str(take((mode for mode in known if known[mode] is not None), key=lambda mode: known[mode]))

    return {
        "least_bias": best(lambda m: abs(m["probe_error_among_trials"]["bias"])),
        "least_error": best(lambda m: m["probe_error_among_trials"]["abs_p90"]),
        "narrowest_trials": best(lambda m: m["width_within_trials"]["median"]),
        "most_trials_per_minute": best(lambda m: m["trials_per_minute"]["median"], max),
        "fastest_model_on_all_cores": best(lambda m: m["model_latency_ms"]["all_cores"]["median"]),
    }


if __name__ == "__main__":
    main()
