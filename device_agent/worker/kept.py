"""A worker that outlives one run: it creates the GPU's context once, and receives jobs after its fork.

The worker itself, and how its end is judged, is in `worker.py`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The name of a job's file, as sent to the worker.
_NAME_BYTES = 8
# A worker is replaced after so many jobs, which ends what it accumulates (driver code, TVM's workspaces).
MOST_JOBS = 64
# A worker that keeps more than this share of a job's memory, beyond the first job's rest, is replaced.
MOST_GATHERED = 0.5


class Orders:
    """Jobs from a session to a worker forked from it: files in `folder`, named over a pipe.

    Objects that both have from before the fork (`shared`) are not copied.
    """

    def __init__(self, folder: Path, shared: tuple[object, ...]) -> None:
        self._folder, self._shared = folder, shared
        self._numbers = itertools.count(1)
        self._sent: Path | None = None
        self.reading, self.writing = os.pipe()

    def close(self, *ends: int) -> None:
        """Close these ends of the pipe, or both."""
        for end in ends or (self.reading, self.writing):
            with contextlib.suppress(OSError):
                os.close(end)

    def send(self, job: Callable[[], bytes], *more: Any) -> None:
        """Send the worker a job and its parameters. Raises OSError if it is gone, or the disk is full.

        Call `clear` once the job has ended in any way.
        """
        name = f"{next(self._numbers):0{_NAME_BYTES}}"
        buffer = io.BytesIO()
        _Pickler(buffer, self._shared).dump((job, *more))
        self._sent = self._folder / f"job-{name}"
        self._sent.write_bytes(buffer.getvalue())
        os.write(self.writing, name.encode())

    def clear(self) -> None:
        """Remove a job that no worker took."""
        if self._sent is not None:
            self._sent.unlink(missing_ok=True)

    def receive(self) -> tuple[Any, ...] | None:
        """The next job with its parameters; None at the end. Raises OSError."""
        name = os.read(self.reading, _NAME_BYTES).decode()
        if not name:
            return None
        path = self._folder / f"job-{name}"
        data = path.read_bytes()
        path.unlink()
        found: tuple[Any, ...] = _Unpickler(io.BytesIO(data), self._shared).load()
        return found


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = {id(each): at for at, each in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]
