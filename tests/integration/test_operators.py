"""Every ONNX operator that TVM's importer knows computes what ONNX Runtime computes, or is refused by its name.

Many small operators are branches of one model: importing and compiling them one by one would take minutes. A second
model has each image operator behind a convolution and a ReLU, where layout conversion has to deal with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.errors import ModelRefusedError, UsageError
from farm.models.quantise import open_session
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.search.graph import importer, pipelines
from farm.search.workloads import prepare_model

tvm = tvm_env.load()

RNG = np.random.default_rng(5)
HOST_CONFIG = tvm_env.host_target(1)
HOST = tvm_env.make_target(HOST_CONFIG)
PLAIN = tvm_env.make_target(HOST_CONFIG | {"opt-level": 0})  # the optimiser is not what is tested here
Array = npt.NDArray[Any]
COUNTS = RNG.integers(1, 50, (4, 6)).astype("int32")
BYTES = RNG.integers(0, 200, (4, 6)).astype("uint8")
# Batch, two corners: what finds boxes takes pixels, what pools them parts.
BOXES = np.array([[0, 0, 4, 4], [1, 1, 5, 5]], "float32")
# Known to the importer, and not tried here: of sequences and optional values, which no input or output can be; of a
# domain that the farm refuses; replaced long ago (Scatter, Upsample); or a reader of another's second output.
ELSEWHERE = frozenset(
    {
        "AllClassNMS", "Attention", "ConcatFromSequence", "MatMulInteger16", "MaxUnpool", "Optional",
        "OptionalGetElement", "OptionalHasElement", "Scatter", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
        "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence", "Upsample",
    }
)  # fmt: skip


def image(*shape: int) -> Array:
    return RNG.uniform(0.1, 0.9, shape or (1, 4, 6, 6)).astype("float32")


def whole(*values: Any) -> Array:
    return np.array(values, "int64")


def number(value: int) -> Array:
    return np.array(value, "int64")


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator: what it is given when it runs, what the model holds (None: nothing), attributes, outputs read."""

    op: str
    inputs: Mapping[str, Array]
    weights: Mapping[str, Array | None]
    attributes: Mapping[str, Any]
    outputs: int = 1
    domain: str = ""

    def add_to(self, graph: onnx.GraphProto, values: dict[str, Array], prefix: str, behind: bool) -> None:
        """Put the operator into a model, each of its values under a name of its own, and its inputs into `values`."""
        renamed = {}
        for name, array in self.inputs.items():
            renamed[name] = f"{prefix}_{name}"
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(helper.make_tensor_value_info(renamed[name], kind, array.shape))
            values[renamed[name]] = array
        for name, held in self.weights.items():
            if held is not None:
                renamed[name] = f"{prefix}_{name}"
                graph.initializer.append(numpy_helper.from_array(np.asarray(held), renamed[name]))
        if behind:
            first = next(iter(self.inputs))
            channels = self.inputs[first].shape[1]
            kernel = RNG.uniform(0, 1 / channels, (channels, channels, 1, 1)).astype("float32")
            graph.initializer.append(numpy_helper.from_array(kernel, f"{prefix}_kernel"))
            conv, relu = f"{prefix}_conv", f"{prefix}_relu"
            graph.node.append(helper.make_node("Conv", [renamed[first], f"{prefix}_kernel"], [conv]))
            graph.node.append(helper.make_node("Relu", [conv], [relu]))
            renamed[first] = relu
        order = [renamed.get(name, "") for name in (*self.inputs, *self.weights)]
        results = [f"{prefix}_out{index}" for index in range(self.outputs)]
        graph.node.append(helper.make_node(self.op, order, results, name=prefix, domain=self.domain, **self.attributes))
        graph.output.extend(helper.make_empty_tensor_value_info(result) for result in results)


def case(
    op: str, *given: Array, held: Sequence[Array | None] = (), outputs: int = 1, domain: str = "", **attributes: Any
) -> Case:
    return Case(
        op,
        {f"x{index}": array for index, array in enumerate(given)},
        {f"w{index}": array for index, array in enumerate(held)},
        attributes,
        outputs,
        domain,
    )


def make_model(cases: Sequence[Case], opset: int, behind: bool) -> tuple[onnx.ModelProto, dict[str, Array]]:
    graph = onnx.GraphProto(name="operators")
    values: dict[str, Array] = {}
    for number, each in enumerate(cases):
        each.add_to(graph, values, f"{each.op}{number}", behind)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), values


def compare(cases: Sequence[Case], opset: int, behind: bool = False) -> tuple[list[str], str]:
    """The outputs that are not ONNX Runtime's, each with how it differs, and the name of the pipeline used."""
    model, values = make_model(cases, opset, behind)
    wanted = open_session(model.SerializeToString()).run(None, values)
    found, used = run_ours(model, values)
    assert len(found) == len(wanted)
    wrong = []
    for value, ours, theirs in zip(model.graph.output, found, wanted, strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            wrong.append(f"{value.name}: {ours.shape} {ours.dtype}, not {theirs.shape} {theirs.dtype}")
        elif not np.allclose(ours.astype("float64"), theirs.astype("float64"), rtol=1e-3, atol=1e-4, equal_nan=True):
            wrong.append(f"{value.name} has other values")
    return wrong, used


def run_ours(model: onnx.ModelProto, values: Mapping[str, Array], name: str = "graph/2") -> tuple[list[Array], str]:
    """The outputs as the farm's code computes them, and the name of the pipeline used."""
    module = importer.import_onnx(model, {name: array.shape for name, array in values.items()})
    module, used = pipelines.prepare(module, HOST, pipelines.require_pipeline(name))
    made = pipelines.finish(module, HOST, None, used)
    machine = tvm.relax.VirtualMachine(tvm.compile(made, PLAIN, tir_pipeline=lowering.use_pipeline()), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(values[value.name]) for value in model.graph.input))
    return [result.numpy()] if hasattr(result, "numpy") else [one.numpy() for one in result], used.name


X, Y = image(), image()
M = image(4, 6)
SIGNED = X - 0.5
MASK, OTHER_MASK = X > 0.5, Y > 0.5
CHANNELS = [image(4), image(4)]


def each(names: str, *given: Array, **attributes: Any) -> list[Case]:
    return [case(name, *given, **attributes) for name in names.split()]


# What takes an image first, and may stand behind a convolution.
IMAGES = [
    *each(
        "Abs Acos Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Exp Floor HardSigmoid HardSwish Identity IsInf IsNaN"
        " LeakyRelu Neg Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh Hardmax"
        " ThresholdedRelu LogSoftmax Softmax GlobalAveragePool GlobalLpPool GlobalMaxPool MeanVarianceNormalization"
        " Flatten Dropout Size Transpose Trilu",
        X,
    ),
    *each("Softmax LogSoftmax Hardmax", X, axis=1),
    *each("ArgMax ArgMin", X, axis=1),
    *each("ReduceMax ReduceMean ReduceMin", X, axes=[2, 3]),
    *each("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSumSquare", X, axes=[1], keepdims=0),
    *each("AveragePool MaxPool LpPool", X, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    *each("DepthToSpace SpaceToDepth", X, blocksize=2),
    *each("Add Sub Mul Div Pow Max Min Mean Sum Equal Greater GreaterOrEqual Less LessOrEqual", X, Y),
    *each("Add Mul PRelu", X, held=[image(4, 1, 1)]),
    case("Mod", X, Y, fmod=1),
    case("MatMul", X, Y),
    case("Transpose", X, perm=[0, 2, 3, 1]),
    case("LRN", X, size=3),
    case("IsInf", X, detect_negative=0),
    case("Cast", X, to=TensorProto.INT32),
    case("CastLike", X, COUNTS),
    case("Clip", X, held=[np.array(0.2, "float32"), np.array(0.6, "float32")]),
    case("BatchNormalization", X, held=[*CHANNELS, *CHANNELS]),
    case("Concat", X, Y, axis=1),
    case("Concat", X, Y, axis=-1),
    case("Conv", X, held=[image(6, 4, 3, 3), image(6)], pads=[1, 1, 1, 1]),
    case("Conv", X, held=[image(4, 1, 3, 3)], group=4, strides=[2, 2]),
    case("ConvTranspose", X, held=[image(4, 3, 3, 3), image(3)], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("CumSum", X, held=[number(1)]),
    case("Einsum", X, equation="bchw->bhw"),
    case("Expand", X, held=[whole(2, 4, 6, 6)]),
    case("Gather", X, held=[whole(0, 2)], axis=1),
    case("Gather", X, held=[number(2)], axis=2),
    case("GatherElements", X, held=[whole(*range(4)).reshape(1, 4, 1, 1) % 2], axis=1),
    case("GatherND", X, held=[whole([0, 1], [0, 3])]),
    case("GridSample", X, SIGNED[:, :2].transpose(0, 2, 3, 1).copy()),
    case("InstanceNormalization", X, held=CHANNELS),
    case("LayerNormalization", X, held=[image(6), image(6)]),
    case("LayerNormalization", X, held=[image(4, 6, 6), image(4, 6, 6)], axis=1),
    case("LayerNormalization", X, held=[image(1, 4, 6, 6)], axis=0),
    case("Pad", X, held=[whole(0, 0, 1, 2, 0, 0, 2, 1)]),
    case("Pad", X, held=[whole(0, 0, 1, 1, 0, 0, 1, 1)], mode="reflect"),
    case("ReduceSum", X, held=[whole(2, 3)]),
    case("Reshape", X, held=[whole(1, 2, 2, 36)]),
    case("Resize", X, held=[None, np.array([1, 1, 2, 2], "float32")], mode="nearest"),
    case("Resize", X, held=[None, None, whole(1, 4, 9, 9)], mode="linear"),
    case("ScatterElements", X, held=[whole(0, 1, 0, 2).reshape(1, 4, 1, 1), image(1, 4, 1, 1)], axis=2),
    case("ScatterND", X, held=[whole([0, 1], [0, 3]), image(2, 6, 6)]),
    case("Slice", X, held=[whole(1, 0), whole(3, 6), whole(1, 3), whole(1, 2)]),
    case("Split", X, held=[whole(1, 3)], axis=1, outputs=2),
    case("Squeeze", X, held=[whole(0)]),
    case("Tile", X, held=[whole(1, 2, 1, 1)]),
    case("TopK", X, held=[whole(2)], axis=1, outputs=2),
    case("Unsqueeze", X, held=[whole(0)]),
    case("QuantizeLinear", X, held=[np.array(0.01, "float32"), np.array(3, "uint8")]),
    case("DynamicQuantizeLinear", X, outputs=3),
    case("MaxRoiPool", X, held=[np.c_[[0, 0], BOXES].astype("float32")], pooled_shape=[2, 2]),
    case("RoiAlign", X, held=[BOXES, whole(0, 0)], output_height=2, output_width=2),
]
# Those of newer versions of ONNX.
NEWER = [
    *each("Gelu Mish", X),
    case("GroupNormalization", X, held=CHANNELS, num_groups=2),
    case("RMSNormalization", X, held=[image(4, 6, 6)], axis=1),
    case("RMSNormalization", X, held=[image(1, 4, 6, 6)], axis=0),
]
# What does not take an image first.
OTHERS = [
    *each("Acosh Reciprocal Log", 1 + M),
    *each("And Or Xor", MASK, OTHER_MASK),
    *each("BitwiseAnd BitwiseOr BitwiseXor", COUNTS, COUNTS + 1),
    *each("Not", MASK),
    *each("BitwiseNot", COUNTS),
    case("AffineGrid", image(1, 2, 3), held=[whole(1, 1, 4, 4)]),
    case("BitShift", BYTES, BYTES % 7, direction="RIGHT"),
    case("Constant", value=numpy_helper.from_array(M)),
    case("ConstantOfShape", held=[whole(2, 3)]),
    case("DequantizeLinear", BYTES, held=[np.array(0.1, "float32"), np.array(7, "uint8")]),
    case("Einsum", M, M, equation="ij,kj->ik"),
    case("EyeLike", M),
    case("Gemm", M, held=[image(6, 3), image(3)]),
    case("Gemm", M, M, transB=1, alpha=0.5),
    case("MatMul", M, held=[image(6, 3)]),
    case("MatMulInteger", BYTES, held=[BYTES.T.copy()]),
    case("Mod", COUNTS, COUNTS.T.copy().reshape(4, 6)),
    case("OneHot", whole(0, 2), held=[number(3), np.array([0, 1], "float32")]),
    case("Range", held=[number(1), number(9), number(2)]),
    case("Shape", X),
    case("Where", MASK, X, Y),
    case("BiasGelu", M, held=[image(6)], domain="com.microsoft"),
    case("FastGelu", M, domain="com.microsoft"),
    case("Gelu", M, domain="com.microsoft"),
    case("SkipLayerNormalization", image(1, 4, 8), image(1, 4, 8), held=[image(8)] * 3, domain="com.microsoft"),
    case(
        "EmbedLayerNormalization",
        np.array([[0, 2, 1]], "int32"),
        np.array([[0, 1, 1]], "int32"),
        held=[image(5, 8), image(4, 8), image(2, 8), image(8), image(8)],
        outputs=2,
        domain="com.microsoft",
    ),
]
# Operators that are refused, and the word by which.
REFUSED = [
    ("BatchNormalization", case("BatchNormalization", X, held=[*CHANNELS, *CHANNELS], training_mode=1)),
    ("Compress", case("Compress", M, held=[np.array([True, False, True, True])], axis=0)),
    ("ConvTranspose", case("ConvTranspose", X, held=[image(4, 3, 3, 3)], output_shape=[19, 19], strides=[2, 2])),
    ("Dropout", case("Dropout", X, held=[np.array(0.5, "float32"), np.array(True)])),
    ("NonMaxSuppression", case("NonMaxSuppression", BOXES[None], image(1, 1, 2), held=[whole(2)])),
    ("NonZero", case("NonZero", M)),
    ("RoiAlign", case("RoiAlign", X, held=[BOXES, whole(0, 0)], output_height=2, output_width=2, mode="max")),
    ("Unique", case("Unique", M)),
    ("Det", case("Det", X)),
]


@pytest.mark.parametrize(
    ("cases", "opset", "behind"),
    [
        (IMAGES[0::2], 17, False),
        (IMAGES[1::2], 17, False),
        (IMAGES[0::2], 17, True),
        (IMAGES[1::2], 17, True),
        (NEWER, 23, False),
        (NEWER, 23, True),
        (OTHERS, 20, False),
    ],
    ids=["images", "more images", "behind convolutions", "more behind convolutions", "newer", "newer behind", "others"],
)
def test_operators_compute_what_onnx_runtime_computes(cases: Sequence[Case], opset: int, behind: bool) -> None:
    """Each output of each operator, through import, graph pipeline and compiler."""
    wrong, used = compare(cases, opset, behind)
    assert not wrong
    assert used == "graph/2"


def test_a_model_that_the_layout_does_not_suit_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """TVM cannot turn a normalisation of rows behind a convolution; a warning says so, since its code is slower."""
    wrong, used = compare([case("RMSNormalization", X, held=[image(6)])], 23, behind=True)
    assert (wrong, used) == ([], "graph/2-nchw")
    assert "graph/2 does not suit this model; using graph/2-nchw" in caplog.text


def test_an_operator_without_code_is_found() -> None:
    """TVM has no code for a deconvolution in this layout, and says so only when a whole model is compiled."""
    relax = tvm.relax
    builder = relax.BlockBuilder()
    data, kernel = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (
        ("data", (1, 6, 6, 4)), ("kernel", (3, 3, 4, 4))
    ))  # fmt: skip
    with builder.function("main", [data, kernel]):
        call = relax.op.nn.conv2d_transpose(data, kernel, data_layout="NHWC", kernel_layout="HWIO")
        builder.emit_func_output(builder.emit(call))
    assert pipelines.find_operators(builder.get(), HOST) == ["nn.conv2d_transpose"]


@pytest.mark.parametrize(("word", "refused"), REFUSED, ids=lambda value: value.op if isinstance(value, Case) else value)
def test_what_cannot_be_compiled_is_refused_by_name(word: str, refused: Case) -> None:
    """Before anything is tuned: with the operator's name, and what to do."""
    model, values = make_model([refused], 17, behind=False)
    with pytest.raises(UsageError, match=f"operator {word}") as caught:
        prepare_model(model, {name: array.shape for name, array in values.items()}, HOST_CONFIG, "graph/2")
    assert caught.value.hint
    # What is imported has no code for this target, under TVM's name; another target may have some.
    assert isinstance(caught.value, ModelRefusedError) == word.islower()


def test_every_operator_that_the_importer_knows_is_here() -> None:
    """A new version of TVM that knows more fails this until they are tried."""
    from tvm.relax.frontend.onnx import onnx_frontend

    here = {each.op for each in (*IMAGES, *NEWER, *OTHERS, *(refused for _, refused in REFUSED))}
    assert set(onnx_frontend._get_convert_map()) - here == ELSEWHERE


def test_values_at_the_edges_are_computed_right() -> None:
    """NaN and infinities stay where ONNX's functions have them, bounds of 64 bits and large powers are exact."""
    odd = np.array([[math.nan, -math.inf, math.inf, -2, 0, 3, 88.7, -104, 89]], "float32")
    bounds = [np.array(0, "int64"), np.array(2**63 - 1, "int64")]
    least, most = np.array(0, "float32"), np.array(6, "float32")
    found = compare(
        [
            *each("Sign Relu Elu Selu Celu HardSigmoid HardSwish ThresholdedRelu Erf Exp Softplus Sigmoid Tanh", odd),
            *(case(op, odd, held=[most]) for op in ("Max", "Min")),
            *(case(op, odd, held=[np.ones_like(odd)]) for op in ("Max", "Min")),
            case("Clip", odd, held=[least, most]),
            case("Clip", whole(-5, 2**62, 7), held=bounds),
        ],
        18,
    )
    assert found[0] == []


@pytest.mark.parametrize(("opset", "groups", "count"), [(18, 2, 2), (21, 2, 8), (21, 8, 8)])
def test_groups_far_from_zero_are_normalised_exactly(opset: int, groups: int, count: int) -> None:
    """Groups with a mean of 1,000 are normalised as in float64, where ONNX Runtime itself is off.

    Eight groups of eight channels are an InstanceNormalization.
    """
    far, scales = RNG.uniform(999.9, 1000.1, (1, 8, 6, 6)).astype("float32"), image(count)
    attributes = {"num_groups": groups} if groups < 8 else {}
    name = "GroupNormalization" if attributes else "InstanceNormalization"
    [found], _ = run_ours(*make_model([case(name, far, held=[scales, scales], **attributes)], opset, False))
    values = far.astype("float64").reshape(1, groups, -1)
    apart = values - values.mean(2, keepdims=True)
    normal = (apart / np.sqrt(values.var(2, keepdims=True) + 1e-5)).reshape(1, count, -1)
    wanted = (normal * scales[:, None] + scales[:, None]).reshape(far.shape)
    assert np.abs(found - wanted).max() < 1e-5
