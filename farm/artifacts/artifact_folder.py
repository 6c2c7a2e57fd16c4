"""An artifact's folder: open, check, update and write it, atomically and over nothing else. See also manifest.py.

Also the artifacts made on this machine, and the compile command for each tuned model, board type and operating point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol import GPU, ProtocolError, load_json
from farm import folders
from farm.artifacts.manifest import FORMAT, NAME, VERSION, File, Manifest, _digest, find_control
from farm.errors import FarmError, PermanentError, UnavailableError, UsageError
from farm.inventory.board_types import require_board_type
from farm.inventory.documents import check_document
from farm.models.lengths import split_shapes
from farm.values import DEFAULT_POINT, is_for_gpu, read_pipeline

# Errors of the disk; any other error concerns the folder's name.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_FOLDER = "artifacts"


def is_artifact(path: Path) -> bool:
    """Say whether a path is an artifact: a folder with a manifest."""
    return (path / NAME).is_file()


def require_place(folder: Path) -> None:
    """Raise UsageError where an artifact would overwrite something else, UnavailableError where the disk is full."""
    try:
        if folder.is_dir():
            if any(folder.iterdir()) and not is_artifact(folder):
                raise UsageError(f"{folder} holds something that is no artifact", "Give another folder with --out.")
        elif folder.exists():
            raise UsageError(f"{folder} is a file", "Give a folder with --out.")
    except OSError as error:
        raise _refuse(folder, error) from error
    require_room(folder.parent)


def require_room(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before doing work for it; leave nothing behind.

    A trial is needed, since permissions do not tell everything. Raises the errors of `require_place`.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".farm.", suffix=".partial", dir=folder)).rmdir()
    except OSError as error:
        raise _refuse(folder, error) from error
    finally:
        for each in made:  # the innermost first; one that another process filled meanwhile stays
            with contextlib.suppress(OSError):
                each.rmdir()


def _refuse(folder: Path, error: OSError) -> FarmError:
    kind = UnavailableError if error.errno in _FULL else UsageError
    return kind(f"nothing can be written to {folder}: {error.strerror}", "Give another folder.")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name if the block succeeds and is removed otherwise. Raises UsageError."""
    require_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            before = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
            folder.replace(before)
            partial.replace(folder)
            shutil.rmtree(before)
        else:
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a file as `folders.new_file`, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with folders.new_file(path) as partial:
        yield partial


class Artifact:
    """An artifact's `folder` and its `manifest`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def read_file(self, name: str) -> bytes:
        """Return a file's bytes. Raises PermanentError where it is missing or has changed."""
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
        """Raise PermanentError for a file that is missing or has changed."""
        for name in self.manifest.files:
            self.read_file(name)

    def update(self, **changes: Any) -> None:
        """Rewrite the manifest with some fields changed."""
        self.manifest = self.manifest.model_copy(update=changes)
        with folders.new_file(self.folder / NAME) as partial:
            partial.write_text(self.manifest.to_json())


def open_artifact(folder: Path) -> Artifact:
    """Read an artifact's manifest. Raises UsageError for anything else, or another version; see also `Artifact`."""
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


def require_plain(document: Mapping[str, Any], called: Path | str) -> None:
    """Raise UsageError for text with control characters or line ends."""
    if where := find_control(document):
        raise UsageError(f"{called}: {where} holds a control character or the end of a line")


def require_cpu(manifest: Manifest, what: str) -> None:
    """Raise UsageError for a GPU artifact where only CPU programs are accepted."""
    if manifest.gpu is not None:
        raise UsageError(
            f"{manifest.name} is compiled for a GPU, and {what} takes CPU code only",
            "Remove --format: wheels and tars take GPU code.",
        )


def write_artifact(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> Artifact:
    """Write an artifact with the files that the manifest lists, replacing an artifact of that name.

    Raises UsageError for names in the model that a manifest cannot hold.
    """
    require_plain(manifest.model_dump(mode="json"), manifest.name)
    with new_folder(folder) as partial:
        for name, data in files.items():
            (partial / name).write_bytes(data)
        (partial / NAME).write_text(manifest.to_json())
    return Artifact(folder, manifest)


def describe_file(data: bytes) -> File:
    """Return a file's entry in the manifest."""
    return File(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def note_artifact(home: Path, artifact: Artifact) -> None:
    """Remember where an artifact is; ignore a failure to write the note."""
    path = str(artifact.folder.absolute())
    with contextlib.suppress(OSError):
        folders.make_private(home / _FOLDER)
        (home / _FOLDER / hashlib.sha256(path.encode()).hexdigest()[:32]).write_text(path, encoding="utf-8")


def list_made_here(home: Path) -> list[Artifact]:
    """List the artifacts that still exist, the newest first; remove the notes of others."""
    found = []
    notes = home / _FOLDER
    for note in sorted(notes.iterdir()) if notes.is_dir() else ():
        try:
            found.append(open_artifact(Path(note.read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError):
            continue
        except UsageError:
            with contextlib.suppress(OSError):
                note.unlink()
    return sorted(found, key=lambda each: -each.manifest.created_at)


@dataclasses.dataclass(frozen=True)
class ArtifactFilters:
    """Filters of artifacts; empty texts and False select all."""

    model: str = ""
    board_type: str = ""
    device: str = ""
    weights: str = ""
    verified: bool = False
    simulated: bool = False

    def choose(self, found: Iterable[Artifact]) -> list[Artifact]:
        """Return the selected artifacts in their order. Raises UsageError for an unknown board type."""
        board_type = require_board_type(self.board_type).name if self.board_type else ""
        return [each for each in found if self._is_meant(each.manifest, board_type)]

    def _is_meant(self, about: Manifest, board_type: str) -> bool:
        return (
            self.model in about.name
            and board_type in ("", about.board_type)
            and self.device in ("", about.device)
            and self.weights in ("", about.weights.asked)
            and (not self.verified or (about.verified is not None and about.verified.matches))
            and (not self.simulated or about.simulated)
        )


def to_document(artifact: Artifact) -> dict[str, Any]:
    """Return what `farm model artifacts --json` prints of one; `latency_s` is the newest measured median, else None."""
    about = artifact.manifest
    newest = about.measured[-1] if about.measured else None
    return {
        "folder": str(artifact.folder),
        "model": about.name,
        "board_type": about.board_type,
        "simulated": about.simulated,
        "device": about.device,
        "operating_point": about.operating_point,
        "weights": about.weights.asked,
        "bytes": about.library.bytes,
        "verified": None if about.verified is None else about.verified.matches,
        "latency_s": newest.latency["median"] if newest else None,
        "records": about.count("record"),
        "workloads": len(about.workloads),
        "created_at": about.created_at,
    }


@dataclasses.dataclass(frozen=True)
class ToCompile:
    """One artifact to compile: `model` is from the campaign's document, `pipeline` the one that it was tuned with."""

    model: Mapping[str, Any]
    board_type: str
    point: str
    simulated: bool
    pipeline: str
    name: str

    @property
    def command(self) -> str:
        """The command to type."""
        words = ["farm", "model", "compile", str(self.model["origin"]).removeprefix("zoo:")]
        words += ["--board-type", self.board_type]
        words += ["--operating-point", self.point] if self.point != DEFAULT_POINT else []
        words += list_model_options(self.model.get("batch"), self.model.get("shapes", ()))
        words += ["--simulated"] if self.simulated else []
        return shlex.join([*words, *list_options(self.pipeline), "--out", self.name])


def list_options(pipeline: str) -> list[str]:
    """Return the options of `farm tune` and `farm model compile` that choose a graph pipeline."""
    exact, weights = read_pipeline(pipeline)
    words = ["--exact"] if exact else []
    words += ["--weights", weights] if weights else []
    return words + (["--device", GPU] if is_for_gpu(pipeline) else [])


def list_model_options(batch: int | None, shapes: Sequence[str]) -> list[str]:
    """Return the options of both that choose a model's batch size and shapes."""
    words = ["--batch", str(batch)] if batch is not None else []
    return words + [word for shape in shapes for word in ("--shape", shape)]


def list_artifacts(document: Mapping[str, Any]) -> list[ToCompile]:
    """List all artifacts that a campaign's records serve, in the order of its models.

    A model with a range of lengths has one for all.
    """
    return [
        ToCompile(
            model,
            kind["type"],
            point,
            bool(kind["simulated"]),
            kind["pipeline"],
            to_name(model["name"], kind["type"], "" if len(kind["points"]) == 1 else point),
        )
        for model in filter(None, map(_join_lengths, document["models"]))
        for kind in document["types"]
        for point in kind["points"]
    ]


def _join_lengths(model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a model with the whole range of its lengths; None for those besides the greatest."""
    _, lengths = split_shapes([model["lengths"]] if model.get("lengths") else [])
    if lengths is None:
        return model
    fixed = model["shapes"][-1]
    if fixed != lengths.fix(lengths.sizes[-1]):
        return None
    name, shapes = model["name"].removesuffix(f" {fixed}"), [*model["shapes"][:-1], lengths.text]
    return {**model, "name": name, "shapes": shapes}


def to_name(*words: str) -> str:
    """Make a folder name without special characters of shells."""
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-") for word in words if word)
