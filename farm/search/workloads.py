"""Workloads: the tunable functions of a prepared model, with a name that stays the same over models and runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from farm.search import tvm_env


@dataclasses.dataclass(frozen=True)
class Workload:
    """One tunable function.

    `hash` identifies it over models, processes and machines: function, target and graph pipeline. `weight` is how
    often one inference of the model calls it. `flop` is per call, as TVM estimates it (0 where it cannot).
    `module_json` is the unscheduled function, TVM's own JSON.
    """

    hash: str
    name: str
    flop: float
    weight: int
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    module_json: str = dataclasses.field(repr=False)
    target: Mapping[str, Any]
    pipeline: str

    @property
    def kind(self) -> str:
        """The operator that dominates it, such as `conv2d`, `dense` or `softmax`: what `--ops` chooses by."""
        return operator_kind(self.name)


# Function names that TVM gives to fused operators hold the operator's own name; the first match decides.
_KINDS = ("depthwise_conv2d", "conv2d", "conv1d", "conv3d", "matmul", "dense", "max_pool2d", "avg_pool2d", "softmax")


def operator_kind(name: str) -> str:
    """The dominating operator in a fused function's name; a matrix product is `dense`, as users of TVM call it."""
    for kind in _KINDS:
        if kind in name:
            return "dense" if kind == "matmul" else kind
    return name.removeprefix("fused_").split("_")[0].rstrip("0123456789")


def extract(module: Any, target: Any, target_config: Mapping[str, Any], pipeline: str) -> list[Workload]:
    """The workloads of a module that went through a graph pipeline, the heaviest first."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms
    from tvm.s_tir.analysis import estimate_tir_flops

    found = []
    for task in ms.relax_integration.extract_tasks(module, target):
        mod = task.dispatched[0]
        found.append(
            Workload(
                hash=workload_hash(mod, target_config, pipeline),
                name=_strip_copy_number(task.task_name),
                flop=float(estimate_tir_flops(mod)),
                weight=int(task.weight),
                arguments=tuple(
                    (tuple(int(d) for d in argument.shape), str(argument.dtype))
                    for argument in ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=False)
                ),
                module_json=tvm.ir.save_json(mod),
                target=dict(target_config),
                pipeline=pipeline,
            )
        )
    return sorted(found, key=lambda w: (-w.flop * w.weight, w.name))


def workload_hash(module: Any, target_config: Mapping[str, Any], pipeline: str) -> str:
    """16 hexadecimal digits over the function's structure, the target and the pipeline's name."""
    tvm_env.load()
    import tvm_ffi

    structure = int(tvm_ffi.structural_hash(module)) & (2**64 - 1)
    text = json.dumps([f"{structure:016x}", dict(target_config), pipeline], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _strip_copy_number(name: str) -> str:
    """TVM numbers the copy of a function that layout-free weights make by one more digit: conv2d4 becomes conv2d41."""
    return name.removeprefix("fused_")
