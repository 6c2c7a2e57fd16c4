"""Boards that are played by asyncio: many agents in one process, on loopback or in a `World`.

They speak TVM's RPC and our agent's functions, keep fences with the agent's own code, and hold their clocks like it. A
program is JSON that says how it behaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from device_agent.protocol import (
    CLAIM,
    DESCRIBE,
    FENCE_PREFIX,
    MEASURE,
    PIN,
    PROTOCOL_VERSION,
    RPC_MAGIC,
    RUN_MODEL,
    UNPIN,
    ClaimReport,
    ClaimStatus,
    Description,
    LeaseClaim,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    Status,
    pack_frame,
    parse_fence_key,
)
from device_agent.session.fencing import Fences
from farm.measure.arrays import pack_arrays

# From rpc_reference.h of 0.27.
_CALL, _RETURN, _EXCEPTION, _GET_FUNCTION = 3, 4, 5, 9
_NONE, _INT, _POINTER, _TEXT, _BYTES = 0, 1, 4, 8, 9
# Small strings and bytes, as objects.
_OBJECTS = {_TEXT: 65, _BYTES: 66}
_FUNCTIONS = (DESCRIBE, CLAIM, PIN, UNPIN, MEASURE, RUN_MODEL)


class Act(NamedTuple):
    """A program that a board ran, or tried to, under a lease's token (0: none); `is_check`: for its outputs."""

    board: str
    token: int
    program: dict[str, Any]
    is_check: bool


class PlayedBoard:
    """One agent. `behave` may change a measurement's outcome, delay it, or raise ConnectionError to hang up."""

    def __init__(self, name: str, board_type: str, takes_s: float = 0.0) -> None:
        self.name, self.key = name, f"{board_type}/{name}"
        self._type, self._takes_s = board_type, takes_s
        self.on_act: Callable[[Act], None] = lambda act: None
        self.behave: Callable[[Outcome], Any] | None = None
        self.fences = Fences()
        self.point: OperatingPoint | None = None
        self.running = 0
        self._match_key = ""
        self._claim: LeaseClaim | None = None
        self._session: asyncio.Future[None] | None = None
        self.on_free: Callable[[], None] = lambda: None

    def forget(self) -> None:
        """Be as after a boot; fences are kept on disk."""
        self.point = self._claim = self._session = None
        self.running, self._match_key = 0, ""

    @property
    def is_busy(self) -> bool:
        """Whether it has a session."""
        return self._session is not None

    def offer(self) -> str:
        """Return the key that its next client has to show, as an agent gives it to a tracker."""
        self._match_key = f"{self.key}:{secrets.token_hex(8)}"
        return self._match_key

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client that has just connected."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self.serve(reader, writer, await read_key(reader))
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        """Serve a client that has said its key."""
        if key.startswith(FENCE_PREFIX):
            _greet(writer, self._take_fence(parse_fence_key(key)).to_json())
            return
        if key.removeprefix("client:").split()[0] != self._match_key or self._session is not None:
            writer.write(struct.pack("<i", RPC_MAGIC + 2))
            return
        _greet(writer, f"server:{self.key}")
        self._match_key, self._session = "", asyncio.ensure_future(self._live(reader, writer))
        closed = asyncio.ensure_future(writer.wait_closed())
        await asyncio.wait({self._session, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        self._session.cancel()
        await asyncio.gather(self._session, closed, return_exceptions=True)
        self.point = self._claim = self._session = None  # the agent restores the clocks
        self.on_free()

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._answer(reader, writer)

    def _take_fence(self, claim: LeaseClaim) -> ClaimReport:
        report = self.fences.raise_to(claim)
        if report.status is not ClaimStatus.REFUSED and self._is_over() and self._session is not None:
            self._session.cancel()
            report = dataclasses.replace(report, status=ClaimStatus.EVICTED)
        return report

    def _is_over(self) -> bool:
        """Whether a later lease than the session's is known."""
        latest = self.fences.find_latest(self._claim.store) if self._claim else None
        return self._claim is not None and latest is not None and not latest.is_same(self._claim)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("<Q", await reader.readexactly(8))
        body = await reader.readexactly(size)
        (code,) = struct.unpack_from("<i", body)
        if code == _GET_FUNCTION:
            number = _FUNCTIONS.index(body[20:].decode()) + 1 if body[20:].decode() in _FUNCTIONS else 0
            _reply(writer, struct.pack("<iiq", 1, _POINTER, number))
        elif code == _CALL:
            function = _FUNCTIONS[struct.unpack_from("<Q", body, 4)[0] - 1]
            if self._is_over() and function != DESCRIBE:
                _refuse(writer, "the lease is over")
            else:
                _say(writer, await self._carry_out(function, _read_arguments(body[12:])))
        else:
            _reply(writer, struct.pack("<ii", 1, _NONE))

    async def _carry_out(self, function: str, arguments: list[bytes]) -> str | bytes:
        if function == DESCRIBE:
            return self._describe().to_json()
        if function == CLAIM:
            claim = LeaseClaim.from_json(arguments[0].decode())
            report = self.fences.raise_to(claim)
            if report.status is not ClaimStatus.REFUSED:
                self._claim = claim
            return report.to_json()
        if function in (PIN, UNPIN):
            self.point = OperatingPoint.from_json(arguments[0].decode()) if function == PIN else None
            return PinReport(PinStatus.OK, reached=self.point).to_json()
        outcome, program = await self._run(arguments[1], is_check=function == RUN_MODEL)
        if function == MEASURE:
            return outcome.to_json()
        good = outcome.status is Status.OK
        wrong = float(bool(program.get("wrong")))
        return pack_frame(outcome.to_json(), pack_arrays({"out": np.full(4, wrong, np.float32)}) if good else b"")

    async def _run(self, binary: bytes, is_check: bool) -> tuple[Outcome, dict[str, Any]]:
        program = json.loads(binary) if binary[:1] == b"{" else {}
        status, latency_s = Status(program.get("status", "ok")), program.get("latency_s", 1e-3)
        good = status is Status.OK
        outcome = Outcome(
            status,
            "" if good else "it is said to",
            latency_s=(latency_s, 1.1 * latency_s, 1.2 * latency_s) if good else (),
            calls_per_sample=10 * good,
            timing_s=2.0 * good,
            board=self.name,
            simulated=True,
            point=self.point,
        )
        token = self._claim.token if self._claim else 0
        self.running += 1
        try:
            if self._takes_s:
                await asyncio.sleep(self._takes_s)
            if self.behave is not None:
                outcome = await self.behave(outcome)
        finally:
            self.running -= 1
            self.on_act(Act(self.name, token, program, is_check))
        return outcome, program

    def _describe(self) -> Description:
        return Description(
            *(self.name, self._type, "0", PROTOCOL_VERSION, True, "x86_64"),
            cpu_model="", cores_online=(0, 1, 2, 3), cpu_freq_range_hz={}, memory_bytes=4 << 30, engines=("kernel",),
            engine_versions={}, rails=(), thermal_zones=(),
        )  # fmt: skip


async def read_key(reader: asyncio.StreamReader) -> str:
    """Read a client's greeting: its key."""
    _, size = struct.unpack("<ii", await reader.readexactly(8))
    return (await reader.readexactly(size)).decode()


def _greet(writer: asyncio.StreamWriter, answer: str) -> None:
    writer.write(struct.pack("<ii", RPC_MAGIC, len(answer)) + answer.encode())


def _reply(writer: asyncio.StreamWriter, body: bytes, code: int = _RETURN) -> None:
    writer.write(struct.pack("<Qi", 4 + len(body), code) + body)


def _say(writer: asyncio.StreamWriter, answer: str | bytes) -> None:
    kind, data = (_TEXT, answer.encode()) if isinstance(answer, str) else (_BYTES, answer)
    _reply(writer, struct.pack("<iiqiQ", 2, _INT, _OBJECTS[kind], kind, len(data)) + data)


def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    _reply(writer, struct.pack("<iiQ", 1, _TEXT, len(why)) + why.encode(), _EXCEPTION)


def _read_arguments(body: bytes) -> list[bytes]:
    (count,), at, found = struct.unpack_from("<i", body), 4, []
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", body, at + 4)
        found.append(body[at + 12 : at + 12 + size])
        at += 12 + size
    return found
