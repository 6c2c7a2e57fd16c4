"""Choose the device whose code a board runs, by the estimated time of one inference. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farm import units
from farm.artifacts.manifest import DeviceEstimate, Manifest
from farm.errors import FarmError, InternalError, PermanentError, UsageError
from farm.inventory.board_types import BoardType
from farm.search import gpus

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
        # A Jetson's CPU and GPU share the memory, so that a copy reads and writes it.
        rate = gpus.count_memory_rate(kind)
        copied_s = math.fsum(
            _COPY_START_S + 2 * each.size_bytes / rate for each in (*manifest.inputs, *manifest.outputs)
        )
    return DeviceEstimate(
        latency_s=manifest.predicted_latency_s + copied_s,
        copies_s=copied_s,
        workloads=len(manifest.workloads),
        measured=manifest.count("record"),
    )
