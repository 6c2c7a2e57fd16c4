"""Which record serves a workload that is compiled: the best fitting one there is, and how well it fits. Pure.

Where none fits, or the one that does was slower within the model than what is predicted, `compile` takes the schedule
by prediction.
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
from farm.values import DEFAULT_POINT, ModelDecision, Record, name_workloads

# Assumed: what asking the driver for a copy and waiting for its end takes.
_COPY_START_S = 20e-6
# Workloads that are named in an error.
MOST_NAMED = 4
# What is kept of the words of a compiler or assembler.
_MOST_SAID = 500


def choose(
    made: Mapping[str, Manifest], failed: Mapping[str, FarmError], kind: BoardType
) -> tuple[str, dict[str, Any]]:
    """The device to take of those that code was made for, and what its manifest is to say of the choice.

    Nothing is compared where code was made for one alone. Raises PermanentError where a time is not known that is
    wanted, and what `failed` comes to where code was made for none.
    """
    if not made:
        raise _join(failed, kind)
    times = {device: estimate(manifest, kind) for device, manifest in made.items()} if len(made) > 1 else {}
    taken = min(times, key=lambda device: times[device].latency_s, default=next(iter(made)))
    return taken, {
        "devices": times,
        "not_made": {device: say_why(each) for device, each in failed.items()},
    }


def say_why(error: FarmError) -> str:
    """Why no code was made, in the first words of the error; a bug of ours is called one."""
    said = error.message[:_MOST_SAID]
    return f"internal error of the farm: {said}" if isinstance(error, InternalError) else said


def _join(failed: Mapping[str, FarmError], kind: BoardType) -> FarmError:
    """What there is to raise where every device failed: the model's fault where each says so, ours where one does."""
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
    """What one inference is expected to take. Raises PermanentError where some workload has no time."""
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
    """How long it takes to bring a model's inputs to the GPU and its outputs back.

    A Jetson's processor and GPU share the memory: what is copied is read and written there.
    """
    rate = gpus.count_memory_rate(kind)
    return math.fsum(_COPY_START_S + 2 * each.size_bytes / rate for each in tensors)


class RecordFit(StrEnum):
    """How near a record's measurement is to what is compiled for, the best first."""

    EXACT = "exact"  # this board type at this operating point
    OTHER_POINT = "other point"  # this board type at another operating point
    OTHER_TYPE = "other type"  # another board type with cores of the same kind


@dataclasses.dataclass(frozen=True)
class RecordChoice:
    """A record, and how it fits."""

    record: Record
    fit: RecordFit


def describe_imported(imported: int, used: int) -> str:
    """How many of the records used another farm measured and this one has not verified; "" for none."""
    if not imported:
        return ""
    return f"{imported} of {used} records used are imported: no board of this farm has verified them"


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
        decisions: Sequence[ModelDecision] = (),
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Without a `board_type` every record is taken for one of the type compiled for, at the point asked for.

        `decisions` are those about the model that is compiled, on such boards. `refused`: what is left out whatever
        was decided, as a decision has it.
        """
        self._type, self._point, self._relatives = board_type, operating_point, relatives
        self._decisions, self._refused = decisions, refused
        self._by_hash: dict[str, list[Record]] = collections.defaultdict(list)
        for record in records:
            self._by_hash[record.workload].append(record)

    def find_refused(self, workloads: Iterable[str]) -> Mapping[str, str]:
        """What was decided about the model that has these workloads: candidates of records to leave out, by workload.

        A decision at the usual clocks stands in for one at the point asked for, as its records do.
        """
        if self._refused is not None:
            return self._refused
        name = name_workloads(workloads)
        about = {each.operating_point: each.refused for each in self._decisions if each.workloads == name}
        return about.get(self._point, about.get(DEFAULT_POINT, {}))

    def find(self, workload: str, hash_for: HashFor, refused: str | None = None) -> Iterator[RecordChoice]:
        """The records that fit a workload (its hash), the best first; none where the best is the `refused` candidate.

        Times at other clocks do not compare: of those of one kind, the usual clocks come before special ones.
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
        # An imported time is another farm's word: it comes after what was measured here, at whatever clocks.
        point = record.operating_point
        return record.origin is not None, point != self._point, point != DEFAULT_POINT, record.median_s
