"""A board's session for callers that wait with their thread: doctor, certificates, provisioning, board processes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from anyio.from_thread import start_blocking_portal

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, PinReport, PowerSpec, PowerTrace, RunSpec
from farm.closing import Closing
from farm.measure.arrays import Arrays, BufferName
from farm.measure.session import BoardSession


class BlockingSession(Closing):
    """A `BoardSession` whose loop has a thread of its own. Not thread-safe, but for `cut`."""

    def __init__(self, *where: Any, **options: Any) -> None:
        """Take what `BoardSession.open` takes, and raise what it raises."""
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._session = self._portal.call(lambda: BoardSession.open(*where, **options))
            self._stack = stack.pop_all()
        self.key, self.description = self._session.key, self._session.description

    @property
    def sent_bytes(self) -> int:
        return self._session.sent_bytes

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        return self._portal.call(self._session.measure, spec, library)

    def run_model(
        self, spec: RunSpec, program: bytes | BufferName, inputs: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Outcome, Arrays]:
        ran: tuple[Outcome, Arrays] = self._portal.call(self._session.run_model, spec, program, inputs)
        return ran

    def pin(self, point: OperatingPoint) -> PinReport:
        return self._portal.call(self._session.pin, point)

    def unpin(self) -> PinReport:
        return self._portal.call(self._session.unpin)

    def power(self, spec: PowerSpec) -> PowerTrace:
        return self._portal.call(self._session.power, spec)

    def cut(self) -> None:
        """End the running call, and the session with it. From any thread; the owner still calls `close`."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._portal.start_task_soon(self._session.aclose)

    def close(self) -> None:
        """Close the session. Safe to call twice."""
        with contextlib.suppress(RuntimeError):
            self._portal.call(self._session.aclose)
        self._stack.close()
