"""The probe worker: a child that talks TVM's RPC to boards, so that a client that blocks or crashes is not the keeper.

What a probe is, and what it makes of a board, is in `probe` and `prober`; here the child is started and asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farm.errors import FarmError
from farm.processes import children
from farm.processes.listening import start_thread
from farm.processes.restarts import Backoff, Restarts
from farm.settings import StoreLocation

# Beyond every deadline of a probe's own (waiting for the board, connecting, measuring): then the child itself is stuck.
PROBE_TIMEOUT_S = 180.0
_BACKOFF = Backoff(first_s=0.5, last_s=30.0)

_log = logging.getLogger(__name__)

Report = dict[str, Any]


def skipped(board: str, seconds: float, reason: str) -> Report:
    """The report of a probe that was not made: neither passed nor failed."""
    return {"board": board, "passed": False, "skipped": True, "seconds": seconds, "reason": reason}


class ProbeWorker:
    """The child and what it is busy with. Used by the keeper's main thread alone; answers come by `on_answer`."""

    def __init__(
        self,
        home: Path,
        store: StoreLocation,
        tracker: tuple[str, int],
        log: Path,
        on_answer: Callable[[str, Report], None],
    ) -> None:
        """`on_answer` is called on a thread of the worker's, with the board's name and the report. Starts nothing."""
        self._command = [
            *(sys.executable, "-m", "farm.services.prober"),
            *("--home", str(home), "--store", str(store), "--tracker", f"{tracker[0]}:{tracker[1]}"),
        ]
        self._log = log
        self._on_answer = on_answer
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts(_BACKOFF)
        self._next = 0
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[str, float]] = {}
        self.restarts = 0

    @property
    def is_up(self) -> bool:
        """Whether the child runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def busy(self) -> frozenset[str]:
        """Boards whose probe has been asked for and not been answered."""
        with self._lock:
            return frozenset(name for name, _ in self._pending.values())

    def ask(self, board: str) -> bool:
        """Ask for a probe; False where it is not possible now. A board that is busy already is not asked twice."""
        if board in self.busy:
            return True
        if not self._ensure_started():
            return False
        assert self._process is not None
        assert self._process.stdin is not None
        self._next += 1
        with self._lock:
            self._pending[self._next] = (board, time.monotonic())
        try:
            self._process.stdin.write(json.dumps({"id": self._next, "board": board}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # `look` finds it dead, and answers for it
            return False
        return True

    def conclude(self, board: str) -> None:
        """Take note that an answer has been dealt with; until then the board is `busy`, or it would be asked again."""
        with self._lock:
            self._pending = {number: asked for number, asked in self._pending.items() if asked[0] != board}

    def look(self) -> None:
        """Answer for a child that died or hangs; it is started again when there is something to ask."""
        if self._process is None:
            return
        now = time.monotonic()
        with self._lock:
            oldest = min((at for _, at in self._pending.values()), default=now)
        if self._process.poll() is not None:
            self._give_up(f"the probe worker ended: {children.tail(self._log, 1)}")
        elif now - oldest > PROBE_TIMEOUT_S:
            self._give_up(f"the probe worker gave no answer within {PROBE_TIMEOUT_S:g} s")

    def close(self) -> None:
        """End the child; a probe in progress gives its lease back first."""
        if self._process is not None:
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            children.stop(self._process)
            self._process = None

    def _ensure_started(self) -> bool:
        if self.is_up:
            return True
        self.look()
        if not self._restarts.due:
            return False
        self._restarts.note_up()
        try:
            self._process = children.start(self._command, self._log, os.environ, pipes=True)
        except FarmError as error:
            self._give_up(f"the probe worker cannot be started: {error.message}")
            return False
        if not start_thread("farm-probe-answers", self._read, self._process):
            self._give_up("the probe worker cannot be heard: no thread can be had")
            return False
        return True

    def _give_up(self, reason: str) -> None:
        _log.warning("%s", reason)
        self.close()
        self.restarts += 1
        self._restarts.note_end()
        with self._lock:
            lost = [name for name, _ in self._pending.values()]
            self._pending.clear()
        for name in lost:  # nothing is known of the board: neither passed nor failed
            self._on_answer(name, skipped(name, 0.0, reason))

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                report = json.loads(line)
                number = int(report["id"])
            except (ValueError, LookupError, TypeError):
                _log.warning("the probe worker said what is no answer: %r", line[:200])
                continue
            with self._lock:
                asked = self._pending.get(number)
            if asked is not None:
                self._on_answer(asked[0], report)
