"""Choose the record that serves a workload: the best fitting one. Pure.

`compile` uses the predicted schedule where no record fits, or the fitting one was slower within the model.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm import units
from farm.artifacts.manifest import DeviceEstimate, Manifest, Tensor
from farm.errors import FarmError, InternalError, PermanentError, UsageError
from farm.inventory.board_types import BoardType
from farm.search import gpus
from farm.types.campaigns import ModelDecision
from farm.values import DEFAULT_POINT, Record, name_workloads

# Assumed time to request a copy from the driver and wait for it.
_COPY_START_S = 20e-6
# Workloads named in an error.
MOST_NAMED = 4
# Kept length of a compiler's message.
_MOST_SAID = 500


def choose(
    made: Mapping[str, Manifest], failed: Mapping[str, FarmError], kind: BoardType
) -> tuple[str, dict[str, Any]]:
    """Choose among the devices with code; return it and the manifest's fields about the choice.

    A single device needs no comparison. Raises PermanentError where a needed time is unknown, and the joined errors of
    `failed` where no device has code.
    """
    if not made:
        raise _join(failed, kind)
    times = {device: estimate(manifest, kind) for device, manifest in made.items()} if len(made) > 1 else {}
    taken = min(times, key=lambda device: times[device].latency_s, default=next(iter(made)))
    return taken, {"devices": times, "not_made": {device: say_why(each) for device, each in failed.items()}}


def say_why(error: FarmError) -> str:
    """Return why there is no code, shortened; name an internal error as such."""
    said = error.message[:_MOST_SAID]
    return f"internal error of the farm: {said}" if isinstance(error, InternalError) else said


def _join(failed: Mapping[str, FarmError], kind: BoardType) -> FarmError:
    """Join the errors of all devices: an internal one if any is, else the model's fault."""
    first, *others = failed.values()
    if all(each.message == first.message for each in others):
        return first
    said = "; ".join(f"not for the {device}: {say_why(each)}" for device, each in failed.items())
    message = f"no code was made for a {kind.name}: {said}"
    if any(isinstance(each, InternalError) for each in failed.values()):
        return InternalError(message)
    is_usage = all(isinstance(each, UsageError) for each in failed.values())
    return (UsageError if is_usage else PermanentError)(message, first.hint)


def estimate(manifest: Manifest, kind: BoardType) -> DeviceEstimate:
    """Estimate the time of one inference. Raises PermanentError where a workload has no time."""
    if manifest.predicted_latency_s is None:
        named = units.name_some([each.name for each in manifest.workloads if each.latency_s is None], MOST_NAMED)
        raise PermanentError(
            f"how long {manifest.name} takes on the {manifest.device} of a {kind.name} is not known: no record and no "
            f"prediction for {named}",
            "Compile for each device, and compare both with `farm model bench`.",
        )
    copied_s = 0.0
    if manifest.gpu is not None:
        copied_s = count_copies_s((*manifest.inputs, *manifest.outputs), kind)
    return DeviceEstimate(
        latency_s=manifest.predicted_latency_s + copied_s,
        copies_s=copied_s,
        workloads=len(manifest.workloads),
        measured=manifest.count("record"),
    )


def count_copies_s(tensors: Sequence[Tensor], kind: BoardType) -> float:
    """Return the time to copy a model's inputs to the GPU and its outputs back.

    A Jetson's CPU and GPU share the memory, so a copy reads and writes it.
    """
    rate = gpus.count_memory_rate(kind)
    return math.fsum(_COPY_START_S + 2 * each.size_bytes / rate for each in tensors)


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


# Returns a workload's hash for another target (TVM's dict).
HashFor = Callable[[Mapping[str, Any]], str]


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
