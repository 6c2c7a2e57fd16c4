"""The cases of ONNX's backend tests that a tensor compiler can have: a model, inputs, expected outputs, tolerances.

Left out are types that no tensor has (text, sequences, optionals, floats of 4 and 8 bits) and training. Inputs that
are sizes or axes are bound as constants, as exporters write them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.backend.test.loader
from onnx.backend.test.case.node import collect_testcases

from farm.search.graph.folding import bodies

Array = npt.NDArray[Any]

# By operator, the inputs that give sizes, axes, counts or bounds.
_BOUND: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,),
    "CumProd": (1,), "CumSum": (1,), "DFT": (1, 2), "Dropout": (1, 2), "Expand": (1,), "HammingWindow": (0,),
    "HannWindow": (0,), "If": (0,), "Loop": (0, 1), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4), "OneHot": (1,), "Pad": (1, 3), "Range": (0, 1, 2), "ReduceL1": (1,),
    "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,), "ReduceMax": (1,), "ReduceMean": (1,),
    "ReduceMin": (1,), "ReduceProd": (1,), "ReduceSum": (1,), "ReduceSumSquare": (1,), "Reshape": (1,),
    "Resize": (1, 2, 3), "STFT": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "SplitToSequence": (1,),
    "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,), "Upsample": (1,),
}  # fmt: skip
_TRAINING_DOMAIN = "ai.onnx.preview.training"
_NO_TENSORS = frozenset(
    getattr(onnx.TensorProto, name)
    for name in onnx.TensorProto.DataType.keys()  # noqa: SIM118  a protocol buffer's enumeration is no mapping
    if name in ("STRING", "COMPLEX64", "COMPLEX128")
    or name.startswith(("FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))
)
_FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")
_EXPANDED = "_expanded"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with `inputs` by name, the `outputs` that are expected in its order, and how far they may be away."""

    name: str
    model: onnx.ModelProto = dataclasses.field(repr=False)
    inputs: Mapping[str, Array] = dataclasses.field(repr=False)
    outputs: tuple[Array, ...] = dataclasses.field(repr=False)
    rtol: float
    atol: float

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs."""
        return {name: array.shape for name, array in self.inputs.items()}


def list_cases() -> list[Case]:
    """List the cases that are in scope, by name."""
    return sorted(filter(None, map(_prepare, _list_all())), key=lambda case: case.name)


def _list_all() -> Iterator[tuple[str, onnx.ModelProto, list[Any], list[Any], float, float]]:
    """Yield every published case with its first data set."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        published = collect_testcases(None)
    for case in published:
        given, wanted = case.data_sets[0]
        yield case.name, case.model, list(given), list(wanted), case.rtol, case.atol
    for kind in _FOLDERS:
        for case in onnx.backend.test.loader.load_model_tests(kind=kind):
            folder = pathlib.Path(case.model_dir)
            model = onnx.load(folder / "model.onnx")
            first = min(folder.glob("test_data_set_*"))
            given, wanted = ([_read(file) for file in _list_files(first, way)] for way in ("input", "output"))
            yield f"{kind}/{case.name}", model, given, wanted, case.rtol, case.atol


def _list_files(folder: pathlib.Path, way: str) -> list[pathlib.Path]:
    return sorted(folder.glob(f"{way}_*.pb"), key=lambda path: int(path.stem.rpartition("_")[2]))


def _read(path: pathlib.Path) -> Any:
    """Read a tensor; anything else is None, and out of scope."""
    try:
        return onnx.numpy_helper.to_array(onnx.load_tensor(path))
    except Exception:  # protocol buffers raise errors of several types
        return None


def _prepare(published: tuple[str, onnx.ModelProto, list[Any], list[Any], float, float]) -> Case | None:
    name, model, given, wanted, rtol, atol = published
    if not _is_in_scope(model):
        return None
    given = [onnx.numpy_helper.to_array(each) if isinstance(each, onnx.TensorProto) else each for each in given]
    wanted = [onnx.numpy_helper.to_array(each) if isinstance(each, onnx.TensorProto) else each for each in wanted]
    if not all(isinstance(each, np.ndarray | np.generic) for each in (*given, *wanted)):
        return None
    arrays = dict(zip((value.name for value in model.graph.input), map(np.asarray, given), strict=False))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    bound = _find_bound(copy.graph, name)
    inputs = [value for value in copy.graph.input if value.name not in bound]
    del copy.graph.input[:]
    copy.graph.input.extend(inputs)
    for each in sorted(bound):
        copy.graph.initializer.append(onnx.numpy_helper.from_array(arrays.pop(each), each))
    return Case(name, copy, arrays, tuple(map(np.asarray, wanted)), rtol, atol)


# Of a function's expansion the same inputs are bound as of the function: by the case's name, which comes after it.
_bound_by_name: dict[str, frozenset[str]] = {}


def _find_bound(graph: onnx.GraphProto, name: str) -> frozenset[str]:
    """Find the inputs to bind."""
    base = name.partition(_EXPANDED)[0]
    if base != name and base in _bound_by_name:
        return _bound_by_name[base]
    own = {value.name for value in graph.input}
    found = frozenset(
        each
        for node in graph.node
        for at, each in enumerate(node.input)
        if each in own and at in _BOUND.get(node.op_type, ())
    )
    _bound_by_name[name] = found
    return found


def _is_in_scope(model: onnx.ModelProto) -> bool:
    """Say whether all types are tensors' of whole bytes, and nothing is trained."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.WhichOneof("value") != "tensor_type" or value.type.tensor_type.elem_type in _NO_TENSORS:
            return False
    return not any(_is_training(node) or _has_strange_types(node) for node in _list_nodes(model.graph))


def _list_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from _list_nodes(body)


def _is_training(node: onnx.NodeProto) -> bool:
    return node.domain == _TRAINING_DOMAIN or any(a.name == "training_mode" and a.i for a in node.attribute)


def _has_strange_types(node: onnx.NodeProto) -> bool:
    return any(
        (a.name == "to" and a.i in _NO_TENSORS) or (a.HasField("t") and a.t.data_type in _NO_TENSORS)
        for a in node.attribute
    )
