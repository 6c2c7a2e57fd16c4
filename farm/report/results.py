"""Figures of kept results (`store.results`): what each program took, compared between two results, and costs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from device_agent.protocol import Engine
from farm.errors import UsageError
from farm.store.results import StoredResult
from farm.values import BENCH, EVALUATE, PROGRAM

OURS = "tvm-farm"
# Scores with their headings, in the order of their columns: shares of 1, shown in percent, except errors.
SCORES = {"top1": "Top 1 (%)", "top5": "Top 5 (%)", "map50": "mAP 50 (%)", "map": "mAP (%)", "error": "Error"}
_PRICE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{3})\s*")
_BATTERY = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(Wh|kWh|J|kJ)\s*")
_JOULES = {"Wh": 3600.0, "kWh": 3.6e6, "J": 1.0, "kJ": 1e3}
_A_MILLION = 1e6
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One program's figures of one result; a rival is another engine.

    Latency (s, with the ends of its 95 % interval) is of a whole batch. `doubt` says why not to rely on it, "" where
    nothing does.
    """

    code: str
    is_rival: bool
    precision: str
    batch: int
    median_s: float
    low_s: float
    high_s: float
    energy_j: float | None = None
    size: int | None = None
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    doubt: str = ""

    @property
    def fps(self) -> float:
        """Inferences per second."""
        return self.batch / self.median_s


def say_score(name: str, value: float) -> str:
    """Return a score for people."""
    return f"{value:.2g}" if name == "error" else f"{value:.1%}".removesuffix("%")


def say_latency(figure: Figure) -> str:
    """Return a latency in ms, marked where it is doubtful."""
    return f"{figure.median_s * 1e3:.3f}{' (doubtful)' if figure.doubt else ''}"


def read_doubt(result: StoredResult) -> str:
    """Return why not to rely on a result's latencies; "" where nothing was found against them."""
    return str(_read_model(result).get("doubt") or "")


def _read_model(result: StoredResult) -> Mapping[str, Any]:
    return (result.document.get("models") or [{}])[0] if result.kind == BENCH else result.document


def list_figures(result: StoredResult) -> list[Figure]:
    """Return the figures of a result's programs, ours first; none, with a warning, of one that cannot be read."""
    try:
        return read_figures(result)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        _log.warning("result %d cannot be read (`farm store check` says more): %r", result.id, error)
        return []


def read_figures(result: StoredResult) -> list[Figure]:
    """As `list_figures`, but raise LookupError, TypeError, ValueError or AttributeError."""
    document, read = result.document, functools.partial(_read, read_doubt(result))
    if result.kind == BENCH:
        (model,) = document["models"]
        rows = [(name, row) for name, row in model["variants"].items() if row["latency_s"]]
        return [read(name, row, str(model.get("precision", "float32")), model.get("batch") or 1) for name, row in rows]
    if result.kind == EVALUATE:
        rows = [(OURS, row) for row in document["rows"] if row["latency_s"]]
        return [read(name, row, row["precision"], 1, row.get("scores", {})) for name, row in rows]
    if result.kind == PROGRAM:
        return [read(PROGRAM, document, "", 1)]
    return [read(OURS, {**document, "latency_s": document["latency"]}, str(document.get("precision", "float32")), 1)]


def _read(
    doubt: str, name: str, row: Mapping[str, Any], precision: str, batch: int, scores: Mapping[str, Any] | None = None
) -> Figure:
    latency = row["latency_s"]
    return Figure(
        row.get("label") or name,
        name in set(map(str, Engine)),
        str(row.get("precision") or precision),
        int(row.get("batch") or batch),
        float(latency["median"]),
        float(latency["ci_low"]),
        float(latency["ci_high"]),
        row.get("energy_j"),
        row.get("bytes"),
        {key: float(scores[key]) for key in SCORES if scores and isinstance(scores.get(key), (int, float))},
        doubt,
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """A program in two results: the second latency over the first, with the ends that both intervals allow.

    `energy` is the second energy over the first, None where one has none. `unlike`: the conditions differ.
    """

    one: Figure
    other: Figure
    ratio: float
    low: float
    high: float
    energy: float | None
    unlike: bool = False

    @property
    def verdict(self) -> str:
        """Return faster, slower, "tie" where the intervals allow both, "doubtful" or "not judged"."""
        if self.unlike:
            return "not judged"
        if self.one.doubt or self.other.doubt:
            return "doubtful"
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "tie"


def list_differences(one: StoredResult, other: StoredResult) -> list[str]:
    """Return what differs between two results beside their latencies: model, board type, device and conditions."""
    facts = _list_conditions(one), _list_conditions(other)
    known = [(name, first, facts[1][name]) for name, first in facts[0].items() if first and facts[1][name]]
    return [f"{name}: {first}, {second}" for name, first, second in known if first != second]


def _list_conditions(result: StoredResult) -> dict[str, str]:
    document, model = result.document, _read_model(result)
    return {
        "model": result.model,
        "SHA-256 of the model": str(model.get("sha256") or "")[:12],
        "board type": result.board_type,
        "simulated": "yes" if result.simulated else "no",
        "device": result.device,
        "operating point": str(document.get("operating_point") or ""),
        "clocks": str(document.get("clocks") or ""),
        "threads": str(document.get("threads") or ""),
        "instances": str(document.get("instances") or 1),
    }


def compare(one: StoredResult, other: StoredResult, *, mixed: bool = False) -> list[Change]:
    """Compare programs that both results have, per inference; judge them where nothing else differs.

    Raises UsageError where there is none, and where a simulated result meets a real one without `mixed`.
    """
    if one.simulated != other.simulated and not mixed:
        simulated, real = (one, other) if one.simulated else (other, one)
        raise UsageError(
            f"result {simulated.id} is of a simulated board, result {real.id} of a real one",
            "Their figures say nothing about each other. To look at both all the same: --mixed.",
        )
    unlike = bool(list_differences(one, other))
    known = {(each.code, each.precision, each.batch): each for each in list_figures(one)}
    found = []
    for second in list_figures(other):
        first = known.get((second.code, second.precision, second.batch))
        if first is not None:
            energies = first.energy_j, second.energy_j
            found.append(
                Change(
                    first,
                    second,
                    second.median_s / first.median_s,
                    second.low_s / first.high_s,
                    second.high_s / first.low_s,
                    energies[1] / energies[0] if energies[0] and energies[1] else None,
                    unlike,
                )
            )
    if not found:
        raise UsageError(
            f"results {one.id} and {other.id} have no program in common",
            "`farm result show` lists the programs, precisions and batch sizes of each.",
        )
    return found


@dataclasses.dataclass(frozen=True)
class Costs:
    """Prices with their currency, and a battery (J); None where not given."""

    per_hour: float | None = None
    per_kwh: float | None = None
    currency: str = ""
    battery_j: float | None = None

    def price(self, figure: Figure) -> float | None:
        """Return the cost of a million inferences: the board's time and its energy. None without what it needs."""
        if self.per_hour is None and self.per_kwh is None:
            return None
        if self.per_kwh is not None and figure.energy_j is None:
            return None
        spent_h = _A_MILLION / figure.fps / 3600
        energy_kwh = _A_MILLION * (figure.energy_j or 0.0) / figure.batch / 3.6e6
        return spent_h * (self.per_hour or 0.0) + energy_kwh * (self.per_kwh or 0.0)

    def count(self, figure: Figure) -> float | None:
        """Return how many inferences the battery has, idle power of the board included. None without a sensor."""
        if self.battery_j is None or not figure.energy_j:
            return None
        return self.battery_j * figure.batch / figure.energy_j


def read_costs(per_hour: str, per_kwh: str, battery: str) -> Costs:
    """Read `0.05EUR`, `0.30EUR` and `50Wh`; "" for none. Raises UsageError."""
    prices = dict(_read_prices({"--cost PRICE/h": per_hour, "--cost PRICE/kWh": per_kwh}))
    currencies = sorted({currency for _, currency in prices.values()})
    if len(currencies) > 1:
        raise UsageError(f"prices are in {' and '.join(currencies)}", "Give both in one currency.")
    found = None
    if battery and not (found := _BATTERY.fullmatch(battery)):
        raise UsageError(f"--cost {battery[:40]!r} is no energy", "Examples: 50Wh, 180kJ.")
    none = None, ""
    return Costs(
        prices.get("--cost PRICE/h", none)[0],
        prices.get("--cost PRICE/kWh", none)[0],
        "".join(currencies),
        float(found[1]) * _JOULES[found[2]] if found else None,
    )


def _read_prices(texts: Mapping[str, str]) -> Iterator[tuple[str, tuple[float, str]]]:
    for option, text in texts.items():
        if text and not (found := _PRICE.fullmatch(text)):
            raise UsageError(f"{option} {text[:40]!r} is no price with its currency", "Examples: 0.05EUR, 1.20USD.")
        if text and found:
            yield option, (float(found[1]), found[2].upper())
