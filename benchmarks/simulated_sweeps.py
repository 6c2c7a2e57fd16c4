"""How long sweeps of simulated boards take here, whether they say the same twice, and what a load beside them does.

    python benchmarks/simulated_sweeps.py [--parts nano,tx2,quickstart] [--runs 20] [--load 2]

`nano`: squeezenet1.1, untuned and as predicted, at all 15 CPU clocks, twice. `tx2`: tiny-cnn at all 2,028 points of a
TX2's CPU and GPU clocks. `quickstart`: the last step of `farm quickstart`, `--runs` times beside `--load` busy
processes, each time with what programs cost established anew. Programs are compiled once, before the clock starts.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import _farm
import _machine
import yaml

from farm import settings as farm_settings
from farm.artifacts.compile import UNTUNED_PIPELINE, Compiled, compile_model
from farm.artifacts.make import find_target, find_triple
from farm.connectivity.services import using_services
from farm.inventory.board_types import require_board_type
from farm.inventory.documents import require_inventory_folder
from farm.models.inputs import make_inputs
from farm.points.values import Goal
from farm.quickstart.run import sweep_virtual_board
from farm.search.tvm_env import host_target
from farm.settings import Settings
from farm.store import Store
from farm.sweep.export.document import make_document
from farm.sweep.plan.order import SweepOrder, SweepPlace
from farm.sweep.run import runner
from farm.sweep.run.programs import COMPILED, UNTUNED, SweepProgram
from farm.values import Virtual

WAIT_S = 120.0
PIPELINES = {UNTUNED: UNTUNED_PIPELINE, COMPILED: require_board_type("jetson-nano").pipeline}
# Twice as many points as clusters, since the Denver cores may be off: docs/sweeps.md.
TX2 = SweepOrder(
    "tiny-cnn", cpu_freqs=("a57=all", "denver=all"), cores="0-5/0,3-5", gpu_freqs="all", window_s=2.0, exhaustive=True
)


@dataclasses.dataclass(frozen=True)
class Made:
    """A model compiled for what virtual boards of a type run, untuned and as predicted."""

    model: _farm.Model
    compiled: Mapping[str, Compiled]
    arrays: dict[str, Any]

    def programs(self, *variants: str) -> list[SweepProgram]:
        return [SweepProgram(name, 1, self.compiled[name].library, self.arrays, "") for name in variants]


def make(name: str, board_type: str) -> Made:
    """Compile a model of the zoo."""
    model = _farm.read_model(name)
    kind = require_board_type(board_type)
    plan = find_target(kind, simulated=True)
    target, triple = plan.config or host_target(plan.cores), find_triple(kind, plan)
    compiled = {
        variant: compile_model(model.source.load(), model.shapes, target, pipeline, (), triple)
        for variant, pipeline in PIPELINES.items()
    }
    arrays = {f"arg_{index:03d}": array for index, array in enumerate(make_inputs(model.inputs, 0).values())}
    return Made(model, compiled, arrays)


def sweep(made: Made, order: SweepOrder, board_type: str, settings: Settings, store: Store) -> dict[str, Any]:
    """One sweep of a new board; its document, with the seconds that it took here."""
    store.boards.register("b", board_type, Virtual(0))
    try:
        with using_services(settings, ["b"]):
            began = time.monotonic()
            programs = made.programs(*order.variants)
            number = runner.run_sweep(
                order, SweepPlace(board_type, "b", None, WAIT_S), Goal(), False, settings, store, _machine.say, programs
            )
            seconds = time.monotonic() - began
        return make_document(store, number) | {"seconds_command": seconds}
    finally:
        store.boards.remove("b")


def read_figures(document: Mapping[str, Any]) -> list[Any]:
    """What must be the same again: every row, and every pick."""
    names = ("key", "latency_s", "power_w", "energy_j")
    return [
        [each["variant"], each["pick"] and each["pick"]["key"], [[row[name] for name in names] for row in each["rows"]]]
        for each in document["series"]
    ]


def summarise(document: Mapping[str, Any]) -> dict[str, Any]:
    """How it ended and how long that took."""
    return {
        "state": document["state"],
        "points": document["grid"]["measured"],
        "visits": sum(row["visits"] for series in document["series"] for row in series["rows"]),
        "picks": sum(series["pick"] is not None for series in document["series"]),
        "seconds_sweeping": round(document["seconds"], 2),
        "seconds_command": round(document["seconds_command"], 2),
    }


def run_nano(settings: Settings, store: Store) -> dict[str, Any]:
    """All clocks, two variants, twice."""
    made = make("squeezenet1.1", "jetson-nano")
    order = SweepOrder(
        made.model.source.name, variants=(UNTUNED, COMPILED), cpu_freqs=("all",), window_s=2.0, exhaustive=True
    )
    first, second = (sweep(made, order, "jetson-nano", settings, store) for _ in range(2))
    return {
        "first": summarise(first),
        "second": summarise(second),
        "the_same_to_the_digit": read_figures(first) == read_figures(second),
    }


def run_tx2(settings: Settings, store: Store, folder: pathlib.Path) -> dict[str, Any]:
    """Every point."""
    os.environ["FARM_BOARD_TYPES"] = str(folder)
    own = write_tx2(folder)
    return summarise(sweep(make("tiny-cnn", own), TX2, own, settings, store))


def write_tx2(folder: pathlib.Path) -> str:
    """A type like the TX2's whose boards start with all clusters online; a cluster that is off lists no clocks."""
    own = "tx2-maxn"
    kind = yaml.safe_load((require_inventory_folder() / "board_types" / "jetson-tx2.yaml").read_text())
    kind |= {"name": own, "detect": {"compatible": [f"example,{own}"]}}
    kind["simulation"] |= {"compatible": [f"example,{own}"], "model": own, "power_mode": 0}
    (folder / f"{own}.yaml").write_text(yaml.safe_dump(kind))
    return own


def run_quickstart(settings: Settings, store: Store, runs: int, load: int) -> dict[str, Any]:
    """The sweep of quickstart again and again, beside busy processes."""
    made = make("squeezenet1.1", "jetson-nano")
    ended = []
    with _machine.busy(load), tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        for index in range(runs):
            shutil.rmtree(settings.home_path / "cache" / "work", ignore_errors=True)
            began = time.monotonic()
            found = sweep_virtual_board(
                made.model.source, made.arrays, made.compiled, settings, store, _farm.Notes(), pathlib.Path(folder)
            )
            picks = sum(series["pick"] is not None for series in found["series"])
            ended.append((found["state"], picks, time.monotonic() - began))
            _machine.say(f"run {index + 1}: {found['state']}, {picks} picks, {ended[-1][2]:.1f} s")
    seconds = sorted(each[2] for each in ended)
    return {
        "runs": runs,
        "load": load,
        "runs_with_a_pick_for_both": sum(picks == len(PIPELINES) for _, picks, _ in ended),
        "states": sorted({state for state, _, _ in ended}),
        "seconds_median": round(seconds[len(seconds) // 2], 1),
        "seconds_most": round(seconds[-1], 1),
    }


def main() -> int:
    parser = _machine.parser(__doc__)
    parser.add_argument("--parts", default="nano,tx2,quickstart")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--load", type=int, default=2)
    options = parser.parse_args()
    parts = options.parts.split(",")
    runs = 1 if options.quick else options.runs
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        os.environ["FARM_HOME"] = f"{folder}/home"
        settings = farm_settings.load()
        figures: dict[str, Any] = {}
        with Store(settings.home_path / "farm.db") as store:
            if "nano" in parts:
                figures["nano_all_clocks_two_variants"] = run_nano(settings, store)
            if "tx2" in parts and not options.quick:
                figures["tx2_2028_points"] = run_tx2(settings, store, pathlib.Path(folder))
            if "quickstart" in parts:
                figures["quickstart_sweep"] = run_quickstart(settings, store, runs, options.load)
        emit("simulated_sweeps", {"parts": parts}, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
