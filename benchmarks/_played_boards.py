"""Boards that are played: one process that speaks as many agents do, on loopback, behind a real tracker.

Each answers at once with a good outcome, or after the time that its measurement is said to take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import secrets
import struct
import sys

from device_agent.protocol import (
    CLAIM,
    DESCRIBE,
    FENCE_PREFIX,
    MEASURE,
    PIN,
    PROTOCOL_VERSION,
    RPC_MAGIC,
    UNPIN,
    ClaimReport,
    ClaimStatus,
    Description,
    Outcome,
    PinReport,
    PinStatus,
    Status,
)

# From tvm/rpc/base.py and rpc_reference.h of 0.27.
_TRACKER_MAGIC, _PUT, _UPDATE_INFO = 0x2F271, 3, 5
_RETURN, _GET_FUNCTION, _CALL = 4, 9, 3
_NONE, _INT, _POINTER, _TEXT, _STR = 0, 1, 4, 8, 65
TYPE = "jetson-nano"
_FUNCTIONS = (DESCRIBE, CLAIM, PIN, UNPIN, MEASURE)


def _frame(body: bytes) -> bytes:
    return struct.pack("<Qi", 4 + len(body), _RETURN) + body


def _text(value: str) -> bytes:
    data = value.encode()
    return _frame(struct.pack("<iiqiQ", 2, _INT, _STR, _TEXT, len(data)) + data)


def _describe(name: str) -> str:
    return Description(
        name=name,
        board_type=TYPE,
        agent_version="0",
        protocol_version=PROTOCOL_VERSION,
        simulated=True,
        architecture="x86_64",
        cpu_model="",
        cores_online=(0, 1, 2, 3),
        cpu_freq_range_hz={},
        memory_bytes=4 << 30,
        engines=("kernel",),
        engine_versions={},
        rails=(),
        thermal_zones=(),
    ).to_json()


class PlayedBoards:
    """The agents, all at one port; a connection's key says which one is meant."""

    def __init__(self, tracker: tuple[str, int], names: list[str], takes_s: float) -> None:
        self._tracker, self._names, self._takes_s = tracker, names, takes_s
        self._offered: dict[str, str] = {}
        self._free: dict[str, asyncio.Event] = {}
        self._room = asyncio.Semaphore(16)
        self.port = 0

    async def run(self) -> None:
        """Serve until the process is ended."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        await asyncio.gather(*map(self._offer, self._names))

    async def _offer(self, name: str) -> None:
        """Offer a board to the tracker, again after each session."""
        key = f"{TYPE}/{name}"
        async with self._room:  # TVM's tracker refuses a crowd
            reader, writer = await asyncio.open_connection(*self._tracker)
            writer.write(struct.pack("<i", _TRACKER_MAGIC))
            await reader.readexactly(4)
            await self._tell(reader, writer, [_UPDATE_INFO, {"key": f"server:{key}", "addr": [None, self.port]}])
        self._free[name] = asyncio.Event()
        while True:
            match_key = f"{key}:{secrets.token_hex(8)}"
            self._offered[match_key] = name
            self._free[name].clear()
            await self._tell(reader, writer, [_PUT, key, [self.port, match_key], None])
            await self._free[name].wait()

    @staticmethod
    async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: object) -> None:
        data = json.dumps(message).encode()
        writer.write(struct.pack("<i", len(data)) + data)
        (size,) = struct.unpack("<i", await reader.readexactly(4))
        await reader.readexactly(size)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            _, size = struct.unpack("<ii", await reader.readexactly(8))
            key = (await reader.readexactly(size)).decode()
            if key.startswith(FENCE_PREFIX):
                answer = ClaimReport(ClaimStatus.OK).to_json()
            else:
                name = self._offered.pop(key.removeprefix("client:"), None)
                answer = f"server:{TYPE}/{name}"
            writer.write(struct.pack("<ii", RPC_MAGIC, len(answer)) + answer.encode())
            while name is not None:
                await self._answer(name, reader, writer)
        writer.close()
        if name is not None:
            self._free[name].set()

    async def _answer(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("<Q", await reader.readexactly(8))
        body = await reader.readexactly(size)
        (code,) = struct.unpack_from("<i", body)
        if code == _GET_FUNCTION:
            number = _FUNCTIONS.index(body[20:].decode()) + 1 if body[20:].decode() in _FUNCTIONS else 0
            writer.write(_frame(struct.pack("<iiq", 1, _POINTER, number)))
        elif code == _CALL:
            function = _FUNCTIONS[struct.unpack_from("<Q", body, 4)[0] - 1]
            if function == MEASURE and self._takes_s:
                await asyncio.sleep(self._takes_s)
            outcome = Outcome(
                Status.OK, latency_s=(1e-3, 1.1e-3, 1.2e-3), calls_per_sample=10, timing_s=2.0, board=name,
                simulated=True,
            )  # fmt: skip
            answers = {
                DESCRIBE: lambda: _describe(name),
                CLAIM: lambda: ClaimReport(ClaimStatus.OK).to_json(),
                MEASURE: outcome.to_json,
            }
            writer.write(_text(answers.get(function, lambda: PinReport(PinStatus.OK).to_json())()))
        else:
            writer.write(_frame(struct.pack("<ii", 1, _NONE)))


def main() -> None:
    """Play COUNT boards behind the tracker at HOST PORT; measurements take SECONDS."""
    host, port, count, seconds = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    names = [f"nano-{number + 1}" for number in range(int(count))]
    asyncio.run(PlayedBoards((host, int(port)), names, float(seconds)).run())


if __name__ == "__main__":
    main()
