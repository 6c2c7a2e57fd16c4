"""Cache of built libraries, keyed by their inputs: a folder of files, bounded in size.

A miss or a failure means that the caller builds. Every hit is verified by its checksum.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farm import folders

# A library is 17 to 60 KB, so this keeps some fifty thousand.
MAX_BYTES = 2 << 30
# After this many new files the folder is scanned and trimmed to this share of its limit.
_LOOK_EVERY = 1000
_KEPT_SHARE = 0.8
# Version of the steps between module and library; raise it when `builder` or `linker` change them.
_RECIPE = 4
_SUM_BYTES = hashlib.sha256().digest_size


@functools.cache
def compiler_versions() -> str:
    """Return the versions that a library depends on besides its module and target, as one line. Loads no TVM."""
    packages = ("apache-tvm", "apache-tvm-ffi", "ziglang")
    return " ".join([*(f"{each}=={importlib.metadata.version(each)}" for each in packages), f"recipe=={_RECIPE}"])


def build_key(module_json: str, target: Mapping[str, Any], standalone: bool) -> str:
    """Return the cache key of a build as hexadecimal: equal for equal input and compiler."""
    terms = [compiler_versions(), json.dumps(dict(target), sort_keys=True), str(bool(standalone)), module_json]
    return hashlib.sha256("\0".join(terms).encode()).hexdigest()


class BuildCache:
    """Libraries in `folder`. Several processes may share it. Not thread-safe."""

    def __init__(self, folder: Path, note: Callable[[str], None], max_bytes: int = MAX_BYTES) -> None:
        """`note` gets one message when the folder cannot be used."""
        self._folder, self._note, self._max_bytes = folder, note, max_bytes
        self._warned = False
        self._until_look = _LOOK_EVERY

    def find(self, key: str) -> bytes | None:
        """Return the library, or None. Remove a damaged file."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            library = content[_SUM_BYTES:]
            if library and hashlib.sha256(library).digest() == content[:_SUM_BYTES]:
                os.utime(path)  # used now: the last to be dropped
                return library
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
        return None

    def keep(self, key: str, library: bytes) -> None:
        """Write a library atomically. A full disk only loses the entry."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with folders.new_file(path) as part:
                part.write_bytes(hashlib.sha256(library).digest() + library)
        except OSError as error:
            self._warn(error)
            return
        self._until_look -= 1
        if self._until_look <= 0:
            self.trim()

    def trim(self) -> None:
        """Remove the least recently used files until the folder is well below its limit."""
        self._until_look = _LOOK_EVERY
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):  # removed meanwhile, by another process
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self._max_bytes * _KEPT_SHARE:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._note(f"cannot cache built libraries in {self._folder}: {error.strerror or error}")
