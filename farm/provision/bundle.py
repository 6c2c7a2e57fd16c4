"""A bundle: one tar file with everything that a board needs, and a manifest with the SHA-256 of each file.

`bundle_build.py` decides on the content. The sums detect damage, not an attacker, who could change the manifest too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm import folders
from farm.errors import InternalError, UsageError

FORMAT = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20
_CHUNK = 1 << 20
# Safe even unquoted in a board's shell: no blank, no leading dot or dash, no way upwards.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]*(/[A-Za-z0-9_][A-Za-z0-9._+!-]*)*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_]*")
_MOST_UNPACKED_BYTES = 1 << 40
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class BundleManifest:
    """What a bundle holds.

    `version` is the agent's, `arch` the machine as in `uname -m`, `pythons` the series with wheels (`3.11`),
    `managed_python` the folder name of the included interpreter, empty without one. `unpacked_bytes` is the space for
    an installation. `files`: name -> SHA-256.
    """

    version: str
    arch: str
    pythons: tuple[str, ...]
    managed_python: str
    unpacked_bytes: int
    files: Mapping[str, str]

    @property
    def key(self) -> str:
        """The name of its installation folder: version and content hash."""
        return f"{self.version}-{hashlib.sha256(self.to_json().encode()).hexdigest()[:12]}"

    def to_json(self) -> str:
        """Its text in the bundle; equal manifests give equal texts."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle whose every file was verified. `size` in bytes."""

    path: Path
    manifest: BundleManifest
    size: int


def write_bundle(folder: Path, manifest: BundleManifest, output: Path) -> Bundle:
    """Pack the manifest's files from `folder` atomically and reproducibly. Raises OSError."""
    with folders.new_file(output) as part, tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
        text = manifest.to_json().encode()
        archive.addfile(_entry(MANIFEST, len(text)), io.BytesIO(text))
        for name in sorted(manifest.files):
            with (folder / name).open("rb") as file:
                archive.addfile(_entry(name, (folder / name).stat().st_size), file)
    return Bundle(output, manifest, output.stat().st_size)


def open_bundle(path: Path) -> Bundle:
    """Read a bundle and verify every file. Raises UsageError if it is damaged, changed, or not a bundle."""
    found: dict[str, str] = {}
    manifest: BundleManifest | None = None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                is_known = member.name in found or (manifest is not None and member.name == MANIFEST)
                if not member.isreg() or is_known or not _NAME.fullmatch(member.name):
                    raise _refused(path, f"it holds {member.name!r}, which no bundle does")
                file = archive.extractfile(member)
                if file is None:
                    raise InternalError(f"{member.name} is a file without contents")
                if manifest is None:
                    if member.name != MANIFEST or member.size > _MAX_MANIFEST_BYTES:
                        raise _refused(path, "it does not begin with a manifest")
                    manifest = _parse_manifest(path, file.read())
                    continue
                digest = hashlib.sha256()
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                found[member.name] = digest.hexdigest()
    except (tarfile.TarError, EOFError) as error:
        raise _refused(path, f"it is no whole tar file ({error})") from error
    except OSError as error:
        raise UsageError(f"the bundle {path} cannot be read: {error.strerror or error}") from error
    if manifest is None:
        raise _refused(path, "it is empty")
    for name in sorted(manifest.files.keys() | found.keys()):
        if manifest.files.get(name) != found.get(name):
            changed = "was changed" if name in manifest.files else "is not in its manifest"
            raise _refused(path, f"{name} {changed if name in found else 'is missing'}")
    return Bundle(path, manifest, path.stat().st_size)


def _parse_manifest(path: Path, data: bytes) -> BundleManifest:
    try:
        document: dict[str, Any] = json.loads(data)
        version = document.pop("format")
        if version != FORMAT:
            raise _refused(path, f"it is of format {version!r}, this farm reads {FORMAT}")
        manifest = BundleManifest(**document | {"pythons": tuple(document["pythons"])})
        texts = (manifest.arch, *manifest.pythons)
        if (
            not _VERSION.fullmatch(manifest.version)
            or not all(isinstance(text, str) and _VERSION.fullmatch(text) for text in texts)
            or (manifest.managed_python and not _NAME.fullmatch(manifest.managed_python))
            or type(manifest.unpacked_bytes) is not int
            or not 0 <= manifest.unpacked_bytes <= _MOST_UNPACKED_BYTES
            or not all(_NAME.fullmatch(name) and _DIGEST.fullmatch(digest) for name, digest in manifest.files.items())
        ):
            raise _refused(path, "its manifest says what no manifest does")
        # Written by the farm, byte for byte: the text's hash names installations on boards.
        if manifest.to_json().encode() != data:
            raise _refused(path, "its manifest was changed")
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(path, f"its manifest cannot be read ({error})") from error


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not taken for a bundle: {why}", "Copy it anew, or make one: farm board bundle.")


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = 0o644
    entry.mtime = 0
    return entry
