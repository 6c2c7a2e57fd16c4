"""The GPU of a target, as predictions of schedules and the making of code need it; the numbers are the inventory's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import CPU, GPU, REACHED, WARP, Processor, find_processor
from farm.errors import UsageError
from farm.gpu import native
from farm.gpu.code import THREADS_PER_BLOCK, GpuPlan, plan_gpu
from farm.gpu.ptx import PtxLimits
from farm.inventory.board_types import BoardType, load_board_types
from farm.search import cores
from farm.search.cores import Core
from farm.settings import Settings
from farm.values import is_for_gpu

# The graph pipeline of code for GPUs; a board type with it is tuned and compiled for its GPU.
PIPELINE = "gpu/1"
# Whichever of a board's processor and GPU has a model done sooner; only what compiles can say so.
BOTH = "both"
# In a target's `libs`: that a virtual board runs it, by this machine's processor.
VIRTUAL = "virtual"


@dataclasses.dataclass(frozen=True)
class TargetGpu:
    """A board type's GPU at its highest clocks. What a block may have is in `plan`; `unit` is one of its processors."""

    plan: GpuPlan
    unit: Processor
    processors: int
    freq_hz: float
    memory_bytes_per_s: float


def to_config(board_type: str, plan: GpuPlan, host: Mapping[str, Any], *, simulated: bool) -> dict[str, Any]:
    """TVM's target for the GPU of boards of a type, whose processor is `host`. It names the type: what else code for it
    depends on is looked up by that.
    """
    return {
        "kind": "cuda",
        "arch": plan.arch,
        "model": board_type,
        "libs": [VIRTUAL] if simulated else [],
        "max_num_threads": THREADS_PER_BLOCK,
        "max_threads_per_block": THREADS_PER_BLOCK,
        "thread_warp_size": WARP,
        "max_shared_memory_per_block": plan.limits.shared_bytes,
        "registers_per_block": plan.limits.registers,
        "host": dict(host),
    }


def device_of(target: Mapping[str, Any]) -> str:
    """What runs code for a target: `cpu` or `gpu`, as the agent calls them."""
    return GPU if is_gpu(target) else CPU


def reference_of(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target for which an unscheduled function is built: a GPU runs none, its board's processor does."""
    host: Mapping[str, Any] = target["host"] if is_gpu(target) else target
    return host


def require_device(board_type: BoardType, device: str) -> BoardType:
    """The board type as what it is tuned and compiled for: its processor, or its GPU. Raises UsageError."""
    if device == BOTH:
        raise UsageError(
            f"the device {BOTH!r} is for `farm model compile` alone: what is measured runs on one",
            f"Do it for {CPU} and for {GPU}; then `farm model compile --device {BOTH}` takes the one that is faster.",
        )
    if device not in (CPU, GPU):
        raise UsageError(
            f"the device {device!r} is unknown", f"Known: {CPU}, {GPU}, and {BOTH} for `farm model compile`."
        )
    if device == CPU:
        return board_type
    plan_gpu(board_type)
    return board_type.model_copy(update={"pipeline": PIPELINE})


def name_device(board_type: BoardType) -> str:
    """The device that a board type stands for, as `require_device` gave it."""
    return GPU if is_for_gpu(board_type.pipeline) else CPU


def list_devices(device: str) -> tuple[str, ...]:
    """The devices that `--device` names: `both` is two."""
    return (CPU, GPU) if device == BOTH else (device,)


def is_gpu(target: Mapping[str, Any]) -> bool:
    """Whether a target in TVM's dict form is a GPU's."""
    return target.get("kind") == "cuda"


def is_virtual(target: Mapping[str, Any]) -> bool:
    """Whether code for a GPU's target is run by this machine's processor."""
    return VIRTUAL in target.get("libs", ())


def prepare_boards(target: Mapping[str, Any], settings: Settings) -> None:
    """Build what virtual boards need to run code for a target, once per home: nothing but for their GPUs."""
    if is_gpu(target) and is_virtual(target):
        settings.share_linker_cache()
        native.prepare(settings.home_path)


def gpu_of(target: Mapping[str, Any]) -> TargetGpu:
    """The GPU that a target of `to_config` names. Raises UsageError for a board type that is not known."""
    board_type = load_board_types().get(str(target.get("model", "")))
    if board_type is None or board_type.gpu is None:
        raise UsageError(f"a GPU's target names the board type {target.get('model', '')!r}, which is not known")
    gpu = board_type.gpu
    limits = PtxLimits(
        int(target["registers_per_block"]),
        int(target["max_shared_memory_per_block"]),
        int(target["max_threads_per_block"]),
    )
    return TargetGpu(
        dataclasses.replace(plan_gpu(board_type), limits=limits),
        find_processor(gpu.arch),
        gpu.processors or 1,
        float(max(gpu.freqs_hz, default=1_000_000_000)),
        count_memory_rate(board_type),
    )


def count_memory_rate(board_type: BoardType) -> float:
    """What of its memory's bandwidth a board type's GPU can have, in bytes per second."""
    known = board_type.gpu.memory_bytes_per_s if board_type.gpu else None
    return REACHED * float(known or 25_600_000_000)


def unit_of(target: Mapping[str, Any]) -> Core | TargetGpu:
    """What computes for a target: its processor's cores, or its GPU. Raises UsageError for one that is not known."""
    return gpu_of(target) if is_gpu(target) else cores.core_of(target)
