"""The manifest of an artifact: what was compiled, from what, how to call it, and what is known about it.

An artifact is a folder with `manifest.json` and the files that it lists. It is written atomically; a changed one is
refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field, field_validator, model_validator

from device_agent.protocol import CPU, GPU
from device_agent.protocol.hardware import Name
from farm.foreign import show_controls
from farm.inventory.board_types import LinkTriple
from farm.inventory.documents import StrictModel

# Fields with text of several lines, such as a compiler's message.
_TEXTS_OF_LINES = frozenset({"reason", "not_made"})
# Upper bounds: a year for durations, the year 2286 for dates.
_LONGEST_S, _LATEST_S = 3.2e7, 1e10
_ELEMENTS = frozenset("biuf")
_MOST_BYTES = 1 << 50

Seconds = Annotated[float, Field(ge=0, lt=_LONGEST_S)]
Moment = Annotated[float, Field(ge=0, lt=_LATEST_S)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Bytes = Annotated[int, Field(ge=0, le=_MOST_BYTES)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# The file that marks an artifact.
NAME = "manifest.json"
LIBRARY = "model.so"
FORMAT = "tvm-farm artifact"
# How weights are stored by default.
FLOAT32 = "float32"
# Raise it with every change that an older reader would misunderstand.
VERSION = 1
# Plain names without programs, since they lie beside the programs that run the model.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
# Every package names these.
_PACKAGES = ("tvm-farm", "apache-tvm", "apache-tvm-ffi")


def _require_dtype(text: str) -> str:
    try:
        kind = np.dtype(text)
    except TypeError as error:
        raise ValueError("no element type of NumPy's") from error
    if kind.name != text or not (kind.kind in _ELEMENTS or hasattr(ml_dtypes, text)):
        raise ValueError("no type of numbers")
    return text


def _require_version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError("no version as PEP 440 has them") from error
    if not text.isascii() or text != text.strip():  # which `Version` would let pass
        raise ValueError("no version as PEP 440 has them")
    return text


DType = Annotated[str, AfterValidator(_require_dtype)]
PackageVersion = Annotated[str, AfterValidator(_require_version)]


def find_control(value: Any, where: str = "") -> str:
    """Return the path of the first text with a control character or an unexpected line end; "" for none."""
    if isinstance(value, str):
        has_lines = not _TEXTS_OF_LINES.isdisjoint(where.split("."))
        is_plain = show_controls(value) == value and (has_lines or not set(value) & set("\n\t"))
        return "" if is_plain else where
    if isinstance(value, Mapping):
        for key, each in value.items():
            here = f"{where}.{show_controls(key)}".lstrip(".")
            if found := find_control(str(key), here) or find_control(each, here):
                return found
    elif isinstance(value, list | tuple):
        for each in value:
            if found := find_control(each, where):
                return found
    return ""


class Tensor(StrictModel):
    """An input or output; `dtype` is NumPy's."""

    name: str
    shape: tuple[Count, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"

    @property
    def size_bytes(self) -> int:
        """Size of all elements."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class ModelFacts(StrictModel):
    """The compiled model; `origin` is the path of its file, or `zoo:NAME`. `shapes` and `batch` are as given."""

    name: str
    sha256: Sha256
    origin: str
    shapes: tuple[str, ...] = ()
    batch: int | None = None

    @property
    def typed(self) -> str:
        """The argument that names it on the command line."""
        return self.origin.removeprefix("zoo:")


class RecordUsed(StrictModel):
    """The record that serves a workload: its trial's `candidate` and where it was measured. See `decision.RecordFit`.

    `imported`: another farm measured it and no board of this farm has verified it.
    """

    fit: str
    candidate: str
    board_type: str
    operating_point: str
    latency_s: Seconds
    simulated: bool
    verified_at: Moment
    imported: bool = False


class WorkloadServed(StrictModel):
    """One function. `source`: record, rule, or none (TVM's own code). `latency_s`: one call, measured or predicted."""

    hash: str
    name: str
    flop: float
    weight: Count
    algorithm: str
    source: str
    latency_s: Seconds | None
    record: RecordUsed | None = None


class File(StrictModel):
    """A file of the artifact."""

    sha256: Sha256
    bytes: Bytes


class StoredWeights(StrictModel):
    """The `asked` value of `--weights`; the number of workloads with 16-bit weights or arithmetic; their bytes."""

    asked: str = FLOAT32
    workloads: Count = 0
    bytes: Bytes = 0


class Verified(StrictModel):
    """The result of comparing outputs with the reference's; errors are the largest over `inputs`.

    `rms_rel_error` is an output's root mean square error relative to its peak.
    """

    at: Moment
    matches: bool
    reason: str
    board: str
    board_type: str
    simulated: bool
    reference: str
    inputs: tuple[str, ...]
    max_abs_error: float | None
    max_rel_error: float | None
    rms_rel_error: float | None = None
    tolerance_factor: float
    library_sha256: Sha256


class MeasuredModel(StrictModel):
    """Latency of one inference in seconds (`latency` as in `Summary`), and energy where the board has a sensor.

    `clocks` were read at that time; "" where the board does not report them.
    """

    at: Moment
    board: str
    board_type: str
    simulated: bool
    operating_point: str
    threads: Count
    clocks: str = ""
    latency: dict[str, Seconds]
    energy_j: float | None = None
    power_w: float | None = None
    first_s: Seconds | None = None
    peak_memory_bytes: Bytes | None = None


class GpuCode(StrictModel):
    """GPU code: its architecture, the required PTX version, and the largest resources of its kernels.

    Registers and spilled bytes are per thread, shared memory and threads per block, as reported by ptxas.
    """

    arch: str
    ptx: str
    kernels: Count
    registers: Count
    shared_bytes: Bytes
    threads: Count
    spilled_bytes: Bytes


class DeviceEstimate(StrictModel):
    """The estimated time of one inference on a device: its workloads, plus copies for a GPU.

    `measured` of the `workloads` have a record; the others are predicted.
    """

    latency_s: Seconds
    copies_s: Seconds
    workloads: Count
    measured: Count


class CompiledSize(StrictModel):
    """A compiled length: its `library` is a file of the artifact; the rest as in `Manifest`."""

    size: Count
    library: str
    workloads: tuple[WorkloadServed, ...]
    predicted_latency_s: Seconds | None


class SequenceLengths(StrictModel):
    """The model takes any length of the dimension `name` from `least` to the greatest of the ascending `sizes`.

    Inputs are padded with zeros to a size, outputs are cropped: along the dimensions in `inputs` and `outputs`, by
    name.
    """

    name: str
    least: Count
    sizes: Annotated[tuple[CompiledSize, ...], Field(min_length=1)]
    inputs: dict[str, Annotated[tuple[Count, ...], Field(min_length=1)]]
    outputs: dict[str, tuple[Count, ...]]


class Manifest(StrictModel):
    """All that is known about an artifact.

    `architecture` is as from `uname -m`. `link_triple` is Zig's name of the system, None for the compiling machine.
    `memory_bytes` estimates a process's need. `predicted_latency_s` sums the workloads, None where one has no time.
    `simulated` artifacts run on virtual boards. `devices` were compared before choosing this one; empty where one was
    requested. `not_made` says by device why it has no code. With `lengths`, shapes and workloads are those of the
    greatest length.
    """

    format: str = FORMAT
    version: int = VERSION
    name: str
    model: ModelFacts
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    board_type: Name
    operating_point: str
    simulated: bool
    architecture: str = Field(pattern="^[a-z0-9_]+$")
    target: dict[str, Any]
    link_triple: LinkTriple | None
    threads: Count
    pipeline: str
    workloads: tuple[WorkloadServed, ...]
    memory_bytes: Bytes
    predicted_latency_s: Seconds | None
    task: dict[str, Any]
    files: dict[str, File]
    versions: dict[str, PackageVersion]
    created_at: Moment
    weights: StoredWeights = StoredWeights()
    gpu: GpuCode | None = None  # None: it runs on the processor
    devices: dict[str, DeviceEstimate] = Field(default_factory=dict)
    not_made: dict[str, str] = Field(default_factory=dict)
    verified: Verified | None = None
    measured: tuple[MeasuredModel, ...] = ()
    lengths: SequenceLengths | None = None

    @field_validator("files")
    @classmethod
    def _have_plain_names(cls, files: dict[str, File]) -> dict[str, File]:
        if LIBRARY not in files:
            raise ValueError(f"there is no {LIBRARY}")
        if wrong := [name for name in files if not _FILE.fullmatch(name) or name == NAME or name.endswith(".py")]:
            raise ValueError(f"{wrong[0]!r} is no file of an artifact")
        return files

    @field_validator("versions")
    @classmethod
    def _name_packages(cls, versions: dict[str, str]) -> dict[str, str]:
        if missing := [name for name in _PACKAGES if name not in versions]:
            raise ValueError(f"{missing[0]} is missing")
        return versions

    @model_validator(mode="after")
    def _has_libraries(self) -> Manifest:
        if missing := [each.library for each in self.list_sizes() if each.library not in self.files]:
            raise ValueError(f"there is no {missing[0]}")
        return self

    @property
    def device(self) -> str:
        """The device that runs it."""
        return GPU if self.gpu else CPU

    @property
    def library(self) -> File:
        """The linked library, of the greatest length."""
        return self.files[LIBRARY]

    @property
    def code_sha256(self) -> str:
        """The digest of all libraries; of one, its own."""
        digests = [self.files[each.library].sha256 for each in self.list_sizes()]
        return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else self.library.sha256

    def list_sizes(self) -> tuple[CompiledSize, ...]:
        """List the compiled lengths; none for a model of fixed shapes."""
        return self.lengths.sizes if self.lengths else ()

    def list_workloads(self) -> list[WorkloadServed]:
        """List the workloads of all lengths."""
        return [each for size in self.list_sizes() for each in size.workloads] or list(self.workloads)

    def to_runtime(self) -> dict[str, Any]:
        """Return what `runtime.lengths` reads."""
        return self.model_dump(include={"inputs", "outputs", "lengths"})

    def count(self, source: str) -> int:
        """Count the workloads served from `source`."""
        return sum(each.source == source for each in self.workloads)

    def to_json(self) -> str:
        """Return the file's text, with a digest that reveals changes by hand."""
        document = self.model_dump(mode="json", exclude=None if self.lengths else {"lengths"})
        return json.dumps({**document, "manifest_sha256": _digest(document)}, indent=2) + "\n"


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
