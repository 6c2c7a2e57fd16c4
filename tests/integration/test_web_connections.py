"""Connections to the page's server that say nothing, on a real server with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from farm.web import serve
from farm.web.serve import Connection, Listener

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """An application that is up."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"up"})


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, int]]:
    """A server on both loopback addresses, as for two clients' addresses; their ports."""
    config = uvicorn.Config(answer, http=Connection, lifespan="off", log_level="critical", limit_concurrency=1000)
    config.load()
    config.ssl = context
    server = uvicorn.Server(config)
    sockets = [Listener(socket.AF_INET), Listener(socket.AF_INET6)]
    for sock, address in zip(sockets, ("127.0.0.1", "::1"), strict=True):
        sock.speaks_tls = context is not None
        sock.bind((address, 0))
        sock.listen()
    running = asyncio.create_task(server._serve(sockets))
    try:
        yield sockets[0].getsockname()[1], sockets[1].getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def ask(streams: Streams, request: bytes = GET) -> bytes:
    """Send a request; the first line of the answer."""
    reader, writer = streams
    writer.write(request)
    return await asyncio.wait_for(reader.readline(), 20)


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's head that does not come, comes in drips, or comes half after a whole one is not waited for."""
    monkeypatch.setattr(serve, "HEAD_TIMEOUT_S", 0.3)

    async def run() -> None:
        async with serving() as (port, _):
            silent, dripping, second, working = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            assert await ask(second) == b"HTTP/1.1 200 OK\r\n"
            await second[0].readuntil(b"up")
            second[1].write(GET[:20])

            async def drip() -> None:
                with contextlib.suppress(OSError):
                    for number in range(1000):
                        dripping[1].write(GET[number % 10 : number % 10 + 1])
                        await asyncio.wait([ended], timeout=0.02)
                        if ended.done():
                            return

            ended = asyncio.ensure_future(dripping[0].read())
            dripped = asyncio.create_task(drip())
            for reader, _ in (silent, second):
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 20) == b""
            await asyncio.wait_for(asyncio.wait([ended]), 20)
            await dripped
            for reader, writer in (silent, dripping, second):
                assert reader.at_eof() or reader.exception()
                writer.close()
            fresh = await asyncio.open_connection("127.0.0.1", port)
            assert await ask(fresh) == b"HTTP/1.1 200 OK\r\n"
            for _, writer in (working, fresh):
                writer.close()

    asyncio.run(run())


def test_one_address_does_not_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its share an address is refused with 503 at once; others are served, and so is it once it lets go."""
    monkeypatch.setattr(serve, "MOST_OF_ADDRESS", 20)
    monkeypatch.setattr(serve, "find_network", lambda text: text)

    async def run() -> None:
        async with serving() as (port, other_port):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            assert await ask(held[0]) == b"HTTP/1.1 200 OK\r\n"
            refused = await asyncio.open_connection("127.0.0.1", port)
            assert b"503" in await asyncio.wait_for(refused[0].readline(), 20)
            other = await asyncio.open_connection("::1", other_port)
            assert await ask(other) == b"HTTP/1.1 200 OK\r\n"
            held[1][1].close()
            await held[1][1].wait_closed()
            again = await asyncio.open_connection("127.0.0.1", port)
            assert await ask(again) == b"HTTP/1.1 200 OK\r\n"
            for _, writer in (*held, refused, other, again):
                writer.close()

    asyncio.run(run())


def test_silent_handshakes_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS an address has no more places for connections that begin no handshake, and all have a limit."""
    monkeypatch.setattr(serve, "MOST_OF_ADDRESS", 20)
    monkeypatch.setattr(serve, "MOST_ACCEPTED", 30)

    async def run() -> None:
        async with serving(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as (port, _):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            refused = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(refused[0].read(), 20) == b""
            monkeypatch.setattr(serve, "MOST_OF_ADDRESS", 100)
            held += [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
            refused = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(refused[0].read(), 20) == b""
            for _, writer in held:
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.0.0.9", True),
        ("127.0.0.1", "::1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_what_is_one_address(one: str, other: str, same: bool) -> None:
    """Loopback is one address, and a /64 of IPv6, since one machine has as many of them as it likes."""
    found = [serve.find_network(text) for text in (one, other)]
    assert (found[0] == found[1]) is same
