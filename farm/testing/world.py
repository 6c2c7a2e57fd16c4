"""A world in one process, decided by a seed: virtual time, hosts that crash, a network in memory, threads by turns.

It is an asyncio loop whose time jumps to the next event. Time, threads and waits are given to code that knows nothing
of it by replacing them, so a world needs a process of its own. `simulation` says what runs in it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import types
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

T = TypeVar("T")
# Seconds since the epoch when monotonic clocks are at 0, and what these show at the beginning.
EPOCH_S, BEGIN_S = 1.7e9, 1000.0
# The network's delay, one way, and how often what is lost is repeated, in s.
_LEAST_DELAY_S, _MOST_DELAY_S, _REPEAT_S = 0.0002, 0.003, 0.1

# More than ten times as many as the longest farm takes.
_MOST_TURNS = 1_000_000
HOST: contextvars.ContextVar[PlayedHost] = contextvars.ContextVar("host")


class PlayedHost:
    """A process on a machine of its own: killed, it stops for good; frozen, it goes on later."""

    numbers = itertools.count(100)

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, next(PlayedHost.numbers)
        self.skew_s = self.frozen_until_s = 0.0
        self.is_dead = False


class PlayedLink:
    """An address's cable. While it `is_cut`, bytes wait, since TCP repeats them; while it `is_off`, they are lost."""

    def __init__(self) -> None:
        self.is_cut = self.is_off = False


class World(asyncio.BaseEventLoop):
    """The loop. `random` decides what chance decides; `failures` are errors that no caller took."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.failures: list[str] = []
        self._now_s, self._turns = BEGIN_S, 0
        self._selector: Any = self  # it is asked for nothing but `select`
        self._clock_resolution = 1e-9
        self._links: dict[str, PlayedLink] = {}
        self._servers: dict[tuple[str, int], tuple[PlayedHost, Callable[[], Any], contextvars.Context]] = {}
        self._ends: list[PlayedTransport] = []
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time until the next event pass."""
        self._turns += 1
        if timeout is None or self._turns > _MOST_TURNS:
            raise RuntimeError("nothing can happen any more, or too much without an end")
        self._now_s += max(0.0, timeout)
        return []

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    # Hosts

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return super().call_soon(*self._on_host(callback, args, context), context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, *self._on_host(callback, args, context), context=context)

    def _on_host(self, callback: Any, arguments: tuple[Any, ...], context: Any) -> tuple[Any, ...]:
        host = HOST.get(None) if context is None else context.get(HOST)
        return (callback, *arguments) if host is None else (self._run_on, host, callback, *arguments)

    def _run_on(self, host: PlayedHost, callback: Any, *arguments: Any) -> None:
        if host.frozen_until_s > self._now_s:
            super().call_at(host.frozen_until_s, self._run_on, host, callback, *arguments)
        elif not host.is_dead:
            callback(*arguments)

    def start(self, host: PlayedHost, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Begin a coroutine on a host."""
        context = contextvars.copy_context()
        context.run(HOST.set, host)
        return context.run(lambda: self.create_task(work()))

    def start_thread(self, host: PlayedHost, work: Callable[[], T]) -> asyncio.Task[T]:
        """Begin a function that waits with its thread."""
        return self.start(host, functools.partial(greenlet_spawn, work))

    def kill(self, host: PlayedHost) -> None:
        """End a process where it waits; its kernel closes its connections."""
        host.is_dead = True
        for end in self._ends:
            if end.host is host:
                end.close()
        self._ends = [end for end in self._ends if not end.is_closing()]

    def _note_failure(self, _: Any, about: dict[str, Any]) -> None:
        if "was destroyed" not in str(about.get("message")):  # that of a dead host
            self.failures.append(f"lost: {about.get('message')}: {about.get('exception')!r}")

    # Network

    def find_link(self, address: str) -> PlayedLink:
        return self._links.setdefault(address, PlayedLink())

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        place = (str(host), int(port))
        self._servers[place] = (HOST.get(), factory, contextvars.copy_context())
        listening = types.SimpleNamespace(getsockname=lambda: place)
        return types.SimpleNamespace(sockets=[listening], _start_serving=lambda: None)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        link = self.find_link(host)
        await asyncio.sleep(2 * self.draw_delay_s())
        while link.is_cut or link.is_off:
            await asyncio.sleep(_REPEAT_S)
        server = self._servers.get((host, port))
        if server is None or server[0].is_dead:
            raise ConnectionRefusedError(111, "Connection refused")
        near = PlayedTransport(self, link, HOST.get(), contextvars.copy_context())
        far = PlayedTransport(self, link, server[0], server[2].copy())
        near.peer, far.peer = far, near
        self._ends += [near, far]
        near.begin(ours := factory())
        far.context.run(lambda: far.begin(server[1]()))
        return near, ours

    def draw_delay_s(self) -> float:
        return self.random.uniform(_LEAST_DELAY_S, _MOST_DELAY_S)


class PlayedTransport(asyncio.Transport):
    """One end of a connection."""

    peer: PlayedTransport

    def __init__(self, world: World, link: PlayedLink, host: PlayedHost, context: contextvars.Context) -> None:
        super().__init__()
        self.host, self.context = host, context
        self._world, self._link = world, link
        self._protocol: Any = None
        self._arrives_s = 0.0
        # What came while reading was paused; None while it is not.
        self._waiting: list[tuple[str, bytes]] | None = None
        self._is_closing = False

    def begin(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._send("data", bytes(data))

    def write_eof(self) -> None:
        self._send("eof", b"")

    def close(self) -> None:
        self._send("close", b"")
        self._end()

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self._waiting = self._waiting or []

    def resume_reading(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for what, data in waiting:
            self._take(what, data)

    def _send(self, what: str, data: bytes) -> None:
        """Have the peer get it, in order and after the network's delay."""
        if not self._is_closing:
            self._arrives_s = max(self._arrives_s, self._world.time() + self._world.draw_delay_s())
            self._world.call_at(self._arrives_s, self._arrive, what, data, context=self.peer.context)
            if self.peer.host.is_dead and not self._link.is_off:  # a booted machine does not know the connection
                self._world.call_at(self._arrives_s, self._take, "close", b"", context=self.context)

    def _arrive(self, what: str, data: bytes) -> None:
        if self._link.is_cut and not self._link.is_off:
            again_s = self._world.time() + _REPEAT_S
            self._arrives_s = max(self._arrives_s, again_s)
            self._world.call_at(again_s, self._arrive, what, data, context=self.peer.context)
        elif not self._link.is_off:
            self.peer._take(what, data)

    def _take(self, what: str, data: bytes) -> None:
        if self._is_closing:
            return
        if self._waiting is not None:
            self._waiting.append((what, data))
        elif what == "data":
            self._protocol.data_received(data)
        elif what == "eof":
            self._protocol.eof_received()
        else:
            self._end()

    def _end(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._world.call_soon(self._protocol.connection_lost, None, context=self.context)


# For what waits with its thread


def wait(work: Awaitable[T], timeout_s: float | None = None) -> T | None:
    """Wait in a played thread; None after `timeout_s`."""
    return await_only(_within(work, timeout_s))


async def _within(work: Awaitable[T], timeout_s: float | None) -> T | None:
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        return None


class PlayedEvent:
    """In place of `threading.Event`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set, self.is_set, self.clear = self._event.set, self._event.is_set, self._event.clear

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            wait(self._event.wait(), timeout)
        return self.is_set()


class Thread:
    """In place of `threading.Thread`."""

    def __init__(self, target: Any = None, name: str = "", args: Any = (), daemon: bool = True) -> None:
        self._work = functools.partial(target, *args)
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._task = get_world().start_thread(HOST.get(), self._work)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            wait(asyncio.wait([self._task]), timeout)


class PlayedFuture:
    """In place of a task's `concurrent.futures.Future`."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.done, self.cancelled, self.cancel = task.done, task.cancelled, task.cancel
        self.add_done_callback = task.add_done_callback

    def result(self, timeout_s: float | None = None) -> Any:
        return self._task.result() if self._task.done() else wait(asyncio.shield(self._task), timeout_s)


class PlayedLoop:
    """In place of the `LoopThread` of sessions."""

    def start(self, work: Coroutine[Any, Any, Any]) -> PlayedFuture:
        return PlayedFuture(get_world().create_task(work))

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return wait(work)


def get_world() -> World:
    """The running one."""
    world = asyncio.get_running_loop()
    assert isinstance(world, World)
    return world
