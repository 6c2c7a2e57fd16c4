"""The loop of this process's sessions, and a session for callers that wait with their thread: doctor, provisioning."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy.typing as npt

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, PinReport, PowerSpec, PowerTrace, RunSpec
from farm.closing import Closing
from farm.errors import TransientError
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession

T = TypeVar("T")


class LoopThread:
    """A loop on a thread of its own, for coroutines of other threads."""

    def __init__(self, name: str, within: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Start it, to run in `within` until `stop`.

        Raises what `within` raises, TransientError where there is no memory for a thread.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started, within), name=name, daemon=True)
        try:
            self._thread.start()
            started.result()
        except (RuntimeError, OSError) as error:  # what Python makes of EAGAIN and ENOMEM, or no descriptor is left
            raise TransientError(f"a thread for boards cannot be started: {error}") from error

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine soon. To cancel the answer cancels it. Raises RuntimeError after the loop's end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it."""
        return self.start(work).result()

    def stop(self, timeout_s: float) -> None:
        """Cancel all coroutines, and end the thread. Safe to call twice."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(timeout_s)

    def _run(self, started: Future[None], within: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        try:
            asyncio.run(self._serve(started, within))
        except BaseException as error:  # the edge of a thread
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[None], within: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        with within():
            started.set_result(None)
            await self._stopped.wait()
            work = asyncio.all_tasks() - {asyncio.current_task()}
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)


@functools.cache
def start_loop() -> LoopThread:
    """Return the loop of sessions, whose thread ends with the process. Raises TransientError where it cannot start."""
    return LoopThread("farm-boards", contextlib.nullcontext)


class BlockingSession(Closing):
    """A `BoardSession` for one thread, but for `cut`."""

    def __init__(self, *where: Any, **options: Any) -> None:
        """Take what `BoardSession.open` takes, and raise what it raises."""
        self._loop = start_loop()
        self._session = self._loop.call(BoardSession.open(*where, **options))
        self.key, self.description = self._session.key, self._session.description

    @property
    def sent_bytes(self) -> int:
        return self._session.sent_bytes

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        return self._loop.call(self._session.measure(spec, library))

    def run_model(
        self, spec: RunSpec, program: bytes, inputs: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Outcome, Arrays]:
        ran: tuple[Outcome, Arrays] = self._loop.call(self._session.run_model(spec, program, inputs))
        return ran

    def pin(self, point: OperatingPoint) -> PinReport:
        return self._loop.call(self._session.pin(point))

    def unpin(self) -> PinReport:
        return self._loop.call(self._session.unpin())

    def power(self, spec: PowerSpec) -> PowerTrace:
        return self._loop.call(self._session.power(spec))

    def cut(self) -> None:
        """End the running call, and the session with it. From any thread; the owner still calls `close`."""
        self._loop.start(self._session.aclose())

    def close(self) -> None:
        self._loop.call(self._session.aclose())
