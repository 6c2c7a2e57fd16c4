"""The GPU of a target as predictions and code generation need it; the figures come from the inventory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import CPU, GPU, REACHED, WARP, Processor, find_processor
from farm.errors import UsageError
from farm.gpu import code
from farm.gpu.code import THREADS_PER_BLOCK, GpuPlan, PtxLimits, plan_gpu
from farm.inventory.board_types import BoardType, load_board_types
from farm.search import cores
from farm.search.cores import Core
from farm.settings import Settings
from farm.values import read_pipeline

# The graph pipelines for GPUs; a board type with one is tuned and compiled for its GPU.
PIPELINE, EXACT_PIPELINE = "gpu/2", "gpu/2-exact"
# The faster of a board's CPU and GPU; only `farm model compile` accepts it.
BOTH = "both"
# Entry in a target's `libs`: a virtual board emulates the GPU on the local CPU.
VIRTUAL = "virtual"


@dataclasses.dataclass(frozen=True)
class TargetGpu:
    """A board type's GPU at its highest clocks: resource limits in `plan`, one of its multiprocessors in `unit`."""

    plan: GpuPlan
    unit: Processor
    processors: int
    freq_hz: float
    memory_bytes_per_s: float


def to_config(board_type: str, plan: GpuPlan, host: Mapping[str, Any], *, simulated: bool) -> dict[str, Any]:
    """Make TVM's target for the GPU of a board type with the CPU `host`; its name leads to all other facts."""
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
    """Return the device that runs code for a target: `cpu` or `gpu`, as the agent calls them."""
    return GPU if is_gpu(target) else CPU


def reference_of(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the target of unscheduled functions: a GPU cannot run them, so they are built for its host."""
    host: Mapping[str, Any] = target["host"] if is_gpu(target) else target
    return host


def require_device(board_type: BoardType, device: str) -> BoardType:
    """Return the board type as its CPU or its GPU is tuned and compiled for. Raises UsageError."""
    if device == BOTH:
        raise UsageError(
            f"the device {BOTH!r} is for `farm model compile` only: a measurement runs on one device",
            f"Run the command for {CPU} and for {GPU}; `farm model compile --device {BOTH}` then takes the faster one.",
        )
    if device not in (CPU, GPU):
        raise UsageError(
            f"the device {device!r} is unknown", f"Known: {CPU}, {GPU}, and {BOTH} for `farm model compile`."
        )
    if device == CPU:
        return board_type
    plan_gpu(board_type)
    exact, _ = read_pipeline(board_type.pipeline)
    return board_type.model_copy(update={"pipeline": EXACT_PIPELINE if exact else PIPELINE})


def list_devices(device: str) -> tuple[str, ...]:
    """List the devices that `--device` names; `both` is two."""
    return (CPU, GPU) if device == BOTH else (device,)


def is_gpu(target: Mapping[str, Any]) -> bool:
    """Say whether a target in TVM's dict form is for a GPU."""
    return target.get("kind") == "cuda"


def is_virtual(target: Mapping[str, Any]) -> bool:
    """Say whether a GPU target is emulated on the local CPU."""
    return VIRTUAL in target.get("libs", ())


def prepare_boards(target: Mapping[str, Any], settings: Settings) -> None:
    """Build the libraries that virtual GPU boards need, once per FARM_HOME; do nothing for other targets."""
    if is_gpu(target) and is_virtual(target):
        settings.share_linker_cache()
        code.prepare(settings.home_path)


def gpu_of(target: Mapping[str, Any]) -> TargetGpu:
    """Return the GPU that a target of `to_config` names. Raises UsageError for an unknown board type."""
    board_type = load_board_types().get(str(target.get("model", "")))
    if board_type is None or board_type.gpu is None:
        raise UsageError(f"a GPU target names the unknown board type {target.get('model', '')!r}")
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
    """Return the achievable memory bandwidth of a board type's GPU in bytes per second."""
    known = board_type.gpu.memory_bytes_per_s if board_type.gpu else None
    return REACHED * float(known or 25_600_000_000)


def unit_of(target: Mapping[str, Any]) -> Core | TargetGpu:
    """Return the CPU cores or the GPU of a target. Raises UsageError for an unknown one."""
    return gpu_of(target) if is_gpu(target) else cores.core_of(target)
