"""Turn the user's argument into a checked ONNX model: a file (ONNX, TFLite, torch.export), or a zoo name; summarise it.

`farm.search.graph.importer` finds out whether TVM can import it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import google.protobuf.message
import onnx
import onnx.external_data_helper

from farm import folders
from farm.errors import UnavailableError, UsageError
from farm.foreign import find_first_line
from farm.models import exported, tflite, trained, zoo
from farm.models.inputs import InputSpec, read_inputs
from farm.search.graph import folding
from farm.search.graph.folding import bodies, list_nodes

# Protocol buffers cannot hold more in one message.
_MAX_BYTES = 2**31 - 1
_OWN = "ai.onnx"
_ZIP = b"PK\x03\x04"
_EXPORTED = ".pt2"
_SUFFIXES = (".onnx", tflite.SUFFIX)
# First bytes of files that are mistaken for models, and what to say about them.
_LOOKALIKES = (
    (b"version https://git-lfs", "it is a Git LFS pointer; run `git lfs pull` to get the model"),
    (b"\x80", "it is a pickle; export the model with torch.onnx.export first"),
    (b"\x1f\x8b", "it is compressed; gunzip it first"),
    (b"<", "it is a web page or XML; the download probably failed"),
    (b"\x89HDF", "it is a Keras HDF5 file; convert it with tf2onnx first"),
)
# Inputs that are settings or statistics rather than trained weights, by operator.
_SETTINGS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "QuantizeLinear": (1, 2),
    "Pad": (1, 2),
    "Resize": (1, 2, 3),
}
_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model as self-contained ONNX bytes, from any kind of source.

    `origin` is the file's absolute path, or `zoo:<name>`. `sha256` is of `onnx_bytes`.
    """

    name: str
    onnx_bytes: bytes = dataclasses.field(repr=False)
    sha256: str
    origin: str

    def load(self) -> onnx.ModelProto:
        """Return a fresh copy of the parsed model."""
        return onnx.load_model_from_string(self.onnx_bytes)

    def read_metadata(self) -> dict[str, str]:
        """Return the file's metadata by key."""
        return {each.key: each.value for each in self.load().metadata_props}

    @property
    def is_quantised(self) -> bool:
        """Whether the model has 8-bit operators."""
        kinds = ("QuantizeLinear", "QLinearConv", "DequantizeLinear")
        return any(node.op_type in kinds for node in self.load().graph.node)

    def require_float(self, weights: str) -> None:
        """Raise UsageError for 16-bit weights of a model with 8-bit weights."""
        if weights != "float32" and self.is_quantised:
            raise UsageError(f"{self.name} is quantised: its weights are in 8 bits", "Leave --weights away.")

    def changed(self, model: onnx.ModelProto) -> ModelSource:
        """Return a changed model under the same name and origin."""
        data = model.SerializeToString(deterministic=True)
        return dataclasses.replace(self, onnx_bytes=data, sha256=hashlib.sha256(data).hexdigest())


def resolve_model(text: str, trusted: bool = False) -> ModelSource:
    """Find the model that `text` names: a zoo name, else a file. `trusted` allows reading files that can run code.

    Raises UsageError that says what is wrong and what to do.
    """
    if text in zoo.ZOO:
        return _source(text, zoo.ZOO[text].build(), f"zoo:{text}")
    if text in trained.TRAINED:
        text = str(trained.require(text))
    path = Path(text).expanduser()
    data = _require_model(path, _read(path, text, trusted))
    return _source(path.stem, data, str(path.resolve()))


def _source(name: str, data: bytes, origin: str) -> ModelSource:
    return ModelSource(name, data, hashlib.sha256(data).hexdigest(), origin)


def _read(path: Path, typed: str, trusted: bool) -> bytes:
    """Read the file; refuse before reading what cannot be a model."""
    try:
        if not path.exists():
            raise _not_found(path, typed)
        if path.is_dir():
            files = sorted(p.name for p in path.iterdir() if p.suffix.lower() in _SUFFIXES)[:5]
            hint = f"It holds {', '.join(files)}." if files else "It holds no ONNX file."
            raise UsageError(f"{path} is a folder, not an ONNX file", hint)
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file", "Give an ONNX file or a zoo name.")
        with path.open("rb") as file:
            start = file.read(64)
            is_archive = start.startswith(_ZIP)
            if is_archive and exported.is_exported(path):
                return exported.convert(path, trusted)
            if start and (is_archive or path.suffix.lower() == _EXPORTED):
                meaning = exported.explain_archive(path) if is_archive else "such a program is a zip archive"
                raise UsageError(f"{path} is neither a program of torch.export nor an ONNX file: {meaning}")
            if not start:
                raise UsageError(f"{path} is empty", "The export or the download did not finish.")
            for magic, meaning in _LOOKALIKES:
                if start.startswith(magic):
                    raise UsageError(f"{path} is not an ONNX file: {meaning}")
            if (size := path.stat().st_size) > _MAX_BYTES:
                raise UsageError(
                    f"{path} has {size:,} bytes; an ONNX file ends at {_MAX_BYTES:,}",
                    "Save the model with its weights as external data.",
                )
            data = start + file.read()
    except PermissionError as error:
        raise UsageError(f"{path} may not be read: permission denied", "Check the file's mode and owner.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{typed!r} cannot be read: {error}") from error
    return tflite.convert(path, data) if tflite.is_tflite(path, start) else data


def _require_model(path: Path, data: bytes) -> bytes:
    """Parse and check the model and load its external weights; return self-contained bytes."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except google.protobuf.message.DecodeError as error:
        raise _unreadable(path, data) from error
    if not model.ir_version or not model.HasField("graph"):
        raise _unreadable(path, data)
    if not model.graph.node:
        raise UsageError(f"{path} holds an ONNX model without any node", "Export the model again.")
    changed = _take_in_external_data(path, model)
    changed |= _respell_domains(model) | _complete_outputs(model)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        read_inputs(model)  # names an input without a shape
        if bare := next((each.name for each in model.graph.output if _is_bare(each)), ""):
            raise UsageError(f"output {bare!r} has no shape in {path}, and ONNX infers none") from error
        raise UsageError(
            f"{path} is not a valid ONNX model: {find_first_line(error)}",
            "Export the model again; `python -m onnx.checker` tells more.",
        ) from error
    try:
        return model.SerializeToString(deterministic=True) if changed else data
    except (ValueError, google.protobuf.message.EncodeError) as error:
        raise UsageError(f"{path} with its external weights exceeds 2 GiB, more than the farm can take") from error


def _respell_domains(model: onnx.ModelProto) -> bool:
    """Write ONNX's own domain as "", which its checker wants; say whether it was spelt otherwise."""
    owners = (model, *model.functions)
    named = [*(node for each in (model.graph, *model.functions) for node in list_nodes(each))]
    spelt = [
        each for each in (*named, *(each for owner in owners for each in owner.opset_import)) if each.domain == _OWN
    ]
    for each in spelt:
        each.domain = ""
    for owner in owners if spelt else ():
        opsets = {each.domain: each.version for each in owner.opset_import}
        del owner.opset_import[:]
        owner.opset_import.extend(onnx.helper.make_opsetid(*each) for each in opsets.items())
    return bool(spelt)


def _complete_outputs(model: onnx.ModelProto) -> bool:
    """Give outputs without type or shape those that ONNX infers; say whether there were any."""
    if bare := [each for each in model.graph.output if _is_bare(each)]:
        with contextlib.suppress(onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            found = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.output}
            for value in bare:
                value.CopyFrom(found[value.name])
    return bool(bare)


def _is_bare(value: onnx.ValueInfoProto) -> bool:
    return value.type.WhichOneof("value") in (None, "tensor_type") and not value.type.tensor_type.HasField("shape")


def _take_in_external_data(path: Path, model: onnx.ModelProto) -> bool:
    """Load weights from other files; say whether there were any."""
    external = [t for t in _tensors(model) if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in external:
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "?")
        try:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise UsageError(
                f"{path} keeps its weight {tensor.name!r} in {location!r}, which cannot be read: "
                f"{find_first_line(error)}",
                f"Put {location!r} into the folder {path.resolve().parent}.",
            ) from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    return bool(external)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors with values, including those of subgraphs and the model's functions."""
    nodes = [node for owner in (model.graph, *model.functions) for node in list_nodes(owner)]
    sparse = []
    for graph in (model.graph, *(body for node in nodes for body in bodies(node))):
        yield from graph.initializer
        sparse += graph.sparse_initializer
    for attribute in (each for node in nodes for each in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t
        sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
    yield from (part for each in sparse for part in (each.values, each.indices))


def _not_found(path: Path, typed: str) -> UsageError:
    looks_like_file = path.suffix.lower() in _SUFFIXES or len(path.parts) > 1
    names = difflib.get_close_matches(typed.lower(), [*zoo.ZOO, *trained.TRAINED], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(names)}? " if names else ""
    hint += f"Give an ONNX file or one of the zoo: {', '.join(zoo.ZOO)}."
    return UsageError(
        f"no such file: {typed}" if looks_like_file else f"no file and no zoo model is called {typed!r}", hint
    )


def _unreadable(path: Path, data: bytes) -> UsageError:
    # Exporters write field 1, the IR version, first: such a file began as a model.
    if data[:1] == b"\x08":
        return UsageError(f"{path} is a truncated or damaged ONNX file", "Copy or export it again.")
    return UsageError(f"{path} is not an ONNX file", "Give a file written by an ONNX exporter, or a zoo name.")


def keep_model(folder: Path | None, source: ModelSource) -> None:
    """Write a model atomically unless it is there; without a folder do nothing. Raises UnavailableError."""
    if folder is None or source.origin.startswith("zoo:") or (path := _locate(folder, source.sha256)).is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folders.new_file(path) as part:
            part.write_bytes(source.onnx_bytes)
    except OSError as error:
        raise UnavailableError(
            f"the model {source.name} cannot be kept in {folder}: {error.strerror or error}",
            "FARM_SHARED names that folder: it must be there on this host, and writable.",
        ) from error


def find_model(folder: Path, sha256: str) -> Path | None:
    """Return the file of a model with this content; None where it is missing or different."""
    path = _locate(folder, sha256)
    try:
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == sha256 else None
    except OSError:
        return None


def _locate(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / f"{sha256}.onnx"


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """`outputs` have "?" for unknown dimensions; `operators` counts nodes by type.

    `parameters` counts trained weights, floats or integers scaled to floats, without running statistics.
    `weight_bytes` is the size of all tensors in the model.
    """

    opset: int
    outputs: tuple[InputSpec, ...]
    operators: Mapping[str, int]
    parameters: int
    weight_bytes: int


def summarise(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> ModelSummary:
    """Describe a model with these input shapes, without changing it."""
    graph = model.graph
    return ModelSummary(
        opset=next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1),
        outputs=_find_outputs(model, inputs),
        operators=dict(collections.Counter(node.op_type for node in graph.node).most_common()),
        parameters=_count_parameters(graph),
        weight_bytes=sum(_count_bytes(tensor) for tensor in graph.initializer),
    )


def _count_parameters(graph: onnx.GraphProto) -> int:
    held = {tensor.name: tensor for tensor in graph.initializer}
    trained = set()
    for node in graph.node:
        for position, name in enumerate(node.input):
            tensor = held.get(name)
            if tensor is None or not tensor.dims or position in _SETTINGS.get(node.op_type, ()):
                continue
            if tensor.data_type in _FLOATS or node.op_type == "DequantizeLinear":
                trained.add(name)
    return int(sum(math.prod(held[name].dims) for name in trained))


def _count_bytes(tensor: onnx.TensorProto) -> int:
    try:
        size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        return 0
    return int(math.prod(tensor.dims) * size)


def _find_outputs(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """Return the outputs by ONNX's inference, else as declared."""
    bare = folding.drop_weights(model, {spec.name: spec.static_shape for spec in inputs})
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph.output
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        found = model.graph.output
    declared = {value.name: value for value in model.graph.output}
    return tuple(
        _describe(value if value.type.tensor_type.HasField("shape") else declared[value.name]) for value in found
    )


def _describe(value: onnx.ValueInfoProto) -> InputSpec:
    tensor = value.type.tensor_type
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = "?"
    if not tensor.HasField("shape"):
        return InputSpec(value.name, ("?",), dtype)
    return InputSpec(value.name, tuple(d.dim_value or d.dim_param or "?" for d in tensor.shape.dim), dtype)
