"""Boards that are played (`farm.testing.played_boards`), in a process of their own behind a real tracker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import struct
import sys
from typing import Any

from farm.testing.played_boards import PlayedBoard, read_key

# From tvm/rpc/base.py of 0.27.
_MAGIC, _PUT, _UPDATE_INFO = 0x2F271, 3, 5


async def play(tracker: tuple[str, int], names: list[str], takes_s: float) -> None:
    """Play boards until the process is ended; a measurement takes `takes_s`."""
    room = asyncio.Semaphore(16)  # TVM's tracker refuses a crowd
    await asyncio.gather(*(_play(PlayedBoard(name, "jetson-nano", takes_s), tracker, room) for name in names))


async def _play(board: PlayedBoard, tracker: tuple[str, int], room: asyncio.Semaphore) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await board.serve(reader, writer, await read_key(reader))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    await _offer(board, tracker, server.sockets[0].getsockname()[1], room)


async def _offer(board: PlayedBoard, tracker: tuple[str, int], port: int, room: asyncio.Semaphore) -> None:
    """Offer a board to the tracker, again after each session."""
    free = asyncio.Event()
    board.on_free, board.on_act = free.set, lambda act: None
    async with room:
        reader, writer = await asyncio.open_connection(*tracker)
        writer.write(struct.pack("<i", _MAGIC))
        await reader.readexactly(4)
        await _tell(reader, writer, [_UPDATE_INFO, {"key": f"server:{board.key}", "addr": [None, port]}])
    while True:
        free.clear()
        await _tell(reader, writer, [_PUT, board.key, [port, board.offer()], None])
        await free.wait()


async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Any) -> None:
    data = json.dumps(message).encode()
    writer.write(struct.pack("<i", len(data)) + data)
    (size,) = struct.unpack("<i", await reader.readexactly(4))
    await reader.readexactly(size)


def main() -> None:
    """Play COUNT boards behind the tracker at HOST PORT; measurements take SECONDS."""
    host, port, count, seconds = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(play((host, int(port)), [f"nano-{number + 1}" for number in range(int(count))], float(seconds)))


if __name__ == "__main__":
    main()
