"""Which record serves a workload that is compiled: the best fitting one there is, and how well it fits. Pure.

Where none fits, `compile` takes the schedule by prediction.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.values import DEFAULT_POINT, Record


class Fit(StrEnum):
    """How near a record's measurement is to what is compiled for, the best first."""

    EXACT = "exact"  # this board type at this operating point
    OTHER_POINT = "other point"  # this board type at another operating point
    OTHER_TYPE = "other type"  # another board type with cores of the same kind


@dataclasses.dataclass(frozen=True)
class Choice:
    """A record, and how it fits."""

    record: Record
    fit: Fit


# The hash of a workload as it is for another target, given TVM's dict.
HashFor = Callable[[Mapping[str, Any]], str]


@dataclasses.dataclass(frozen=True)
class Relative:
    """A board type with cores of the same kind, and the target that its workloads are named by."""

    board_type: str
    target: Mapping[str, Any]


class Records:
    """The records that may serve the workloads of one board type at one operating point."""

    def __init__(
        self,
        records: Sequence[Record],
        board_type: str | None = None,
        operating_point: str = DEFAULT_POINT,
        relatives: Sequence[Relative] = (),
    ) -> None:
        """Without a `board_type` every record is taken for one of the type compiled for, at the point asked for."""
        self._type, self._point, self._relatives = board_type, operating_point, relatives
        self._by_hash: dict[str, list[Record]] = collections.defaultdict(list)
        for record in records:
            self._by_hash[record.workload].append(record)

    def find(self, workload: str, hash_for: HashFor) -> Iterator[Choice]:
        """The records that fit a workload (its hash), the best first.

        Times at other clocks do not compare: of those of one kind, the usual clocks come before special ones.
        """
        own = [r for r in self._by_hash.get(workload, ()) if self._type is None or r.board_type == self._type]
        for record in sorted(own, key=self._order):
            exact = self._type is None or record.operating_point == self._point
            yield Choice(record, Fit.EXACT if exact else Fit.OTHER_POINT)
        for relative in self._relatives:
            theirs = self._by_hash.get(hash_for(relative.target), ())
            for record in sorted((r for r in theirs if r.board_type == relative.board_type), key=self._order):
                yield Choice(record, Fit.OTHER_TYPE)

    def _order(self, record: Record) -> tuple[bool, bool, float]:
        point = record.operating_point
        return point != self._point, point != DEFAULT_POINT, record.median_s
