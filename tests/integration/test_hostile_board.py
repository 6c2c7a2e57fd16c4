"""Boards that attack or lie: nothing of theirs runs here, nothing is believed, and the farm knows why they were cut."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import random
import select
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from device_agent import protocol
from device_agent.listener.tracker import TrackerLink
from device_agent.protocol import DESCRIBE, MeasureSpec, OperatingPoint, Outcome, PowerSpec, PowerTrace, Status
from farm.connectivity.frames import RefusedError
from farm.connectivity.tracker import Tracker
from farm.connectivity.wire import HungUpError, RemoteError, Wire
from farm.crew.driven_board import DrivenBoard
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.crew.held_board import Address, Ended, HeldBoard, Request, measuring
from farm.errors import (
    BoardHostileError,
    BoardLostError,
    DeadlineError,
    FarmError,
    InvalidReplyError,
    LeaseOverError,
)
from farm.inventory.board_types import load_board_types
from farm.measure import session as farm_session
from farm.measure.answers import AgentAddress
from farm.measure.arrays import pack_arrays
from farm.measure.blocking import BlockingSession
from farm.search.codegen.golden import GoldenKernels
from farm.services.probe import Prober
from farm.store import Store
from farm.values import Ssh
from tests import fuzzing, hostile_board
from tests.awaiting import await_here
from tests.hostile_board import HostileBoard, Peer
from tests.integration.conftest import wait_until
from tests.integration.stock_board import listens, stock_board
from tests.unit.test_frames import ANSWERS, REFUSED

KEY = "jetson-nano/n1"
ATTACKS = dict(hostile_board.attacks("farm_tests.take_over"))
TAKE_OVER = hostile_board.frame(hostile_board.CALL, b"\x01" * 12)
GOOD = Outcome(Status.OK, latency_s=(1e-3,), board="n1")
HUGE = (hostile_board.number(70), hostile_board.tensor(1 << 40), hostile_board.number(1, hostile_board.POINTER))


@contextlib.contextmanager
def answering(function: str, data: bytes) -> Iterator[AgentAddress]:
    """Where an agent listens that is in order, but for the answer of one function."""
    with HostileBoard(hostile_board.play_agent({function: data})) as board:
        yield AgentAddress(board.host, board.port)


@pytest.mark.core
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_board_cannot_call_the_client(attack: str) -> None:
    """Only answers are read: what asks the client to serve ends the session, and is named."""

    async def work(board: HostileBoard) -> None:
        wire = await Wire.connect(board.host, board.port, "")
        for _ in range(3):  # what was left over of one answer is read with the next
            with contextlib.suppress(RemoteError):
                await wire.call("x")

    with HostileBoard(ATTACKS[attack]) as board, pytest.raises(RefusedError):
        anyio.run(work, board)


def test_a_session_says_that_it_was_attacked() -> None:
    """From the first connection on, and in the middle of work."""
    with HostileBoard(ATTACKS["plainly"]) as board, pytest.raises(BoardHostileError, match="code 2"):
        BlockingSession(AgentAddress(board.host, board.port), KEY)
    with (
        answering(protocol.MEASURE, TAKE_OVER) as board,
        BlockingSession(board, KEY) as session,
        pytest.raises(BoardHostileError, match="code 3"),
    ):
        session.measure(MeasureSpec(()), b"")


class Place:
    key, lease, has_board, can_change = KEY, None, True, True

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.seen: list[Kind] = []

    def ensure_alive(self) -> list[str]:
        return []

    def confirm(self) -> bool:
        return True

    def note_refusal(self, error: LeaseOverError) -> None:
        raise error

    def observe(self, kind: Kind, detail: str) -> None:
        self.seen.append(kind)


@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (TAKE_OVER, BoardHostileError, Kind.HOSTILE),
        (
            hostile_board.answer(dataclasses.replace(GOOD, latency_s=(-1.0,)).to_json()),
            InvalidReplyError,
            Kind.INVALID_REPLY,
        ),
    ],
    ids=["attack", "nonsense"],
)
def test_who_drives_a_board_hears_of_it(answer: bytes, error: type[Exception], kind: Kind) -> None:
    """Its session reports it to the board's driver, which informs the farm and looks for another board."""
    with answering(protocol.MEASURE, answer) as board:
        direct = AgentAddress(board.host, board.port)
        ended = _measure_once(direct)
        assert isinstance(ended.result, error)
        place = Place(direct)
        held = DrivenBoard(place, print)
        with contextlib.closing(held):
            await_here(held.open())
            with pytest.raises(Exception, match="n1"):
                await_here(held.measure(MeasureSpec(()), b""))
        assert place.seen == [kind]


def _measure_once(direct: AgentAddress) -> Ended:
    held = HeldBoard()
    with contextlib.ExitStack() as stack:
        stack.callback(held.stop)
        job = measuring(MeasureSpec(()), b"")
        return await_here(held.call(Request(Address(direct, KEY, None), job, OperatingPoint(), 1.0)))


@contextlib.contextmanager
def registered(board: HostileBoard, tracker: Tracker) -> Iterator[None]:
    link = TrackerLink((tracker.host, tracker.port), KEY, board.port)
    with contextlib.closing(link):
        link.offer(time.monotonic())

        def go_on() -> bool:
            link.tick(time.monotonic())
            if (watched := link.watched()) is not None:
                poll = select.poll()
                poll.register(*watched)
                for _, events in poll.poll(10):
                    link.handle(events, time.monotonic())
            return link.registered

        wait_until(go_on, "the tracker to know the board")
        yield


@pytest.mark.core
def test_a_probe_quarantines_a_board_that_attacks(tmp_path: pathlib.Path, tracker: Any) -> None:
    """It stays so, with the reason, until an operator clears it: no probe brings it back."""

    def attack(peer: Peer) -> None:
        if peer.key.startswith(protocol.FENCE_PREFIX):
            hostile_board.play_agent({})(peer)
        ATTACKS["plainly"](peer)

    known = Tracker(tracker.host, tracker.port)
    with Store(tmp_path / "farm.db") as store, HostileBoard(attack) as board, registered(board, known):
        store.boards.register("n1", "jetson-nano", Ssh("n1", "farm"))
        for kind in (Kind.BACK, Kind.PROBE_PASSED):
            store.boards.observe("n1", kind, "test", decide_by(Observation(kind), HealthLimits()))
        prober = Prober(known, GoldenKernels(tmp_path), load_board_types(), "test")
        report = await_here(prober.probe(store, "n1"))
        assert (report.kind, report.health) == ("hostile", "quarantined")
        assert "attacked us" in store.boards.require("n1").health_reason
        for kind in (Kind.BACK, *[Kind.PROBE_PASSED] * 9):
            late = decide_by(Observation(kind), HealthLimits(cooldown_s=0.0))
            store.boards.observe("n1", kind, "test", late)
        assert store.boards.require("n1").health == "quarantined"


def returning(*values: bytes) -> bytes:
    return hostile_board.frame(hostile_board.RETURN, hostile_board.sequence(*values))


@pytest.mark.core
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (hostile_board.answer(b"{}"), "instead of text"),
        (returning(hostile_board.number(hostile_board.NONE), hostile_board.none()), "answered a NoneType"),
        (returning(*HUGE), "answered a Unread"),
        (hostile_board.answer('{"a":' * 100_000), "nested too deeply"),
        (hostile_board.answer(dataclasses.replace(GOOD, board="n2").to_json()), "'n2', not 'n1'"),
        (hostile_board.answer(dataclasses.replace(GOOD, simulated=True).to_json()), "simulated"),
    ],
)
def test_what_cannot_be_is_not_believed(data: bytes, says: str) -> None:
    """Any invalid answer becomes the farm's own error that names it."""
    with (
        answering(protocol.MEASURE, data) as board,
        BlockingSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match=says),
    ):
        session.measure(MeasureSpec(()), b"")


def test_a_number_is_not_taken_for_the_size_of_outputs() -> None:
    """Python makes a terabyte of zeros of the number that stands where a program's outputs belong."""
    number = returning(hostile_board.number(hostile_board.INT), hostile_board.number(10**12))
    with (
        answering(protocol.RUN_MODEL, number) as board,
        BlockingSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match="answered a int"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL), b"", {})


@pytest.mark.parametrize("archive", [hostile_board.nested_npz(64, 1 << 18), hostile_board.repeated_npz(1000, 9)])
def test_outputs_that_become_more_than_they_are_are_an_attack(archive: bytes) -> None:
    """The session is over, and the board is to be quarantined as one that had us call functions."""
    sent = hostile_board.answer(protocol.pack_frame(GOOD.to_json(), archive))
    with (
        answering(protocol.RUN_MODEL, sent) as board,
        BlockingSession(board, KEY) as session,
        pytest.raises(BoardHostileError, match="attacked us and was cut off: it sent an archive that names"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL), b"", {})


def drip(peer: Peer) -> None:
    """An answer in pieces of a byte."""
    for byte in hostile_board.answer(PowerTrace(None, board="n1").to_json()):
        peer.send(bytes([byte]))
        select.select([], [], [], 0.05)


@pytest.mark.core
@pytest.mark.parametrize(
    ("behave", "error", "says"),
    [
        (drip, DeadlineError, "did not answer"),
        (lambda peer: None, DeadlineError, "did not answer"),
        (lambda peer: peer.send(hostile_board.frame(hostile_board.SHUTDOWN)), BoardLostError, "hung up"),
        (lambda peer: peer.send(hostile_board.answer("{}")[:20]) or peer.sock.close(), BoardLostError, "hung up"),
        (lambda peer: peer.send(struct.pack("<Qi", 1 << 63, hostile_board.RETURN)), BoardHostileError, "a frame of"),
        (lambda peer: peer.send(2 * hostile_board.answer("{}")), InvalidReplyError, "PowerTrace lacks"),
        (lambda peer: peer.send(hostile_board.frame(hostile_board.COPY_ACK)), InvalidReplyError, "answered a Unread"),
    ],
    ids=["drip", "silence", "goodbye", "cut", "2**63", "two", "copy"],
)
def test_a_call_ends_by_its_deadline_and_says_why(
    behave: Callable[[Peer], Any], error: type[FarmError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends that session alone; a second call there fails, also after an answer that came twice."""
    monkeypatch.setattr(farm_session, "_CALL_GRACE_S", 0.5)

    def play(peer: Peer) -> None:
        peer.greet()
        answers = {DESCRIBE: hostile_board.answer(hostile_board.DESCRIPTION.to_json())}
        known = {name: functools.partial(Peer.send, data=data) for name, data in answers.items()}
        peer.serve({**known, protocol.POWER: behave})

    with HostileBoard(play) as board, BlockingSession(AgentAddress(board.host, board.port), KEY) as session:
        with pytest.raises(error, match=says):
            session.power(PowerSpec(0.05))
        with pytest.raises((BoardLostError, BoardHostileError)):
            session.power(PowerSpec(0.05))


def test_a_functions_handle_is_any_number_of_the_boards() -> None:
    """It is given back as it came; what cannot be one harms the board alone."""
    called = list[bytes]()

    def play(peer: Peer) -> None:
        peer.greet()
        handle = returning(hostile_board.number(-5, hostile_board.POINTER))
        for data in (hostile_board.void(), handle, hostile_board.answer("{}")):
            called.append(peer.read_frame()[1][:8])
            peer.send(data)

    async def work(board: HostileBoard) -> None:
        wire = await Wire.connect(board.host, board.port, "")
        assert await wire.call("x") == "{}"

    with HostileBoard(play) as board:
        anyio.run(work, board)
    assert called[-1] == struct.pack("<q", -5)


def test_outputs_that_nobody_asked_for_are_not_read() -> None:
    """A board that is to time a program alone sends nothing beside its figures."""
    sent = hostile_board.answer(protocol.pack_frame(GOOD.to_json(), pack_arrays({"out_000": np.zeros(4)})))
    with (
        answering(protocol.RUN_MODEL, sent) as board,
        BlockingSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match="that were not requested"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL, return_outputs=False), b"", {})


def test_tvms_own_server_answers_us(tmp_path: pathlib.Path) -> None:
    """Its functions take text and bytes, in pieces of any size; an error has its text, and the session goes on."""
    data = random.Random(1).randbytes(3 << 20)

    async def work(port: int) -> None:
        wire = await Wire.connect("127.0.0.1", port, "")
        assert await wire.call("tvm.rpc.server.upload", "big", data) is None
        assert await wire.call("tvm.rpc.server.download", "big") == data
        for function, argument in (("tvm.rpc.server.download", "nowhere"), ("farm_tests.nothing", "")):
            with pytest.raises(RemoteError, match=argument or function):
                await wire.call(function, argument)
        assert isinstance(await wire.call("tvm.rpc.server.workpath", ""), str)
        assert wire.sent_bytes > len(data)
        await wire.aclose()
        with pytest.raises(HungUpError):
            await wire.call("tvm.rpc.server.workpath", "")

    with stock_board(tmp_path) as port:
        wait_until(lambda: listens(port), "the server")
        anyio.run(work, port)


async def _fuzz(board: HostileBoard) -> None:
    with anyio.move_on_after(0.5), contextlib.suppress(HungUpError, RefusedError):
        wire = await Wire.connect(board.host, board.port, "")
        for _ in range(4):
            with contextlib.suppress(RemoteError):
                await wire.call("device_agent.describe", "x")


def test_fuzz_mutated_frames_do_the_client_no_harm() -> None:
    """Anything that a board sends is an answer or one of the wire's own errors, or is cut at its deadline."""
    seeds = iter(fuzzing.each(60))
    frames = [*ANSWERS.values(), *REFUSED.values()]

    def behave(peer: Peer) -> None:
        rng = next(seeds)
        data = hostile_board.GREETING + hostile_board.void()
        if rng.random() < 0.2:
            data = fuzzing.mutate_bytes(data, rng)
        while True:
            peer.send(data)
            if rng.random() < 0.1:
                return
            peer.read_frame()
            data = rng.choice(frames)
            if rng.random() < 0.7:
                data = fuzzing.mutate_bytes(data, rng)
            elif rng.random() < 0.3:
                hostile_board.call_back(peer, "farm_tests.take_over")

    with HostileBoard(behave) as board:
        for _ in range(60 * fuzzing.ROUNDS):
            anyio.run(_fuzz, board)
    assert next(seeds, None) is None
