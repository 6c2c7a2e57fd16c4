"""The loop of this process's sessions, and a session for callers that wait with their thread: doctor, provisioning."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import anyio
import numpy.typing as npt
from anyio.from_thread import BlockingPortal

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, PinReport, PowerSpec, PowerTrace, RunSpec
from farm.closing import Closing
from farm.errors import TransientError
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession


def start_loop() -> BlockingPortal:
    """Return the loop, whose thread ends with the process. Raises TransientError where it cannot start."""
    try:
        return _start()
    except (RuntimeError, OSError) as error:  # what Python makes of EAGAIN and ENOMEM
        raise TransientError(f"a thread for boards cannot be started: {error}") from error


@functools.cache
def _start() -> BlockingPortal:
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except OSError as error:  # no descriptor is left
            started.set_exception(error)

    threading.Thread(target=run, name="farm-boards", daemon=True).start()
    return started.result()


class BlockingSession(Closing):
    """A `BoardSession` for one thread, but for `cut`."""

    def __init__(self, *where: Any, **options: Any) -> None:
        """Take what `BoardSession.open` takes, and raise what it raises."""
        self._portal = start_loop()
        self._session = self._portal.call(lambda: BoardSession.open(*where, **options))
        self.key, self.description = self._session.key, self._session.description

    @property
    def sent_bytes(self) -> int:
        return self._session.sent_bytes

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        return self._portal.call(self._session.measure, spec, library)

    def run_model(
        self, spec: RunSpec, program: bytes, inputs: Mapping[str, npt.NDArray[Any]]
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
        self._portal.start_task_soon(self._session.aclose)

    def close(self) -> None:
        self._portal.call(self._session.aclose)
