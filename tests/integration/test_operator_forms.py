"""Attributes, ranks and types of operators that ONNX's own cases leave out compute what a reference computes.

That is ONNX's reference implementation; ONNX Runtime for pools, of whose attributes the former ignores some.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from farm.models.quantise import open_session
from farm.search import tvm_env
from farm.search.graph import importer, pipelines
from tests.onnx_suite import judging
from tests.onnx_suite.cases import Case

tvm = tvm_env.load()

Array = npt.NDArray[Any]
RNG = np.random.default_rng(7)
ORDER = RNG.permutation(np.arange(30)).reshape(3, 10)
EDGES = np.array([-7.5, -3, -0.0, 0, 2.5, np.inf, -np.inf, np.nan, 5], "float32")
DIVISORS = np.array([2, -2, np.inf, -np.inf, 3, -0.5, 0], "float32")
REGIONS = np.array([[1, 2, 30, 33], [0, 0, 12, 8]], "float32")


def image(*shape: int) -> Array:
    return RNG.normal(size=shape).astype("float32")


def reals(*values: float) -> Array:
    return np.array(values, "float32")


def whole(*values: int) -> Array:
    return np.array(values, "int64")


def form(op: str, *given: Array | None, held: tuple[int, ...] = (), outputs: int = 1, **attributes: Any) -> Any:
    """One node: its inputs, of which those at `held` are constants, its outputs and attributes."""
    return op, given, held, outputs, attributes


def make_case(forms: list[Any], opset: int, by_runtime: bool = False) -> Case:
    """All nodes in one model, each with inputs of its own."""
    graph, values = onnx.GraphProto(name="forms"), {}
    for number, (op, given, held, outputs, attributes) in enumerate(forms):
        names = []
        for at, array in enumerate(given):
            names.append("" if array is None else f"{op}{number}_{at}")
            if array is None:
                continue
            if at in held:
                graph.initializer.append(numpy_helper.from_array(array, names[-1]))
                continue
            values[names[-1]] = array
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(helper.make_tensor_value_info(names[-1], kind, array.shape))
        results = [f"{op}{number}_out{at}" for at in range(outputs)]
        graph.node.append(helper.make_node(op, names, results, **attributes))
        graph.output.extend(helper.make_empty_tensor_value_info(name) for name in results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    if by_runtime:
        wanted = open_session(model.SerializeToString()).run(None, values)
    else:
        wanted = ReferenceEvaluator(model).run(None, values)
    return Case("forms", model, values, tuple(map(np.asarray, wanted)), 1e-4, 1e-5)


def resize(data: Array, scales: Array | None, sizes: Array | None = None, roi: Array | None = None, **more: Any) -> Any:
    return form("Resize", data, roi, scales, sizes, held=(1, 2, 3), **more)


PHOTO = image(1, 3, 6, 7)
RESIZES = [
    resize(image(7), reals(1.6), mode="linear"),
    resize(image(2, 3, 7), reals(1, 1, 2.4), mode="cubic", coordinate_transformation_mode="asymmetric"),
    resize(image(1, 2, 3, 4, 5), reals(1, 1, 2, 1.5, 0.7), mode="linear"),
    resize(image(1, 2, 3, 4, 5), reals(1, 1, 2, 2, 2), mode="nearest"),
    resize(PHOTO, reals(1, 1.5, 0.7, 2), mode="linear", coordinate_transformation_mode="align_corners"),
    resize(PHOTO, reals(2, 3), mode="linear", axes=[3, 2], exclude_outside=1),
    resize(PHOTO, reals(2, 3), mode="linear", axes=[2, 3]),
    resize(PHOTO, None, whole(9, 5), mode="cubic", axes=[2, 3], antialias=1, exclude_outside=1, cubic_coeff_a=-0.5),
    resize(PHOTO, None, whole(9, 5), mode="cubic", axes=[3, 2], keep_aspect_ratio_policy="not_smaller"),
    resize(PHOTO, None, whole(1, 3, 11, 13), mode="nearest", nearest_mode="ceil"),
    resize(PHOTO, None, whole(1, 3, 1, 1), mode="linear", coordinate_transformation_mode="align_corners"),
    *(
        resize(
            PHOTO,
            None,
            whole(5, 9),
            reals(-0.1, 0.2, 0.8, 1.3),
            mode=mode,
            axes=[2, 3],
            coordinate_transformation_mode="tf_crop_and_resize",
            extrapolation_value=10.0,
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    resize(RNG.integers(0, 255, (1, 3, 4, 4)).astype("uint8"), reals(1, 1, 2, 2), mode="linear"),
    resize(RNG.integers(0, 99, (1, 3, 4, 4)), reals(1, 1, 2, 1.5), mode="nearest"),
    resize(image(1, 2, 4, 4).astype("float16"), reals(1, 1, 2, 1.5), mode="cubic"),
]

# What no schedule family takes, or only one that once failed.
SMALL, MAPS = image(4, 5, 6), image(1, 8, 8, 8)
UNUSUAL = [
    *(form(name, SMALL, axis=axis) for name in ("ArgMax", "ArgMin") for axis in range(3)),
    form("GroupNormalization", MAPS, image(8), image(8), held=(1, 2), num_groups=4),
    form("ScatterElements", SMALL, whole(0, 1).reshape(2, 1, 1), image(2, 1, 1), held=(1,)),
    form("ScatterND", SMALL, whole(0, 1, 0, 3).reshape(2, 2), image(2, 6), held=(1,)),
    form("MatMul", image(7), image(7)),
    form("Einsum", image(7), image(7), equation="i,i->"),
    form("Split", SMALL, num_outputs=3, axis=1, outputs=3),
    form("Concat", SMALL, image(4, 5, 1), held=(1,), axis=2),
]
EMPTY = [
    form("Relu", image(2, 0, 3)),
    form("LayerNormalization", image(0, 4), image(4), held=(1,)),
    form("MatMul", image(3, 0), image(0, 4)),
    form("ReduceSum", image(3, 0), whole(1), held=(1,)),
    form("Concat", SMALL, image(4, 0, 6), held=(1,), axis=1),
    form("Identity", image(0, 4), held=(0,)),
    form("Slice", SMALL, whole(3), whole(3), whole(1), held=(1, 2, 3)),
    form("Split", SMALL, whole(2, 0, 3), held=(1,), axis=1, outputs=3),
]

HALVES = [
    form(name, (5 + image(1, 2, 128, 128)).astype("float16"), **more)
    for name, more in (
        ("GlobalAveragePool", {}), ("AveragePool", {"kernel_shape": [128, 128]}),
    )
] + [
    form("Erf", image(9).astype("float16")),
    form("Gelu", image(9).astype("float16")),
    form("Softmax", image(2, 4096).astype("float16")),
    form("MatMul", image(2, 4096).astype("float16"), np.full((4096, 2), 0.01, "float16"), held=(1,)),
]  # fmt: skip
NUMBERS = whole(-3, 0, 2, 7)
MOVED = [
    form("GatherND", image(3, 16, 5), RNG.integers(0, 3, (2, 3, 4, 2, 2)), held=(1,)),
    form("GatherND", image(3, 16), RNG.integers(0, 3, (2, 3, 4, 2, 2)), held=(1,)),
    *(form("Tile", image(2, 3, 4, 5), whole(*counts), held=(1,)) for counts in ((1, 6, 4, 2), (2, 1, 1, 3))),
    form("Pad", SMALL, whole(0, 2, 1, 0), reals(3)[0], whole(0, 2), held=(1, 2, 3)),
    form("OneHot", NUMBERS[1:3].astype("int32"), whole(4)[0], reals(2, 5), held=(1,), axis=0),
    form("Pow", NUMBERS, whole(2)),
    form("Pow", image(4) ** 2, NUMBERS.astype("int32")),
    form("PRelu", MAPS, image(8, 1, 1), held=(1,)),
    form("Constant", value_floats=[0.5, 2.0]),
    form("Col2Im", image(2, 18, 12), whole(5, 7), whole(2, 3), held=(1, 2), strides=[2, 3], pads=[0, 1, 3, 1]),
    form(
        "Col2Im",
        RNG.integers(0, 9, (1, 8, 12)).astype("int32"),
        *(whole(2, 6, 4), whole(2, 2, 2)),
        held=(1, 2),
        dilations=[1, 2, 1],
    ),
]
PLACED = [
    *(
        form("TensorScatter", image(2, 3, 4), image(2, *size), whole(2, 5), axis=axis, mode="circular")
        for axis, size in ((1, (2, 4)), (-1, (3, 3)))
    ),
    form("TensorScatter", image(2, 3, 4), image(2, 1, 4)),
    form("ReverseSequence", image(4, 3, 5), whole(4, 0, 2)),
    form("BitCast", image(5).astype("float16"), to=onnx.TensorProto.UINT16),
    form("Det", image(2, 4, 4)),
    *(
        form(
            "TopK", (ORDER.astype(kind) * np.array(scale, kind)), whole(2), held=(1,), outputs=2, axis=0, largest=at % 2
        )
        for at, (kind, scale) in enumerate(
            (("uint64", 1 << 58), ("uint64", 1 << 58), ("uint32", 1 << 27), ("int16", 9))
        )
    ),
    form("TopK", SMALL, whole(6), held=(1,), outputs=2, sorted=0),
    form("TopK", SMALL, whole(0), held=(1,), outputs=2, axis=1),
]


def pool(op: str, **attributes: Any) -> Any:
    return form(op, image(1, 2, 7, 8), **({"kernel_shape": [3, 2], "strides": [3, 2]} | attributes))


SHIFTED, SHIFTS = np.array([[1], [5], [100], [-3]]), np.array([0, 1, 7, 31, 32, 63, 64, -1])
ARITHMETIC = [
    *(form("Mod", EDGES[:, None].astype(kind), DIVISORS.astype(kind)) for kind in ("float32", "float64", "float16")),
    form("Mod", EDGES[:, None], DIVISORS, fmod=1),
    *(form(name, EDGES, np.roll(EDGES, 3), np.roll(EDGES, 4)) for name in ("Max", "Min")),
    *(
        form("BitShift", SHIFTED.astype(kind), SHIFTS.astype(kind), direction=direction)
        for kind in ("int8", "uint8", "int32", "int64")
        for direction in ("LEFT", "RIGHT")
    ),
    form("LpNormalization", np.concatenate([abs(SMALL), np.zeros((1, 5, 6), "float32")]), p=1),
    form("LpNormalization", SMALL, p=2, axis=0),
]


POOLS = [
    *(pool(op, auto_pad="SAME_LOWER") for op in ("MaxPool", "AveragePool", "LpPool")),
    *(pool(op, ceil_mode=1) for op in ("MaxPool", "AveragePool", "LpPool")),
    *(pool(op, ceil_mode=1, kernel_shape=[2, 2], pads=[0, 0, 1, 1]) for op in ("MaxPool", "AveragePool", "LpPool")),
    *(pool(op, ceil_mode=1, dilations=[2, 2], pads=[1, 1, 1, 1]) for op in ("MaxPool", "AveragePool", "LpPool")),
    pool("AveragePool", ceil_mode=1, pads=[1, 1, 1, 1], count_include_pad=1),
    pool("MaxPool", outputs=2, pads=[1, 1, 1, 0], dilations=[2, 1]),
    pool("MaxPool", outputs=2, storage_order=1),
    form("MaxPool", image(1, 2, 5, 6, 7), outputs=2, kernel_shape=[3, 2, 2], strides=[2, 2, 1], ceil_mode=1),
    form("MaxPool", RNG.integers(0, 3, (1, 2, 6, 6)).astype("uint8"), outputs=2, kernel_shape=[3, 3], pads=[1] * 4),
    form("AveragePool", image(1, 2, 9), kernel_shape=[4], strides=[3], ceil_mode=1),
    form("MeanVarianceNormalization", image(1, 2, 5, 8) + np.float32(32)),
    *(
        form("ConvTranspose", image(2, 4, 5, 6), image(4, 3, *window), image(3), held=(1, 2), **more)
        for window, more in (
            ((3, 4), {"strides": [2, 3], "output_shape": [9, 17]}),
            ((3, 4), {"strides": [2, 3], "output_shape": [9, 17], "auto_pad": "SAME_UPPER"}),
            ((2, 2), {"strides": [3, 4], "output_shape": [15, 24]}),
        )
    ),
    *(
        form(
            "RoiAlign",
            image(2, 3, 9, 10),
            REGIONS,
            whole(1, 0),
            output_height=3,
            output_width=2,
            spatial_scale=0.25,
            coordinate_transformation_mode=mode,
        )
        for mode in ("half_pixel", "output_half_pixel")
    ),
]

FIELDS = image(2, 4, 6, 7)
SAMPLES = [
    form(
        "DeformConv",
        *(FIELDS, image(6, 2, 3, 2), 2 * image(2, 24, 3, 4), image(6), image(2, 12, 3, 4)),
        held=(1, 3),
        group=2,
        offset_group=2,
        strides=[2, 2],
        dilations=[1, 2],
        pads=[1, 1, 0, 2],
    ),
    form("DeformConv", FIELDS, image(3, 4, 3, 3), 9 * image(2, 18, 4, 5), image(3), held=(1,)),
    *(
        form(
            "RoiAlign",
            image(2, 3, 9, 10),
            np.concatenate([REGIONS, 4 * REGIONS - 9]),
            whole(1, 0, 0, 1),
            mode="max",
            output_height=3,
            output_width=2,
            sampling_ratio=ratio,
            spatial_scale=0.25,
            coordinate_transformation_mode=mode,
        )
        for ratio, mode in ((2, "half_pixel"), (3, "output_half_pixel"))
    ),
]
WAVES, POLES = image(2, 7, 5, 1), image(2, 7, 5, 2)
SPECTRA = [
    *(
        form("DFT", data, None if length is None else whole(length)[0], whole(axis)[0], held=(1, 2), **more)
        for data, more in (
            (WAVES, {}), (WAVES, {"onesided": 1}), (WAVES, {"inverse": 1}), (POLES, {}), (POLES, {"inverse": 1}),
            (POLES, {"inverse": 1, "onesided": 1}),
        )
        for length, axis in ((None, -2), (None, 1), (4, 0), (5, 1), (12, 1))
    ),
    *(
        form("STFT", data, whole(3)[0], window, length, held=held, onesided=onesided)
        for data, window, length, held, onesided in (
            (image(2, 30, 1), image(8), None, (1, 2), 1), (image(2, 30, 1), image(8), whole(8)[0], (1, 3), 0),
            (image(2, 30, 2), None, whole(7)[0], (1, 3), 0), (image(1, 9, 1), None, None, (1,), 1),
        )
    ),
]  # fmt: skip


def quantised(kind: str, *shape: int) -> Array:
    limits = np.iinfo(kind)
    return RNG.integers(limits.min, limits.max, shape).astype(kind)


def level(*values: float) -> Array:
    return np.array(values if len(values) > 1 else values[0], "float32")


# Operators on bytes, with constant weights, scales and zero points.
ZERO, OTHER_ZERO = np.array(120, "uint8"), np.array(3, "int8")
BYTES = quantised("uint8", 1, 4, 7, 7)
KERNELS, KERNEL_ZEROS = quantised("int8", 6, 2, 3, 3), np.zeros(6, "int8")
INTEGERS = [
    form(
        "QLinearConv",
        *(BYTES, level(0.02), ZERO, KERNELS, level(*(0.01 + 0.001 * np.arange(6))), KERNEL_ZEROS, level(0.6), ZERO),
        RNG.integers(-9999, 9999, 6).astype("int32"),
        held=tuple(range(1, 9)),
        group=2,
        pads=[1, 1, 1, 1],
        strides=[2, 2],
    ),
    form(
        "QLinearMatMul",
        *(quantised("uint8", 2, 5, 8), level(0.02), ZERO, quantised("int8", 8, 3), level(0.01), OTHER_ZERO),
        *(level(0.9), ZERO),
        held=tuple(range(1, 8)),
    ),
    form(
        "ConvInteger", BYTES, quantised("uint8", 3, 4, 3, 3), ZERO, np.array(5, "uint8"), held=(1, 2, 3), pads=[1] * 4
    ),
    form("DynamicQuantizeLinear", np.zeros((2, 3), "float32"), outputs=3),
    form("DequantizeLinear", quantised("int8", 5, 6), abs(image(3, 6)), held=(1,), axis=0, block_size=2),
    form("MatMulInteger", quantised("uint8", 2, 3, 7), quantised("int8", 7, 5), ZERO, OTHER_ZERO, held=(1, 2, 3)),
    form("MatMulInteger", quantised("uint8", 2, 3, 8), quantised("int8", 8, 16), ZERO, held=(1,)),
    form("MatMulInteger", quantised("uint8", 3, 8), quantised("int8", 8, 16), held=(1,)),
]


@pytest.mark.parametrize(
    ("forms", "opset"),
    [
        (RESIZES, 19),
        (UNUSUAL, 21),
        (EMPTY, 21),
        (ARITHMETIC, 21),
        (HALVES, 21),
        (MOVED, 21),
        (SPECTRA, 21),
        (PLACED, 26),
        (SAMPLES, 22),
    ],
    ids=[
        *("resizing", "unusual functions", "without elements", "arithmetic", "float16", "moved", "spectra"),
        *("placed", "samples"),
    ],
)
def test_forms_compute_what_the_reference_computes(forms: list[Any], opset: int) -> None:
    """Each output of each node, by the users' pipeline."""
    verdict = judging.judge(make_case(forms, opset))
    assert (verdict.kind, verdict.reason) == ("right", "")


@pytest.mark.parametrize(("forms", "opset"), [(POOLS, 21), (INTEGERS, 21)], ids=["pooling and normalising", "integers"])
def test_forms_compute_what_onnx_runtime_computes(forms: list[Any], opset: int) -> None:
    """Each output of each node, by the users' pipeline."""
    verdict = judging.judge(make_case(forms, opset, by_runtime=True))
    assert (verdict.kind, verdict.reason) == ("right", "")


def test_attention_is_as_short_as_written_by_hand() -> None:
    """ONNX's body of Attention without a mask: two products, a softmax, two scalings and a transpose are left."""
    shape = (1, 12, 16, 8)
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name in "qkv"]
    graph = helper.make_graph(
        [helper.make_node("Attention", list("qkv"), ["y"])], "a", inputs, [onnx.ValueInfoProto(name="y")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    module = importer.import_onnx(model, dict.fromkeys("qkv", shape))
    names = sorted(call.op.name.rpartition(".")[2] for call in pipelines._list_calls(module))
    assert names == ["matmul", "matmul", "multiply", "multiply", "permute_dims", "softmax"]


def test_integer_products_are_shifted_where_the_core_multiplies_signed_bytes() -> None:
    """Imported for Arm, whose data are int8, and computed here."""
    case = make_case(INTEGERS[-2:], 21, by_runtime=True)
    with tvm_env.make_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76", "num-cores": 1}):
        module = importer.import_onnx(case.model, case.shapes)
    assert {str(each.ty.dtype.dtype) for each in module["main"].params} == {"uint8"}
    assert "uint8" not in {
        str(c.args[0].ty.dtype) for c in pipelines._list_calls(module) if c.op.name == "relax.matmul"
    }
    host = tvm_env.make_target(tvm_env.host_target(1))
    prepared, used = pipelines.prepare(module, host, pipelines.require_pipeline("graph/2"))
    executable = tvm.compile(pipelines.finish(prepared, host, None, used), target=host)
    found = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, case.inputs.values()))
    for ours, wanted in zip(found, case.outputs, strict=True):
        np.testing.assert_array_equal(ours.numpy(), wanted)
