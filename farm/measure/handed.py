"""Bytes handed from one process of ours to another by name, so that big programs are neither copied nor waited for.

They lie in memory that has no file: it is gone with whoever gave them, and a reader that is stopped holds nobody up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import weakref
from pathlib import Path

from farm.errors import TransientError

# What is smaller travels in the message itself: several of them fit into what a pipe holds.
_LEAST_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True)
class Handed:
    """The name under which they can be read while their giver keeps them, and what they are."""

    path: str
    size: int
    sha256: str

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes. Raises TransientError where their giver is gone."""
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise TransientError(f"what another process was to hand over is gone: {error}") from error


class Given:
    """Bytes for other processes, kept until this object is dropped. `handed` is what those are sent."""

    def __init__(self, data: bytes) -> None:
        self.handed: bytes | Handed = data
        if len(data) < _LEAST_BYTES:
            return
        descriptor = os.memfd_create("farm-handed", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
        self.handed = Handed(f"/proc/{os.getpid()}/fd/{descriptor}", len(data), hashlib.sha256(data).hexdigest())


def read(data: bytes | Handed) -> bytes:
    """What was handed over. Raises TransientError."""
    return data.read() if isinstance(data, Handed) else data
