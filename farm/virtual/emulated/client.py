"""A worker's connection to the emulator's process, over shared memory.

Nothing of the emulator is loaded here. `Run` holds the result of a call; `farm/virtual/pace.py` converts its
cost to time at a board's clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.worker.arguments import numpy_dtype

_ALIGNED = 128
_MOST_ANSWER = 1 << 20
_PAGE = 4096
# NumPy has no dtype kind for it.
_HALVED = "bfloat16"


class EmulatorError(Exception):
    """The emulator's process is gone, or cannot be reached."""


class ProgramError(Exception):
    """The program failed: `kind` is cap, fault, missing or memory."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Run:
    """The cost of a call: instructions, and segments as `estimate.Segment`."""

    instructions: int
    segments: tuple[tuple[float, int, float, int], ...]


class Emulation:
    """A library in an emulated machine; a context manager."""

    def __init__(
        self,
        path: Path,
        library: bytes,
        core: Mapping[str, Any],
        tasks: int,
        shared_bytes: int,
        heap_bytes: int,
        timeout_s: float,
    ) -> None:
        """`core` comes from `inventory/core_types`; `tasks` is the number of threads that compute at a time.

        Raises EmulatorError; ProgramError for a library that cannot be loaded.
        """
        size = max(_PAGE, (shared_bytes + _PAGE - 1) & -_PAGE)
        descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
            self._used = 0
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            order = {
                "library_bytes": len(library),
                "core": dict(core),
                "tasks": tasks,
                "shared_bytes": size,
                "heap_bytes": heap_bytes,
            }
            text = json.dumps(order).encode() + b"\n"
            socket.send_fds(self._socket, [text[:1]], [descriptor])
            self._socket.sendall(text[1:] + library)
            self._stream = self._socket.makefile("rb")
            self.functions: list[str] = self._receive()["functions"]
        except OSError as error:
            self._socket.close()
            raise EmulatorError(f"the emulator cannot be reached: {error}") from error
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(descriptor)

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
            self._socket.close()

    def place(self, shape: Sequence[int], dtype: str) -> Placed:
        """Allocate a tensor in shared memory. Raises MemoryError."""
        kind = numpy_dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        offset = (self._used + _ALIGNED - 1) & -_ALIGNED
        if offset + size > len(self._memory):
            raise MemoryError(f"the tensors need more than {len(self._memory):,} bytes")
        self._used = offset + size
        array = np.frombuffer(memoryview(self._memory)[offset : offset + size], dtype=kind).reshape(shape)
        return Placed(offset, tuple(map(int, shape)), array)

    def call(
        self,
        entry: str,
        tensors: Sequence[Placed],
        cap: int,
        warm: Sequence[int] = (),
        *,
        first_only: bool = False,
        counted: bool = True,
    ) -> Run:
        """Call a function. `warm` lists the tensors already in L2.

        `first_only`: run the first task of each parallel region and assume that the others cost the same; outputs are
        then incomplete. Not `counted`, it has no segments and takes less time. Raises ProgramError, EmulatorError.
        """
        order: dict[str, Any] = {"entry": entry, "tensors": [each.order for each in tensors]}
        order |= {"cap": cap, "warm": list(warm), "first_only": first_only, "counted": counted}
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            answer = self._receive()
        except OSError as error:
            raise EmulatorError(f"the emulator does not answer: {error}") from error
        return Run(int(answer["instructions"]), tuple(tuple(each) for each in answer["segments"]))

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline(_MOST_ANSWER)
        if not line:
            raise EmulatorError("the emulator's process has ended")
        answer: dict[str, Any] = json.loads(line)
        if answer["status"] != "ok":
            raise ProgramError(answer["status"], answer["message"])
        return answer


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor in shared memory, and the array over it."""

    offset: int
    shape: tuple[int, ...]
    array: Any

    @property
    def order(self) -> list[Any]:
        """The tensor as a call names it. Raises ProgramError for a dtype without a DLPack code."""
        dtype = self.array.dtype
        kind = dtype.name if dtype.name == _HALVED else dtype.kind
        if kind not in ("i", "u", "f", "b", _HALVED):
            raise ProgramError("missing", f"a tensor of {dtype.name} is not emulated")
        return [self.offset, list(self.shape), kind, dtype.itemsize * 8]
