"""Whether the values of another farm's records can be: types, lengths, finite numbers, times that runs take, dates.

The same for what a file holds and for what another store holds. What a workload's module is, `farm.search.proof` says.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from farm.measure.answers import require_possible
from farm.store import schema
from farm.store.merging import RecordBundle
from farm.values import Record, Trial

# Clocks of two farms may differ by a time zone that was set wrong.
_CLOCK_SLACK_S = 86_400.0
_MOST_TEXT, _MOST_TRACE = 1_000, 4 << 20
_MOST_NESTED, _MOST_ITEMS = 8, 10_000
_MOST_FLOP = 1e18
_KINDS: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
    "Mapping[str, Any] | None": (dict, type(None)),
}
WORKLOAD_KINDS: dict[str, Any] = {
    "hash": str,
    "name": str,
    "flop": (int, float),
    "arguments": list,
    "module_json": str,
    "target": dict,
    "pipeline": str,
}


def require_bundle(bundle: RecordBundle) -> None:
    """Raise ValueError, TypeError, LookupError or ProtocolError for a value that no farm writes."""
    latest = time.time() + _CLOCK_SLACK_S
    known = set()
    for workload in bundle.workloads:
        require_workload(workload)
        known.add(workload["hash"])
    for record in bundle.records:
        _require_record(record, latest)
    for trial, at in bundle.trials:
        require_trial(trial)
        _require(0 <= at <= latest, "a trial's date cannot be")
    measured: list[Record | Trial] = [*bundle.records, *(trial for trial, _ in bundle.trials)]
    for each in measured:
        _require(each.workload in known, f"the workload {each.workload} is missing")
    _require(isinstance(bundle.store, str) and 0 < len(bundle.store) <= _MOST_TEXT, "it names no store")
    _require_plain({str(number): name for number, name in bundle.models.items()}, "a model's name")


def require_workload(value: Any) -> None:
    """Raise ValueError where a workload's row has other keys or values that cannot be."""
    _require(isinstance(value, dict) and value.keys() == WORKLOAD_KINDS.keys(), "a workload has other keys")
    for key, kind in WORKLOAD_KINDS.items():
        _require(isinstance(value[key], kind), f"a workload's {key} is a {type(value[key]).__name__}")
    _require(0 <= value["flop"] <= _MOST_FLOP, "a workload's FLOP cannot be")
    _require_plain({key: each for key, each in value.items() if key != "module_json"}, "a workload")


def require_trial(value: Trial) -> None:
    """Raise ValueError or ProtocolError where a trial's values cannot be."""
    _require_fields(value)
    _require(0 <= value.campaign < 2**53 and 0 <= value.attempt < 2**31, "a trial's number cannot be")
    for seconds in (value.build_s, value.held_s):
        _require(seconds is None or 0 <= seconds < schema.LONGEST_S, "a trial's time cannot be")
    require_possible(value.outcome)


def _require_record(value: Record, latest: float) -> None:
    _require_fields(value)
    _require(schema.SHORTEST_S <= value.median_s <= schema.LONGEST_S, "a record's time cannot be")
    _require(0 <= value.flop <= _MOST_FLOP, "a record's FLOP cannot be")
    for error in (value.max_abs_error, value.max_rel_error):
        _require(0 <= error < math.inf, "a record's error cannot be")
    _require(0 <= value.verified_at <= latest, "a record's date cannot be")
    if value.evidence is not None:
        _require_plain(value.evidence, "a record's evidence")
        _require_evidence(value.evidence)
    if value.origin is not None:
        _require_plain(value.origin, "a record's origin")
        _require(all(isinstance(value.origin.get(key), str) for key in ("store", "source", "by")), "a record's origin")
        _require(0 <= value.origin.get("at", 0.0) <= latest, "a record's origin has a date that cannot be")


def _require_evidence(evidence: Mapping[str, Any]) -> None:
    """The parts that reports read (`farm.selection.decision`)."""
    boards, rivals = evidence.get("boards", {}), evidence.get("rivals", [])
    fine = (
        isinstance(boards, dict)
        and all(isinstance(each, dict) and _is_number(each.get("median_s")) for each in boards.values())
        and isinstance(rivals, list)
        and all(isinstance(each, dict) and _is_number(each.get("ratio")) for each in rivals)
        and all(each.get(end) is None or _is_number(each.get(end)) for each in rivals for end in ("low", "high"))
        and all(isinstance(evidence.get(key, []), list) for key in ("settled", "contradictions", "failed"))
        and isinstance(evidence.get("decided", ""), str)
    )
    _require(fine, "a record's evidence is of another form")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_fields(value: Record | Trial) -> None:
    for field in dataclasses.fields(value):
        given, kind = getattr(value, field.name), _KINDS.get(str(field.type))
        if kind is not None:
            wrong_bool = isinstance(given, bool) and kind is not bool
            _require(isinstance(given, kind) and not wrong_bool, f"{field.name} is a {type(given).__name__}")
        if isinstance(given, str):
            most = _MOST_TRACE if field.name == "trace_json" else _MOST_TEXT
            _require(len(given) <= most, f"{field.name} is too long")


def _require_plain(value: Any, what: str, depth: int = 0) -> None:
    """Raise ValueError for JSON that is nested too deep or too large, or has a number that is not finite."""
    _require(depth <= _MOST_NESTED, f"{what} is nested too deep")
    if isinstance(value, dict | list | tuple):
        _require(len(value) <= _MOST_ITEMS, f"{what} is too large")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _require_plain(each, what, depth + 1)
    elif isinstance(value, str):
        _require(len(value) <= _MOST_TEXT, f"{what} has a text that is too long")
    elif isinstance(value, float):
        _require(math.isfinite(value), f"{what} has a number that is not finite")
    elif isinstance(value, int):
        _require(abs(value) < 2**63, f"{what} has a number that is too large")


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)
