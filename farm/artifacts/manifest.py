"""The manifest of an artifact: what was compiled, from what, how it is called, and what is known of it.

An artifact is a folder with `manifest.json` and the files that it lists. Written whole or not at all; what was changed
since is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field, field_validator

from device_agent.protocol import CPU, GPU, ProtocolError, load_json
from device_agent.protocol.hardware import Name
from farm.artifacts.places import MANIFEST, new_folder
from farm.errors import PermanentError, UsageError
from farm.foreign import show_controls
from farm.inventory.board_types import LinkTriple
from farm.inventory.documents import StrictModel, check_document

# Of free text alone, which is shown to people: what a compiler said has lines.
_TEXTS_OF_LINES = frozenset({"reason", "not_made"})
# A year: nothing that a model or its parts take lasts longer. The end of the year 2286.
_LONGEST_S, _LATEST_S = 3.2e7, 1e10
_ELEMENTS = frozenset("biuf")
_MOST_BYTES = 1 << 50

Seconds = Annotated[float, Field(ge=0, lt=_LONGEST_S)]
Moment = Annotated[float, Field(ge=0, lt=_LATEST_S)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Bytes = Annotated[int, Field(ge=0, le=_MOST_BYTES)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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
    """The place of the first text with a control character, or the end of a line where none belongs; "" for none."""
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


NAME = MANIFEST
LIBRARY = "model.so"
FORMAT = "tvm-farm artifact"
# How weights are stored unless something else was asked for.
FLOAT32 = "float32"
# Raised with every change that an older reader would misunderstand.
VERSION = 1
# Plain names, of no program: they lie beside the programs that run the model.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
# Named in every package.
_PACKAGES = ("tvm-farm", "apache-tvm", "apache-tvm-ffi")


class Tensor(StrictModel):
    """An input or output: `dtype` is NumPy's name."""

    name: str
    shape: tuple[Count, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"

    @property
    def size_bytes(self) -> int:
        """Size of its elements together."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class ModelFacts(StrictModel):
    """The model compiled; `origin` is the path of its file, or `zoo:NAME`. `shapes` and `batch` as they were given."""

    name: str
    sha256: Sha256
    origin: str
    shapes: tuple[str, ...] = ()
    batch: int | None = None

    @property
    def typed(self) -> str:
        """What a user types for it."""
        return self.origin.removeprefix("zoo:")


class RecordUsed(StrictModel):
    """The record that serves a workload: its trial's `candidate` and where it was measured. See `choice.RecordFit`.

    `imported`: another farm measured it, and no board of this farm had verified it.
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
    """What was `asked` for (as `--weights` takes it); how many workloads have weights in 16 bits or compute so, and how
    many bytes these take.
    """

    asked: str = FLOAT32
    workloads: Count = 0
    bytes: Bytes = 0


class Verified(StrictModel):
    """What came of comparing outputs with the reference's. `inputs` says which inputs; errors are the largest.

    `rms_rel_error` is an output's root mean square error over its largest value.
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
    """Latency of one inference in seconds (`latency` as `Summary` has it), energy where the board has a sensor.

    `clocks` are those that were read then, "" where the board does not say.
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
    """Code for a GPU: its architecture, the PTX asked of the driver, and the most that any of its kernels takes.

    Registers are per thread, shared memory and threads per block, spilled bytes per thread, as ptxas says.
    """

    arch: str
    ptx: str
    kernels: Count
    registers: Count
    shared_bytes: Bytes
    threads: Count
    spilled_bytes: Bytes


class DeviceEstimate(StrictModel):
    """What one inference is expected to take on a device: its workloads summed, and of a GPU copies of inputs and
    outputs, too. Of `workloads`, `measured` have a record; the others' times are predicted.
    """

    latency_s: Seconds
    copies_s: Seconds
    workloads: Count
    measured: Count


class Manifest(StrictModel):
    """All that is known of an artifact.

    `architecture` is as `uname -m` says it. `link_triple` is Zig's name of the system linked for, None for the machine
    that compiled it. `memory_bytes` is about what a process needs to run it. `predicted_latency_s` sums its workloads,
    None where some have no time. `simulated` artifacts run on virtual boards of the type, with this machine's code.
    `devices`, by name, are those that were compared before this one was taken; empty where one was asked for.
    `not_made` says by device why no code was made for it, though it was asked for.
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

    @property
    def device(self) -> str:
        """What runs it on a board."""
        return GPU if self.gpu else CPU

    @property
    def library(self) -> File:
        """The linked library."""
        return self.files[LIBRARY]

    def count(self, source: str) -> int:
        """How many workloads are served so."""
        return sum(each.source == source for each in self.workloads)

    def count_imported(self) -> int:
        """How many workloads are served by records of another farm."""
        return sum(each.record is not None and each.record.imported for each in self.workloads)

    def to_json(self) -> str:
        """The file's text. Its own digest makes a change by hand visible."""
        document = self.model_dump(mode="json")
        return json.dumps({**document, "manifest_sha256": _digest(document)}, indent=2) + "\n"


class Artifact:
    """An artifact in its folder: `folder`, and the `manifest` as it was read."""

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def read_library(self) -> bytes:
        """The library's bytes. Raises PermanentError where they are not those that were compiled."""
        return self.read_file(LIBRARY)

    def read_file(self, name: str) -> bytes:
        """A file's bytes. Raises PermanentError where it is missing or was changed."""
        wanted, path = self.manifest.files[name], self.folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PermanentError(f"{path} cannot be read: {error.strerror}", "Compile the artifact again.") from error
        if len(data) != wanted.bytes or hashlib.sha256(data).hexdigest() != wanted.sha256:
            raise PermanentError(
                f"{path} is not the file that was compiled: its SHA-256 is not the manifest's",
                "It was changed, or cut short while it was copied. Compile the artifact again.",
            )
        return data

    def require_whole(self) -> None:
        """Refuse an artifact with a file that is missing or was changed. Raises PermanentError."""
        for name in self.manifest.files:
            self.read_file(name)

    def update(self, **changes: Any) -> None:
        """Write the manifest anew with some fields changed."""
        self.manifest = self.manifest.model_copy(update=changes)
        partial = self.folder / f".{NAME}.partial"
        partial.write_text(self.manifest.to_json())
        partial.replace(self.folder / NAME)


def open_artifact(folder: pathlib.Path) -> Artifact:
    """Read an artifact's manifest. Raises UsageError where it is none, or of another version; see also `Artifact`."""
    path = folder / NAME if folder.name != NAME else folder
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{folder} is no artifact: {path} cannot be read: {error.strerror}",
            "`farm model compile MODEL --board-type TYPE --out DIR` makes one.",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no manifest: it is not UTF-8 text") from error
    try:
        document = load_json(text)
    except ProtocolError as error:
        raise UsageError(f"{path} is no manifest: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is no manifest of an artifact", "`farm model compile` writes them.")
    if (version := document.get("version")) != VERSION:
        older = isinstance(version, int) and version < VERSION
        raise UsageError(
            f"{path} is a manifest of version {version}; this farm reads version {VERSION}",
            "Compile the model again." if older else "Update the farm, or compile the model again.",
        )
    digest = document.pop("manifest_sha256", None)
    if digest != _digest(document):
        raise UsageError(f"{path} was changed after it was written: its digest is wrong", "Compile the model again.")
    require_plain(document, path)
    return Artifact(path.parent, check_document(document, Manifest, path))


def require_plain(document: Mapping[str, Any], called: pathlib.Path | str) -> None:
    """Raise UsageError for a text that would be more than a word where it is written."""
    if where := find_control(document):
        raise UsageError(f"{called}: {where} holds a control character or the end of a line")


def require_cpu(manifest: Manifest, what: str) -> None:
    """Refuse an artifact for a GPU where only programs of a board's processor are taken. Raises UsageError."""
    if manifest.gpu is not None:
        raise UsageError(
            f"{manifest.name} is compiled for a GPU, and {what} takes code for processors alone",
            "Leave --format away: a wheel takes it, and so does a tar.",
        )


def write_artifact(folder: pathlib.Path, manifest: Manifest, files: Mapping[str, bytes]) -> Artifact:
    """Write an artifact; `files` are those that the manifest lists. Takes the place of an artifact that is there.

    Raises UsageError for names that no manifest may hold: they are the model's.
    """
    require_plain(manifest.model_dump(mode="json"), manifest.name)
    with new_folder(folder) as partial:
        for name, data in files.items():
            (partial / name).write_bytes(data)
        (partial / NAME).write_text(manifest.to_json())
    return Artifact(folder, manifest)


def describe_file(data: bytes) -> File:
    """A file's entry in the manifest."""
    return File(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
