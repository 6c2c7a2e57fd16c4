"""Learn what is known of a core from certificates of boards that have it: `farm board calibrate-model`.

A certificate holds what the core can do, which takes the place of what its type says where that differs; and what was
counted of each program, without the two constants of the core's model, and what the board took, to which these are
fitted. How either is found out is the business of `farm.services.core_probe` and `farm.artifacts.priced`; what the
constants mean is in docs/fidelity.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from device_agent.protocol import CountedSegment, count_seconds
from farm.errors import UsageError
from farm.inventory.core_figures import find_differing, list_values
from farm.inventory.core_types import CoreType, FittedCore, find_impossible, load_plain_core_types

# What `farm board certify` writes is looked through no further than that.
_MOST_BYTES = 64 << 20
_WAITS, _CROWDINGS = np.arange(0.5, 60, 0.5), np.arange(0, 4, 0.05)
# Constants that change no program's price by more than this were not asked for by any.
_LEAST_SEEN = 1.01

# How many times as long as it was a program takes by the model, at constants: wait_cycles, crowding.
Ratio = Callable[[float, float], float]


@dataclasses.dataclass(frozen=True)
class PricedRun:
    """A program on a board with so many threads: what it took, and what was counted of it."""

    name: str
    threads: int
    measured_s: float
    hz: float
    segments: tuple[CountedSegment, ...]

    def price_s(self, core: CoreType, wait_cycles: float, crowding: float) -> float:
        """What the model says of it, the memory at its highest clock."""
        segments = [each.price(wait_cycles, crowding) for each in self.segments]
        return count_seconds(segments, core.list_costs(), self.hz, self.threads)[0]


@dataclasses.dataclass(frozen=True)
class FittedConstants:
    """`wait_cycles` and `crowding`, before and after, and how far prices are off with each: in the middle, at worst."""

    before: tuple[float, float]
    after: tuple[float, float]
    errors_before: tuple[float, float]
    errors_after: tuple[float, float]
    runs: int

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        constants = {name: dict(zip(("wait_cycles", "crowding"), getattr(self, name), strict=True)) for name in _SIDES}
        errors = {
            f"errors_{name}": dict(zip(("median", "worst"), getattr(self, f"errors_{name}"), strict=True))
            for name in _SIDES
        }
        return {"runs": self.runs} | constants | errors


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What certificates say of a core type.

    `measured` are figures in the place of the type's, `typical` what those were; `constants` is None where no program
    was priced.
    """

    core: str
    measured: Mapping[str, float]
    typical: Mapping[str, float]
    constants: FittedConstants | None
    simulated: bool
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        about = {"core": self.core, "simulated": self.simulated, "sources": list(self.sources)}
        about |= {"measured": dict(self.measured), "typical": dict(self.typical)}
        return about | (self.constants.to_dict() if self.constants else {"runs": 0})

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Write what FARM_CORE_TYPES takes of it. Raises OSError."""
        wait_cycles, crowding = self.constants.after if self.constants else (None, None)
        made = FittedCore(
            name=self.core, sources=self.sources, wait_cycles=wait_cycles, crowding=crowding, measured=self.measured
        )
        lines = ["# Written by `farm board calibrate-model`; FARM_CORE_TYPES names the folder of such files."]
        if self.simulated:
            lines.append("# Of a simulated board: this says nothing of a real one.")
        document = made.model_dump(mode="json", exclude_none=True)
        lines += [f"{key}: {json.dumps(value)}" for key, value in document.items()]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.core}.yaml"
        part = path.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(path)
        return path


_SIDES = ("before", "after")


@dataclasses.dataclass
class _Told:
    """What several certificates say of one core type."""

    runs: list[PricedRun] = dataclasses.field(default_factory=list)
    figures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sources: dict[str, None] = dataclasses.field(default_factory=dict)


def calibrate(paths: Sequence[pathlib.Path]) -> list[Fitted]:
    """What the reports at `paths` say of each core type.

    Raises UsageError for what is no report, says nothing of a core, or mixes simulated boards with real ones.
    """
    told: dict[str, _Told] = {}
    kinds = set()
    for path in paths:
        document = read_report(path)
        kinds.add(bool(document["simulated"]))
        word = "simulated " if document["simulated"] else ""
        source = f"certificate of a {word}{document['board_type']}, {document['at']}"
        for core, figures, runs in read_cores(document, path):
            of_core = told.setdefault(core, _Told())
            of_core.runs += runs
            of_core.sources[source] = None
            for name, value in figures.items():
                of_core.figures.setdefault(name, []).append(value)
    if len(kinds) > 1:
        raise UsageError("some of these reports are of simulated boards, and others are not", "Give one kind at once.")
    cores = {core.name: core for core in load_plain_core_types()}
    if unknown := sorted(told.keys() - cores.keys()):
        raise UsageError(f"there is no core type {unknown[0]!r}", f"Known: {', '.join(sorted(cores))}.")
    return [_fit(cores[name], of_core, simulated=kinds == {True}) for name, of_core in sorted(told.items())]


def read_report(path: pathlib.Path) -> dict[str, Any]:
    """A certificate. Raises UsageError."""
    try:
        if path.is_dir():
            path = path / "report.json"
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too long for a report of `farm board certify`")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON", "Give the report.json of `farm board certify`.") from error
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("tvm-farm certificate"):
        raise UsageError(f"{path} is no report of `farm board certify`")
    return document


def read_cores(document: Mapping[str, Any], path: pathlib.Path) -> list[tuple[str, dict[str, float], list[PricedRun]]]:
    """Each core that a report tells of: its figures, and the programs that were priced. Raises UsageError."""
    facts = document.get("facts", {})
    found: list[tuple[str, dict[str, float], list[PricedRun]]] = []
    try:
        if core := facts.get("core"):
            found.append((str(core["core"]), list_values(core), []))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: what it says of the core cannot be read: {error}") from error
    for _, figures, _ in found:
        if reason := next(filter(None, (find_impossible(name, value) for name, value in figures.items())), ""):
            raise UsageError(f"{path}: what it says of the core cannot be: {reason}", "Certify the board again.")
    if (facts.get("prices") or {}).get("runs"):
        name, runs = read_runs(document, path)
        found.append((name, {}, runs))
    if not found:
        raise UsageError(
            f"{path} says nothing of the board's core",
            "`farm board certify` without --no-prices does.",
        )
    return found


def read_runs(document: Mapping[str, Any], path: pathlib.Path) -> tuple[str, list[PricedRun]]:
    """The core of a report's board, and the programs that were priced. Raises UsageError."""
    prices = document["facts"]["prices"]
    try:
        runs = [
            PricedRun(
                str(each["program"]),
                int(each["threads"]),
                float(each["measured_s"]),
                float(each["hz"]),
                tuple(CountedSegment(*row) for row in each["segments"]),
            )
            for each in prices["runs"]
            if each["measured_s"] and each["segments"]
        ]
        core = str(prices["core"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: its prices cannot be read: {error}") from error
    sound = all(math.isfinite(run.measured_s) and run.measured_s > 0 and run.hz > 0 for run in runs)
    if not sound or not any(run.threads == 1 for run in runs):
        raise UsageError(f"{path}: its prices cannot be fitted to: no program ran alone, or a time is none")
    return core, runs


def list_ratios(core: CoreType, runs: Sequence[PricedRun]) -> list[Ratio]:
    """Of each run, price over time, as a function of the constants."""

    def make(run: PricedRun) -> Ratio:
        return lambda wait_cycles, crowding: run.price_s(core, wait_cycles, crowding) / run.measured_s

    return [make(run) for run in runs]


def fit_constants(alone: Sequence[Ratio], beside: Sequence[Ratio]) -> tuple[float, float]:
    """`wait_cycles` by what one thread takes, then `crowding` by the others: least squares of logarithms."""
    wait_cycles = float(min(_WAITS, key=lambda tried: _sum_squares(alone, tried, 0.0)))
    crowding = float(min(_CROWDINGS, key=lambda tried: _sum_squares(beside, wait_cycles, tried)))
    return wait_cycles, round(crowding, 3)


def _sum_squares(ratios: Sequence[Ratio], wait_cycles: float, crowding: float) -> float:
    return float(sum(math.log(ratio(wait_cycles, crowding)) ** 2 for ratio in ratios))


def _fit(core: CoreType, told: _Told, *, simulated: bool) -> Fitted:
    medians = {name: statistics.median(values) for name, values in told.figures.items()}
    figures = core.list_figures()
    measured = find_differing(medians, figures)
    typical = {name: figures[name] for name in measured}
    constants = _fit_constants(core, told.runs) if told.runs else None
    return Fitted(core.name, measured, typical, constants, simulated, tuple(told.sources))


def _fit_constants(core: CoreType, runs: Sequence[PricedRun]) -> FittedConstants:
    if core.pipeline is None:
        raise UsageError(f"there is no model of the core {core.name!r}", "Its programs cannot have been priced by one.")
    before = (core.pipeline.wait_cycles, core.pipeline.crowding)
    alone = list_ratios(core, [run for run in runs if run.threads == 1])
    beside = list_ratios(core, [run for run in runs if run.threads > 1])
    if max(ratio(_WAITS[-1], 0.0) / ratio(_WAITS[0], 0.0) for ratio in alone) < _LEAST_SEEN:
        raise UsageError(f"no program of these reports tells how long a {core.name} waits for its caches")
    wait_cycles, crowding = fit_constants(alone, beside)
    after = (wait_cycles, crowding if beside else before[1])
    errors = [[abs(ratio(*constants) - 1) for ratio in (*alone, *beside)] for constants in (before, after)]
    summed = [(statistics.median(each), max(each)) for each in errors]
    return FittedConstants(before, after, summed[0], summed[1], len(runs))
