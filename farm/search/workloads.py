"""Workloads: the tunable functions of a prepared model, with names that are stable over models and runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import tvm
import tvm_ffi
from tvm.s_tir.analysis import estimate_tir_flops

from farm.search import tvm_env
from farm.search.families import facts
from farm.search.families.winograd import count_direct_flop
from farm.search.graph import half_precision, importer, in_place_concat, pipelines, recurrent
from farm.search.tvm_env import ms
from farm.values import COMPUTED_PREFIX, Workload

# Data movement that a function may apply to its first argument before it computes.
_MOVES = re.compile(r"(?:(?:transpose|reshape|squeeze|expand_dims|strided_slice|mirror_pad|pad)_)+")


def canonical_json(module: Any) -> str:
    """Return a function's module in TVM's JSON with canonical names; structurally equal to the original."""
    graph = json.loads(tvm.ir.save_json(module))
    nodes = graph["nodes"]
    counts: dict[str, int] = {}
    # TVM writes a node after its parts, so the order is structural.
    for node in list(nodes):
        if node["type"] == "s_tir.SBlock":
            field, kind = "name_hint", "block"
        elif node["type"] == "ir.Var":
            buffer = nodes[node["data"]["ty"]]["type"] == "tirx.BufferType"
            field, kind = "name", "buffer" if buffer else "index"
        else:
            continue
        if kind == "block" and nodes[node["data"][field]]["data"] == facts.ROOT:
            continue
        number = counts[kind] = counts.get(kind, -1) + 1
        # Other nodes may share the old string, so it stays.
        node["data"][field] = len(nodes)
        nodes.append({"type": "ffi.String", "data": f"{kind}_{number}"})
    return str(tvm.ir.save_json(tvm.ir.load_json(json.dumps(graph))))


def list_blocks(module: Any) -> list[str]:
    """List the names of a function's blocks without the root, in the order in which `canonical_json` numbers them."""
    nodes = json.loads(tvm.ir.save_json(module))["nodes"]
    found = [nodes[node["data"]["name_hint"]]["data"] for node in nodes if node["type"] == "s_tir.SBlock"]
    return [name for name in found if name != facts.ROOT]


def number_blocks(blocks: list[str]) -> dict[str, str]:
    """Map the names of `list_blocks` to canonical ones."""
    return {name: f"block_{number}" for number, name in enumerate(blocks)}


def readable_name(function: str, shapes: Sequence[tuple[int, ...]], kernel_layout: str, *, casts: bool = True) -> str:
    """Make a workload's name from TVM's function name and the shapes of its arguments, the result being the last.

    For example `conv2d_add_relu 3x3/2 224x224x3>64` is a 3x3 convolution of stride 2 from 224x224x3 to 64 channels (in
    the model's layout where the pipeline keeps it), and `matmul_add 512>1000` a dense layer. A batch of one is omitted,
    as are TVM's counters (`conv2d4_add1_relu21`). `casts`: casts belong to quantisation.
    """
    fused = "_".join(word.rstrip("0123456789") for word in function.removeprefix("fused_").split("_"))
    source, result = shapes[0], shapes[-1]
    # `farm.search.graph.converters` writes Clip so.
    fused = fused.replace("maximum_minimum", "clip")
    fused = _spell_bytes(fused) if casts else fused
    words = fused.removeprefix("int8_").split("_")
    if words[:2] == ["winograd", "conv2d"] and len(shapes) > 2 and len(shapes[1]) == len(source) == 4:
        # The weights are transformed; a tile of m outputs has m + 2 rows and columns.
        fused = fused.replace("winograd", f"winograd{shapes[1][0] - 2}", 1)
        return f"{fused} 3x3 {_dimensions(source)}>{shapes[1][3]}"
    moved = _MOVES.match(fused)
    before = moved.group() if moved else ""
    computed = fused.removeprefix(before).removeprefix("int8_")
    if computed.startswith("conv2d") and len(shapes) > 2 and len(source) == 4 and len(shapes[1]) in (4, 5, 6):
        # Five dimensions: four channels together [h, w, in / 4, out, 4]. Six: in panels [panels, h, w, in / 4, …].
        kernel = dict(zip(kernel_layout if len(shapes[1]) == 4 else "HWIO", shapes[1][-5:], strict=False))
        kernel["O"] *= shapes[1][0] if len(shapes[1]) == 6 else 1
        # A transpose before it means the other layout of the source.
        is_last = (kernel_layout == "HWIO") != ("transpose" in before)
        inputs, outputs = source[3 if is_last else 1], kernel["O"]
        if kernel["I"] == 1 and inputs > 1 and outputs % inputs == 0 and len(shapes[1]) == 4:
            fused = f"{before}depthwise_{fused.removeprefix(before)}"
        size = f"{kernel['H']}x{kernel['W']}"
        if len(result) == 4:
            rows = 1 if kernel_layout == "HWIO" else 2
            stride = round(source[1 if is_last else 2] / result[rows])
            size += f"/{stride}" if stride > 1 else ""
            return f"{fused} {size} {_dimensions(source)}>{outputs}"
    if words[0] == "matmul" and source and len(result) == len(source) and result[:-1] == source[:-1]:
        return f"{fused} {_dimensions(source)}>{result[-1]}"
    return f"{fused} {_dimensions(source)}" + (f">{_dimensions(result)}" if result != source else "")


def _spell_bytes(fused: str) -> str:
    """Abbreviate the operators of `farm.search.graph.quantised` and `farm.search.graph.dots`."""
    fused = re.sub(
        rf"^((?:{_MOVES.pattern})?)(?:dots_(conv2d|matmul)|(conv2d|matmul)(?=_cast))_cast", r"\1int8_\2\3", fused
    )
    fused = fused.replace("multiply_add_clip_cast", "quantize")
    return re.sub(r"cast_(?:subtract_)?multiply", "dequantize", fused)


def _dimensions(shape: tuple[int, ...]) -> str:
    kept = shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
    return "x".join(map(str, kept)) or "scalar"


def extract(module: Any, target: Any, target_config: Mapping[str, Any], pipeline: str) -> list[Workload]:
    """Extract the workloads of a module after the graph pipeline, the heaviest first."""
    known = pipelines.PIPELINES.get(pipeline)
    kernel_layout = known.layout[1] if known and known.layout else "OIHW"
    pipeline = known.tuned_as if known else pipeline
    found = []
    for task in ms.relax_integration.extract_tasks(module, target):
        mod = task.dispatched[0]
        if in_place_concat.is_join(mod["main"]) or recurrent.is_loop(mod["main"]):
            continue
        arguments = list_arguments(mod)
        if not facts.is_schedulable(mod["main"]) or any(0 in shape for shape, _ in arguments):
            continue
        name = str(task.task_name).replace(half_precision.PREFIX, "", 1)
        computed = known is not None and half_precision.is_computed(known.weights, arguments)
        casts = not computed and all(dtype != "float16" for _, dtype in arguments)
        name = readable_name(name, [shape for shape, _ in arguments], kernel_layout, casts=casts)
        halved = half_precision.is_halved(arguments)
        prefix = half_precision.PREFIX if halved else COMPUTED_PREFIX if computed else ""
        found.append(
            Workload(
                hash=workload_hash(mod, target_config, pipeline),
                name=f"{prefix}{name}",
                # Reported FLOP do not depend on the algorithm.
                flop=count_direct_flop(mod) or float(estimate_tir_flops(mod)),
                weight=int(task.weight),
                arguments=arguments,
                module_json=canonical_json(mod),
                target=dict(target_config),
                pipeline=pipeline,
                function=str(task.task_name),
            )
        )
    return _with_unique_names(sorted(found, key=lambda w: (-w.flop * w.weight, w.name, w.hash)))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """TVM's `module` and `target`, the `pipeline` used, and the `workloads`, the heaviest first."""

    module: Any
    target: Any
    pipeline: pipelines.GraphPipeline
    workloads: list[Workload]


def prepare_model(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], target_config: Mapping[str, Any], pipeline_name: str
) -> Prepared:
    """Import `model` with static `shapes`, run the graph pipeline, extract the workloads. Raises UsageError."""
    compile_target = tvm_env.make_target(target_config)
    with compile_target:
        module = importer.import_onnx(model, shapes)
    module, used = pipelines.prepare(module, compile_target, pipelines.require_pipeline(pipeline_name))
    return Prepared(module, compile_target, used, extract(module, compile_target, target_config, used.name))


def list_arguments(module: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """List the shape and type of every argument of a function, results included."""
    found = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=False)
    return tuple((tuple(int(size) for size in each.shape), str(each.dtype)) for each in found)


def _with_unique_names(found: list[Workload]) -> list[Workload]:
    """Number workloads with equal names, such as convolutions that differ in padding only."""
    counts: dict[str, int] = {}
    unique = []
    for workload in found:
        counts[workload.name] = number = counts.get(workload.name, 0) + 1
        unique.append(dataclasses.replace(workload, name=f"{workload.name} #{number}") if number > 1 else workload)
    return unique


def hash_for(workload: Workload, target_config: Mapping[str, Any]) -> str:
    """Return the hash of the same function for another target."""
    return workload_hash(tvm.ir.load_json(workload.module_json), target_config, workload.pipeline)


def workload_hash(module: Any, target_config: Mapping[str, Any], pipeline: str) -> str:
    """Return 16 hexadecimal digits over the function's structure (without names), the target and the pipeline."""
    text = json.dumps([hash_structure(module), dict(target_config), pipeline], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_structure(module: Any) -> str:
    """Return 16 hexadecimal digits over a function's structure; of a scheduled one, its candidate's name."""
    return f"{int(tvm_ffi.structural_hash(module)) & (2**64 - 1):016x}"
