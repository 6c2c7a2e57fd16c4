"""A model's inputs: names, open dimensions, the shapes of `--shape`, and seeded values for them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx

from farm.errors import UsageError
from farm.models import shape_hints
from farm.search.graph import folding

_log = logging.getLogger(__name__)

# Operators that look values up, with the positions of data and indices among their inputs.
_LOOKUPS = {
    "Gather": (0, 1),
    "GatherElements": (0, 1),
    "GatherND": (0, 1),
    "Scatter": (0, 1),
    "ScatterElements": (0, 1),
    "ScatterND": (0, 1),
}
_BY_TUPLES = ("GatherND", "ScatterND")
# Operators that keep their first input's values.
_PASSING = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
Array = npt.NDArray[np.generic]
# The limit of one message.
_MOST_BYTES = 1 << 31
_EDGES = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 6.0, -6.0)


def find_rows(model: onnx.ModelProto) -> dict[str, int]:
    """Return the rows of the smallest table that each index input addresses, by the input's name.

    An index is valid from 0 to rows - 1. Tables of unknown shape are ignored.
    """
    nodes = list(folding.list_nodes(model.graph))
    if not any(node.op_type in _LOOKUPS for node in nodes):
        return {}
    sources = {out: node.input[0] for node in nodes if node.op_type in _PASSING and node.input for out in node.output}
    shapes = _read_shapes(model.graph, nodes)
    fed = {value.name for value in model.graph.input}
    rows: dict[str, int] = {}
    for node in nodes:
        at_data, at_indices = _LOOKUPS.get(node.op_type, (0, 0))
        if not at_indices or len(node.input) <= at_indices:
            continue
        name = _follow(node.input[at_indices], sources)
        if name not in fed:
            continue
        size = _count_rows(node, shapes.get(node.input[at_data], ()))
        if size > 0:
            rows[name] = min(size, rows.get(name, size))
    return rows


def _follow(name: str, sources: Mapping[str, str]) -> str:
    # A damaged graph may be cyclic.
    for _ in range(len(sources)):
        if name not in sources:
            break
        name = sources[name]
    return name


def _read_shapes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> dict[str, tuple[int, ...]]:
    """Return the known shapes by name; an open dimension is 0."""
    shapes = {
        value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input)
    }
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in nodes:
        held = next((each.t for each in node.attribute if each.name == "value"), None)
        if node.op_type == "Constant" and held is not None:
            shapes[node.output[0]] = tuple(held.dims)
        # A table stored in 8 or 16 bits has as many rows.
        elif node.op_type in ("Cast", "DequantizeLinear", "Identity") and node.input and node.input[0] in shapes:
            shapes.setdefault(node.output[0], shapes[node.input[0]])
    return shapes


def _count_rows(node: onnx.NodeProto, shape: tuple[int, ...]) -> int:
    if not shape:
        return 0
    if node.op_type in _BY_TUPLES:
        return min(shape)
    axis = next((int(each.i) for each in node.attribute if each.name == "axis"), 0)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input. `shape` has a number per known dimension and the model's name ("?" for none) per open one.

    `dtype` is NumPy's. `rows` is the size of the smallest table that the input indexes; None for other inputs.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    rows: int | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether any dimension is open."""
        return any(isinstance(d, str) for d in self.shape)

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape as numbers. Raises UsageError for an open dimension."""
        if self.is_dynamic:
            raise UsageError(f"input {self} has open dimensions", shape_hints.describe([self], None))
        return tuple(int(d) for d in self.shape)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"


def read_inputs(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """Return the inputs that a caller must feed, in order.

    Weights, which ONNX files of IR version 3 list among the inputs, are left out. Raises UsageError for an input that
    is no tensor or has no rank.
    """
    weights = {i.name for i in model.graph.initializer} | {i.values.name for i in model.graph.sparse_initializer}
    rows = find_rows(model)
    return tuple(_read_input(value, rows.get(value.name)) for value in model.graph.input if value.name not in weights)


def _read_input(value: onnx.ValueInfoProto, rows: int | None) -> InputSpec:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise UsageError(
            f"input {value.name!r} is a {(kind or 'value without type').removesuffix('_type')}, not a tensor"
        )
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise UsageError(
            f"input {value.name!r} has no shape in the model, not even a number of dimensions",
            "Export the model with shapes; onnx.tools.update_model_dims can add them.",
        )
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, ValueError) as error:
        raise UsageError(f"input {value.name!r} has the unknown element type {tensor.elem_type}") from error
    if dtype == "object":
        raise UsageError(f"input {value.name!r} is text; the farm feeds numbers only")
    # Some exporters write 0 or -1 for an open dimension.
    shape = tuple(d.dim_value if d.dim_value > 0 else d.dim_param or "?" for d in tensor.shape.dim)
    return InputSpec(value.name, shape, dtype, rows)


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `NAME=1,3,224,224` (or 1x3x224x224; `NAME=` alone means a scalar). Raises UsageError.

    A name may hold "=" and ":"; the last "=" ends it.
    """
    name, equals, numbers = text.rpartition("=")
    if not equals or not name.strip():
        raise UsageError(f"--shape {text!r} is not NAME=1,3,224,224")
    if ".." in numbers:
        raise UsageError(f"--shape {text!r} is a range of lengths, where one is needed", "Give one, as in tokens=128.")
    shape = []
    for word in filter(None, numbers.strip(" []()").replace("x", ",").split(",")):
        if not word.strip().lstrip("+-").isdecimal() or len(word) > 18:
            raise UsageError(f"--shape {text[:80]!r}: {word.strip()[:80]!r} is not a whole number")
        if (number := int(word)) <= 0:
            raise UsageError(f"--shape {text!r}: every dimension must be at least 1, not {number}")
        shape.append(number)
    return name.strip(), tuple(shape)


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Read several `--shape` options. Raises UsageError, also when two are about one input."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, shape = parse_shape(text)
        if shapes.setdefault(name, shape) != shape:
            raise UsageError(f"--shape gives input {name!r} twice: {_listed(shapes[name])} and {_listed(shape)}")
    return shapes


def resolve_inputs(
    inputs: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]], model: onnx.ModelProto | None = None
) -> tuple[InputSpec, ...]:
    """Return the inputs with all dimensions known: the model's own, and `shapes` for the open ones.

    `shapes` are by input, or have one number by an open dimension's name. Equal names of open dimensions get equal
    numbers. A batch that alone is open is 1, and a warning says so. `model` serves the hint about sizes. Raises
    UsageError that names open inputs, an unknown name, a wrong rank, or a dimension that the model fixes.
    """
    known = {spec.name: spec for spec in inputs}
    dimensions = {size for spec in inputs for size in spec.shape if isinstance(size, str)}
    settled: dict[str, int] = {}
    for name, shape in shapes.items():
        # An input may be called like its dimension.
        if name in dimensions and len(shape) == 1 and not (name in known and len(known[name].shape) == 1):
            settled[name] = shape[0]
        elif name not in known:
            raise UsageError(
                f"the model has no input {name!r}", f"Its inputs: {'; '.join(map(str, inputs)) or 'none'}."
            )
    given, named = {name: shape for name, shape in shapes.items() if name not in settled}, bool(settled)
    resolved = [_apply(spec, given[spec.name], settled) if spec.name in given else spec for spec in inputs]
    # A `--shape` fixes a named dimension for all inputs that share it.
    resolved = [
        dataclasses.replace(spec, shape=tuple(settled.get(d, d) if isinstance(d, str) else d for d in spec.shape))
        for spec in resolved
    ]
    for spec in resolved:
        if np.dtype(spec.dtype).itemsize * math.prod(d for d in spec.shape if isinstance(d, int)) > _MOST_BYTES:
            raise UsageError(f"input {spec} exceeds {_MOST_BYTES >> 30} GiB, more than a board can be sent")
    still_open = [spec for spec in resolved if spec.is_dynamic]
    if still_open and not given and all(map(_is_open_batch, still_open)):
        _say_batch(", ".join(spec.name for spec in still_open))
        return tuple(dataclasses.replace(s, shape=(1, *s.shape[1:])) if s.is_dynamic else s for s in resolved)
    missing = [size for spec in still_open for size in spec.shape if isinstance(size, str)]
    if still_open:
        raise UsageError(
            f"the model leaves dimensions open: {'; '.join(map(str, still_open))}",
            shape_hints.describe(resolved, model)
            if not named or "?" in missing
            else f"For example: --shape {missing[0]}=1",
        )
    return tuple(resolved)


def _is_open_batch(spec: InputSpec) -> bool:
    """Whether the batch, and no other dimension, is open."""
    is_open = [isinstance(size, str) for size in spec.shape]
    return len(is_open) > 1 and is_open[0] and not any(is_open[1:]) and shape_hints.is_batch(spec, 0)


@functools.cache  # once a process: a command resolves a model several times
def _say_batch(names: str) -> None:
    _log.warning("the open batch of %s is taken as 1; `batch` sets another", names)


def _apply(spec: InputSpec, shape: tuple[int, ...], settled: dict[str, int]) -> InputSpec:
    if len(shape) != len(spec.shape):
        raise UsageError(
            f"--shape {spec.name}={_listed(shape)} has {len(shape)} dimensions; the model's input is {spec}"
        )
    for own, given in zip(spec.shape, shape, strict=True):
        if isinstance(own, int) and own != given:
            raise UsageError(
                f"--shape {spec.name}={_listed(shape)} changes a dimension that the model fixes; its input is {spec}"
            )
        if isinstance(own, str) and own != "?" and settled.setdefault(own, given) != given:
            raise UsageError(f"--shape gives the dimension {own!r} twice: {settled[own]} and {given}")
    return dataclasses.replace(spec, shape=shape)


def make_inputs(inputs: Sequence[InputSpec], seed: int = 0) -> dict[str, Array]:
    """Return seeded values for resolved inputs: standard normal floats, integers uniform over `find_range`.

    They depend only on the input's name and the seed.
    """
    return {spec.name: _fill(spec, seed) for spec in inputs}


def make_edges(inputs: Sequence[InputSpec], seed: int = 0) -> dict[str, Array]:
    """Return edge values: signed zeros, halves that round either way, ends of integer ranges."""
    edges = {}
    for spec in inputs:
        kind = np.dtype(spec.dtype).kind
        values = find_range(spec) if kind in "iu" else (0, 1) if kind == "b" else _EDGES
        edges[spec.name] = _start(spec, seed).choice(np.array(values), spec.static_shape).astype(spec.dtype)
    return edges


def is_float(spec: InputSpec) -> bool:
    """Say whether an input's values are real numbers."""
    return np.dtype(spec.dtype).kind not in "biu"


def find_range(spec: InputSpec) -> tuple[int, int]:
    """Return the range of integers to feed: the rows of the indexed table, all of 8 bits, else 0 to 9."""
    dtype = np.dtype(spec.dtype)
    if spec.rows is not None:
        return 0, min(spec.rows - 1, int(np.iinfo(dtype).max))
    if dtype.itemsize == 1:
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    # Small enough for most lookup tables of unknown size.
    return 0, 9


def _fill(spec: InputSpec, seed: int) -> Array:
    random, dtype = _start(spec, seed), np.dtype(spec.dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, spec.static_shape).astype(dtype)
    if dtype.kind in "iu":
        low, high = find_range(spec)
        return random.integers(low, high, spec.static_shape, endpoint=True).astype(dtype)
    values: npt.NDArray[np.float64] = random.standard_normal(spec.static_shape)
    return values.astype(dtype)


def _start(spec: InputSpec, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *spec.name.encode()])


def _listed(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
