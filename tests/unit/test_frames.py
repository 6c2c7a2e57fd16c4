"""What may come from a board: every answer of a TVM server, and nothing else."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from device_agent.protocol import RPC_MAGIC
from farm.connectivity.frames import FrameFilter, RefusedError
from tests import fuzzing
from tests import hostile_board as rpc
from tests.hostile_board import GREETING

ANSWERS = {
    "nothing": rpc.void(),
    "a handle": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(0x7F00, rpc.POINTER))),
    "text": rpc.answer("{}"),
    "much text": rpc.answer("x" * 100_000),
    "bytes": rpc.answer(b"\x00" * 9),
    "no bytes": rpc.answer(b""),
    "a number": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(rpc.FLOAT), rpc.number(1, rpc.FLOAT))),
    "a module's handle": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(rpc.MODULE), rpc.number(9, rpc.POINTER))),
    "a tensor": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(70), rpc.tensor(2, 3), rpc.number(9, rpc.POINTER))),
    "a device's name": rpc.frame(rpc.RETURN, rpc.sequence(struct.pack("<iIQ", rpc.STR, rpc.STR, 4) + b"cuda")),
    "an exception": rpc.frame(rpc.EXCEPTION, rpc.sequence(rpc.text("ValueError: no"))),
    "copied bytes": rpc.frame(rpc.COPY_ACK, b"\x01" * 4096),
}
REFUSED = {
    "a call": rpc.frame(rpc.CALL, struct.pack("<Q", 1) + rpc.sequence()),
    "taking the server's place": rpc.frame(rpc.INIT_SERVER, struct.pack("<Q", 5) + b"0.8.0" + rpc.sequence()),
    "a system call": rpc.frame(rpc.GET_FUNCTION, rpc.sequence(rpc.text("runtime.ModuleLoadFromFile"))),
    "a copy into the client": rpc.frame(rpc.COPY_TO, rpc.tensor(1)),
    "a copy out of the client": rpc.frame(rpc.COPY_FROM, rpc.tensor(1)),
    "no code": struct.pack("<Q", 0) + struct.pack("<i", rpc.RETURN),
    "a frame too long": struct.pack("<Qi", 1 << 21, rpc.RETURN),
    "a frame that never ends": struct.pack("<Qi", 2**64 - 1, rpc.COPY_ACK),
    "bytes to spare": rpc.frame(rpc.RETURN, rpc.sequence(rpc.none()) + b"\x02\x00\x00\x00"),
    "a function": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(rpc.INT), rpc.number(0x41, rpc.FUNCTION))),
    "a module": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(0x41, rpc.MODULE))),
    "a tensor in the place of a number": rpc.frame(rpc.RETURN, rpc.sequence(rpc.number(rpc.INT), rpc.tensor(1))),
    "a tensor of another session": rpc.frame(
        rpc.RETURN, rpc.sequence(rpc.number(70), rpc.tensor(1, device=129), rpc.number(9, rpc.POINTER))
    ),
    "a tensor of -1 axes": rpc.frame(
        rpc.RETURN, rpc.sequence(rpc.number(70), rpc.tensor(ndim=-1), rpc.number(9, rpc.POINTER))
    ),
    "text longer than its frame": rpc.frame(rpc.RETURN, rpc.sequence(struct.pack("<iQ", rpc.TEXT, 2**32 - 1) + b"x")),
    "no values": rpc.frame(rpc.RETURN, rpc.sequence()),
    "-1 values": rpc.frame(rpc.RETURN, struct.pack("<i", -1)),
    "an exception without words": rpc.frame(rpc.EXCEPTION, rpc.sequence()),
    "an exception that is an object": rpc.frame(
        rpc.EXCEPTION, rpc.sequence(struct.pack("<iIQ", rpc.STR, rpc.STR, 1) + b"x")
    ),
}


def see(data: bytes, chunk: int = 1 << 20, most: int = 1 << 20) -> int:
    """How many bytes a filter lets pass in chunks before it raises, if it does."""
    check, passed = FrameFilter(most), 0
    try:
        for at in range(0, len(data), chunk):
            passed += len(check(data[at : at + chunk]))
    except (RefusedError, EOFError):
        pass
    return passed


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_pass_in_whatever_pieces_they_come(name: str, chunk: int) -> None:
    """What a TVM server answers passes as it is, several times over."""
    data = GREETING + 2 * ANSWERS[name]
    assert see(data[:500] if chunk == 1 else data, chunk) == min(len(data), 500 if chunk == 1 else len(data))


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_answer_is_refused_before_it_is_whole(name: str, chunk: int) -> None:
    """TVM's client acts on whole frames: of these the last byte never reaches it."""
    before = GREETING + ANSWERS["text"]
    data = before + REFUSED[name]
    assert see(data, chunk) < len(data)
    check = FrameFilter(1 << 20)
    with pytest.raises(RefusedError):
        check(data)


@pytest.mark.parametrize(
    ("greeting", "wrong"),
    [
        (struct.pack("<i", 0x1234), "is not TVM's"),
        (struct.pack("<ii", RPC_MAGIC, -1), "a key of -1 bytes"),
        (struct.pack("<ii", RPC_MAGIC, 1 << 30), "a key of"),
        (struct.pack("<ii", RPC_MAGIC, 7) + b"%toinit" + rpc.void(), "words after"),
        (struct.pack("<i", RPC_MAGIC + 2) + rpc.void(), "words after"),
    ],
)
def test_greetings_that_lead_astray_are_refused(greeting: bytes, wrong: str) -> None:
    """A key that TVM reads in another way, or that is endless, comes from no server of TVM's."""
    with pytest.raises(RefusedError, match=wrong):
        FrameFilter()(greeting)


def test_answers_and_goodbyes_of_an_agent_pass() -> None:
    """An agent answers a fence in the place of its key, and turns away who knows the wrong one. A session that breaks
    down on the board says so as TVM does; that is no attack, and nothing for the client.
    """
    for answer in (struct.pack("<ii", RPC_MAGIC, 15) + b'{"status":"ok"}', struct.pack("<i", RPC_MAGIC + 2)):
        assert see(answer) == len(answer)
    with pytest.raises(EOFError):
        FrameFilter()(GREETING + rpc.frame(rpc.SHUTDOWN))


def is_answer(code: int) -> bool:
    return code in (rpc.RETURN, rpc.EXCEPTION, rpc.COPY_ACK)


def find_frames(data: bytes) -> list[int]:
    (size,) = struct.unpack_from("<i", data, 4)
    at, codes = 8 + size, []
    while at + 12 <= len(data):
        length, code = struct.unpack_from("<Qi", data, at)
        at += 8 + length
        if at <= len(data):
            codes.append(code)
    return codes


def throw(rng: random.Random, mutate: Callable[[bytes, random.Random], bytes]) -> None:
    frames = [each for each in (*ANSWERS.values(), *REFUSED.values()) if len(each) < 1000]
    data = GREETING + mutate(b"".join(rng.choices(frames, k=rng.randrange(1, 6))), rng)
    passed = see(data, 1)
    assert all(is_answer(code) for code in find_frames(data[:passed]))
    for chunk in (3, 64, 1 << 20):
        # In bigger pieces at most the piece with the mistake is held back as a whole.
        assert passed - chunk <= see(data, chunk) <= passed


def test_fuzz_no_mutated_stream_gets_a_frame_through_that_is_no_answer() -> None:
    """Any bytes, in any pieces: refused or an answer, and the filter fails in no other way."""
    for rng in fuzzing.each(400):
        throw(rng, fuzzing.mutate_bytes)
