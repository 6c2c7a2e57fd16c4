"""An artifact's folder: open, check, update and write it. Its manifest is in manifest.py."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import ProtocolError, load_json
from farm import folders
from farm.artifacts.manifest import FORMAT, LIBRARY, NAME, VERSION, File, Manifest, _digest, find_control
from farm.artifacts.places import new_folder
from farm.errors import PermanentError, UsageError
from farm.inventory.documents import check_document


class Artifact:
    """An artifact's `folder` and its `manifest`."""

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def read_library(self) -> bytes:
        """Return the library's bytes. Raises PermanentError where they have changed."""
        return self.read_file(LIBRARY)

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


def open_artifact(folder: pathlib.Path) -> Artifact:
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


def require_plain(document: Mapping[str, Any], called: pathlib.Path | str) -> None:
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


def write_artifact(folder: pathlib.Path, manifest: Manifest, files: Mapping[str, bytes]) -> Artifact:
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
