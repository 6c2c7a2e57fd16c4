"""Records as documents: what `farm record list` and `show` print with `--json`, and what the API serves; and their
filters.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm import emulation
from farm.errors import UsageError
from farm.inventory.board_types import load_board_types, require_board_type
from farm.store import Store
from farm.store.records import RecordCriteria
from farm.types import documents
from farm.units import format_latency, parse_duration_s
from farm.values import DEFAULT_POINT, Record, Workload, operator_kind

_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M")
# The decision in a record's evidence, in words.
DECIDED = {"parted": "clear", "tie": "tie", "alone": "no rival", "kept": "first tried"}
_COSTS = {
    "latency": ("takes", "as long"),
    "energy": ("uses", "the energy"),
    "edp": ("has", "the energy times latency"),
    "period": ("uses", "the energy above idle"),
}
_OF_WORKLOAD = ("hash", "name", "flop", "arguments", "target", "pipeline")


@dataclasses.dataclass(frozen=True)
class Filters:
    """The filters of records; empty texts select all."""

    workload: str = ""
    operator: str = ""
    board_type: str = ""
    target: str = ""
    operating_point: str = ""
    since: str = ""
    until: str = ""
    campaign: str = ""
    simulated: bool = False
    imported: bool = False

    @property
    def chooses(self) -> bool:
        """Return whether a filter other than `simulated` is set."""
        return dataclasses.replace(self, simulated=False) != Filters()

    def fetch(self, store: Store, *, simulated: bool | None = None) -> list[Record]:
        """Return the selected records. Raises UsageError for an invalid board type, campaign or time."""
        return store.records.fetch(**self._choose(store, simulated))

    def fetch_page(self, store: Store, limit: int, offset: int) -> tuple[list[Record], int]:
        """Return some of them, and their number."""
        return store.records.fetch_page(limit, offset, **self._choose(store))

    def _choose(self, store: Store, simulated: bool | None = None) -> RecordCriteria:
        return {
            "workloads": self._list_workloads(store) if self.workload or self.operator else None,
            "board_type": require_board_type(self.board_type).name if self.board_type else None,
            "operating_point": self.operating_point or None,
            "simulated": self.simulated if simulated is None else simulated,
            "campaign": find_campaign(store, self.campaign) if self.campaign else None,
            "target": self.target or None,
            "since": to_time("--since", self.since) if self.since else None,
            "until": to_time("--until", self.until) if self.until else None,
            "imported": True if self.imported else None,
        }

    def _list_workloads(self, store: Store) -> list[str]:
        # By name: many records share one, and SQL cannot derive the operator from it.
        return [
            key
            for key, name in store.workloads.fetch_names()
            if (not self.workload or is_meant(key, name, self.workload))
            and (not self.operator or operator_kind(name) == self.operator)
        ]

    def explain_none(self, store: Store) -> str:
        """Explain an empty selection where the other setting of `simulated` finds records."""
        others = store.records.count(**self._choose(store, not self.simulated))
        return point_to_others(f"{others} records", self.simulated) if others else ""


def point_to_others(found: str, simulated: bool) -> str:
    """Return a hint at what the other setting of --simulated finds."""
    which = "real boards: leave out --simulated" if simulated else "virtual boards: add --simulated"
    return f"there are {found} of {which}"


def is_meant(key: str, name: str, text: str) -> bool:
    """Return whether a workload's hash begins with a text, or its name contains it."""
    return key.startswith(text) or text in name


def require_workload(store: Store, text: str, wanted: RecordCriteria | None = None) -> tuple[str, str]:
    """Return hash and name of the one workload that a text names, of several the only one with a `wanted` record.

    Raises UsageError for none or several.
    """
    known = store.workloads.fetch_names()
    found = [each for each in known if text in each] or [each for each in known if is_meant(*each, text)]
    if len(found) > 1 and wanted is not None:
        held = {each.workload for each in store.records.fetch(**wanted)}
        found = [each for each in found if each[0] in held] or found
    if not found:
        raise UsageError(f"no workload is called {text!r}", "`farm record list` shows hashes and names.")
    if len(found) > 1:
        some = "; ".join(f"{key} {name}" for key, name in found[:5])
        more = ", …" if len(found) > 5 else ""
        raise UsageError(f"{len(found)} workloads are meant by {text!r}: {some}{more}", "Give more of the hash.")
    return found[0]


def require_one(name: str, records: Sequence[Record]) -> Record:
    """Return the only record, of several points the one at the default clocks. Raises UsageError for none or several.

    A real board's record comes before a virtual one's.
    """
    if not records:
        raise UsageError(f"{name} has no such record", "`farm record show WORKLOAD` lists all that it has.")
    real = [each for each in records if not each.simulated] or list(records)
    chosen = [each for each in real if each.operating_point == DEFAULT_POINT] or real
    if len(chosen) > 1:
        places = ", ".join(sorted(f"{each.board_type} @ {each.operating_point}" for each in chosen))
        raise UsageError(f"{name} has {len(chosen)} records: {places}", "Choose by --board-type or --operating-point.")
    return chosen[0]


def find_campaign(store: Store, text: str) -> int:
    """Return the number of a campaign. Raises UsageError where there is none."""
    if not text.isdecimal() or len(text) > 18:
        return store.campaigns.require(text).id
    if not any(row.id == int(text) for row in store.campaigns.fetch_searches()):
        raise UsageError(f"there is no campaign number {text}")
    return int(text)


def to_time(option: str, text: str) -> float:
    """Return a date, or a time ago, in seconds since the epoch. Raises UsageError that names the option."""
    for form in _DATES:
        try:
            return datetime.datetime.strptime(text, form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return time.time() - parse_duration_s(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is neither a date nor a duration", "Examples: 2026-11-22, 7d.") from None


def name_codes(store: Store, records: Sequence[Record]) -> dict[str, str]:
    """Return by workload of simulated CPU records whose code it is: see `emulation.name_code`."""
    simulated = [each for each in records if each.simulated and each.device != "gpu"]
    rows = store.workloads.fetch_by_hash([each.workload for each in simulated])
    known = load_board_types()
    found: dict[str, str] = {}
    for each in simulated:
        if each.board_type in known and each.workload in rows:
            mtriple = str(rows[each.workload].target.get("mtriple", ""))
            found[each.workload] = emulation.name_code(known[each.board_type], mtriple)
    return found


def describe_evidence(evidence: Mapping[str, Any] | None) -> str:
    """Say how often, where and against which rivals a record was measured again."""
    if not evidence:
        return "its output was checked; its time is a single trial's"
    boards = (f"{name} {format_latency(about['median_s'])}" for name, about in evidence.get("boards", {}).items())
    words = [f"{evidence.get('rounds', '?')} rounds, {', '.join(boards)}", DECIDED.get(evidence.get("decided", ""), "")]
    if (energy_j := evidence.get("energy_j")) is not None:
        low_j, high_j = evidence["energy_ci_j"]
        said = f"{energy_j * 1e3:.4g} mJ a call (95 % interval {low_j * 1e3:.4g} to {high_j * 1e3:.4g})"
        words += [f"chosen by {evidence['objective']}: {said}", evidence.get("energy_note", "")]
    if rivals := evidence.get("rivals"):
        verb, what = _COSTS[evidence.get("objective", "latency")]
        nearest = min(float(each["ratio"]) for each in rivals)
        words.append(f"the nearest of {len(rivals)} rivals {verb} {nearest:.3f} times {what}")
    if failed := evidence.get("failed"):
        words.append(f"{len(failed)} failed")
    words += [str(each) for each in evidence.get("contradictions") or ()]
    return f"measured again as a winner: {'; '.join(filter(None, words))}"


def to_document(record: Record, codes: Mapping[str, str]) -> documents.RecordInfo:
    """Return a record as it stands in a list; `codes` are those of `name_codes`."""
    return documents.RecordInfo(**_describe(record, codes))


def make_document(workload: Workload, records: Iterable[Record], codes: Mapping[str, str]) -> documents.WorkloadRecords:
    """Return a workload with all that is known of its records."""
    in_full = [
        documents.RecordInFull(
            **_describe(each, codes), evidence=None if each.evidence is None else dict(each.evidence)
        )
        for each in records
    ]
    return documents.WorkloadRecords(**{field: getattr(workload, field) for field in _OF_WORKLOAD}, records=in_full)


def _describe(record: Record, codes: Mapping[str, str]) -> dict[str, Any]:
    own = {name: getattr(record, name) for name in documents.RecordInfo.model_fields if hasattr(record, name)}
    return own | {
        "name": record.workload_name,
        "latency_us": record.median_s * 1e6,
        "gflops": record.flop / record.median_s / 1e9,
        "virtual_code": (codes.get(record.workload) or None) if record.simulated else None,
    }
