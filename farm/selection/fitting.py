"""Choose the record that serves a workload: the best fitting one. Pure.

`farm.artifacts.compile` uses the predicted schedule where no record fits, or the fitting one was slower in its model.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, Record, name_workloads

# Returns a workload's hash for another target (TVM's dict).
HashFor = Callable[[Mapping[str, Any]], str]


class RecordFit(StrEnum):
    """How close a record's measurement is to the compiled board type and point, the best first."""

    EXACT = "exact"  # this board type at this operating point
    OTHER_POINT = "other point"  # this board type at another operating point
    OTHER_TYPE = "other type"  # another board type with cores of the same kind


@dataclasses.dataclass(frozen=True)
class RecordChoice:
    """A record and its fit."""

    record: Record
    fit: RecordFit


def describe_imported(imported: int, used: int) -> str:
    """Describe how many used records are imported and unverified; "" for none."""
    if not imported:
        return ""
    return f"{imported} of {used} records used are imported: no board of this farm has verified them"


@dataclasses.dataclass(frozen=True)
class Relative:
    """A board type with the same kind of cores, and the target in its workloads' hashes."""

    board_type: str
    target: Mapping[str, Any]


class Records:
    """The records that can serve workloads of one board type at one operating point."""

    def __init__(
        self,
        records: Sequence[Record],
        board_type: str | None = None,
        operating_point: str = DEFAULT_POINT,
        relatives: Sequence[Relative] = (),
        decisions: Sequence[ModelDecision] = (),
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Without a `board_type`, every record counts as of the compiled type and point.

        `decisions` are about this model on such boards. `refused` candidates by workload replace the decisions'.
        """
        self._type, self._point, self._relatives = board_type, operating_point, relatives
        self._decisions, self._refused = decisions, refused
        self._by_hash: dict[str, list[Record]] = collections.defaultdict(list)
        for record in records:
            self._by_hash[record.workload].append(record)

    def find_refused(self, workloads: Iterable[str]) -> Mapping[str, str]:
        """Return the record candidates that a decision about these workloads excludes, by workload.

        A decision at the default clocks also holds at other points, as its records do.
        """
        if self._refused is not None:
            return self._refused
        name = name_workloads(workloads)
        about = {each.operating_point: each.refused for each in self._decisions if each.workloads == name}
        return about.get(self._point, about.get(DEFAULT_POINT, {}))

    def find(self, workload: str, hash_for: HashFor, refused: str | None = None) -> Iterator[RecordChoice]:
        """Yield the records that fit a workload, the best first, until the `refused` candidate.

        Times at different clocks are not comparable: within one fit, the default clocks come first.
        """
        for choice in self._list(workload, hash_for):
            if choice.record.candidate == refused:
                return
            yield choice

    def _list(self, workload: str, hash_for: HashFor) -> Iterator[RecordChoice]:
        own = [r for r in self._by_hash.get(workload, ()) if self._type is None or r.board_type == self._type]
        for record in sorted(own, key=self._order):
            exact = self._type is None or record.operating_point == self._point
            yield RecordChoice(record, RecordFit.EXACT if exact else RecordFit.OTHER_POINT)
        for relative in self._relatives:
            theirs = self._by_hash.get(hash_for(relative.target), ())
            for record in sorted((r for r in theirs if r.board_type == relative.board_type), key=self._order):
                yield RecordChoice(record, RecordFit.OTHER_TYPE)

    def _order(self, record: Record) -> tuple[bool, bool, bool, float]:
        # Imported times come after all local measurements, at any clocks.
        point = record.operating_point
        return record.origin is not None, point != self._point, point != DEFAULT_POINT, record.median_s
