"""The loop of this process's sessions, and a session for callers that wait with their thread: doctor, provisioning."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
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


@functools.cache
def start_loop() -> BlockingPortal:
    """Return the loop of sessions, whose thread ends with the process. Raises TransientError where it cannot start."""
    return open_loop("farm-boards", contextlib.nullcontext)[0]


def open_loop(
    name: str, within: Callable[[], contextlib.AbstractContextManager[Any]]
) -> tuple[BlockingPortal, threading.Thread]:
    """Start a thread with a loop, which runs in `within`, until its `stop`.

    Raises what `within` raises, TransientError where there is no memory for a thread.
    """
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        with within():
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await portal.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except BaseException as error:  # the edge of a thread
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
        return started.result(), thread
    except (RuntimeError, OSError) as error:  # what Python makes of EAGAIN and ENOMEM, or no descriptor is left
        raise TransientError(f"a thread for boards cannot be started: {error}") from error


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
