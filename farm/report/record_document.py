"""Records as plain documents: what `farm record list` and `show` print with `--json`, and what the API gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm import emulation
from farm.inventory.board_types import load_board_types
from farm.store import Store
from farm.units import format_latency
from farm.values import Record

# What a record's evidence says of its decision, in words.
DECIDED = {"parted": "clear", "tie": "tie", "alone": "no rival", "kept": "first tried"}
_OF_WORKLOAD = ("hash", "name", "flop", "arguments", "target", "pipeline")


def name_codes(store: Store, records: Sequence[Record]) -> dict[str, str]:
    """By workload of simulated records, whose code it is: `emulation.name_code`. Not of GPUs', which have one model."""
    simulated = [each for each in records if each.simulated and each.device != "gpu"]
    rows = store.fetch_workload_rows([each.workload for each in simulated])
    known = load_board_types()
    found: dict[str, str] = {}
    for each in simulated:
        if each.board_type in known and each.workload in rows:
            mtriple = str(rows[each.workload]["target"].get("mtriple", ""))
            found[each.workload] = emulation.name_code(known[each.board_type], mtriple)
    return found


def describe_evidence(evidence: Mapping[str, Any] | None) -> str:
    """How often, where and against whom a record was measured again."""
    if not evidence:
        return "its output was checked; its time is a single trial's"
    boards = (f"{name} {format_latency(about['median_s'])}" for name, about in evidence.get("boards", {}).items())
    words = [f"{evidence.get('rounds', '?')} rounds, {', '.join(boards)}", DECIDED.get(evidence.get("decided", ""), "")]
    if rivals := evidence.get("rivals"):
        nearest = min(float(each["ratio"]) for each in rivals)
        words.append(f"the nearest of {len(rivals)} rivals takes {nearest:.3f} times as long")
    if failed := evidence.get("failed"):
        words.append(f"{len(failed)} failed")
    words += [str(each) for each in evidence.get("contradictions") or ()]
    return f"measured again as a winner: {'; '.join(filter(None, words))}"


def to_document(record: Record, codes: Mapping[str, str]) -> dict[str, Any]:
    """A record in a list; `codes` are those of `name_codes`."""
    return {
        "workload": record.workload,
        "name": record.workload_name,
        "board_type": record.board_type,
        "operating_point": record.operating_point,
        "device": record.device,
        "pipeline": record.pipeline,
        "candidate": record.candidate,
        "latency_us": record.median_s * 1e6,
        "gflops": record.flop / record.median_s / 1e9,
        "max_rel_error": record.max_rel_error,
        "simulated": record.simulated,
        "virtual_code": (codes.get(record.workload) or None) if record.simulated else None,
        "verified_at": record.verified_at,
        "origin": record.origin,
    }


def make_document(about: Mapping[str, Any], records: Iterable[Record], codes: Mapping[str, str]) -> dict[str, Any]:
    """A workload, as `Store.fetch_workload_rows` has it, with all that is known of its records."""
    return {field: about[field] for field in _OF_WORKLOAD} | {
        "records": [to_document(each, codes) | {"evidence": each.evidence} for each in records]
    }
