"""Boards that attack or lie: nothing of theirs runs here, nothing is believed, and the farm knows why they were cut."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from device_agent import protocol
from device_agent.listener.tracker import TrackerLink
from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, Status
from farm.connectivity.relay import Relay
from farm.connectivity.tracker import Tracker
from farm.crew.board_process import BoardHolder, Ended, Request, TimeKernel
from farm.crew.driven_board import DrivenBoard
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.crew.session_holder import Address
from farm.errors import BoardHostileError, InvalidReplyError, LeaseOverError
from farm.inventory.board_types import load_board_types
from farm.measure.arrays import pack_arrays
from farm.measure.asking import AgentAddress
from farm.measure.session import BoardSession
from farm.search import tvm_env
from farm.search.build.golden import GoldenKernels
from farm.services.probe import Prober
from farm.store import Store
from farm.values import Ssh
from tests import fuzzing, hostile_board
from tests.awaiting import await_here
from tests.hostile_board import HostileBoard, Peer
from tests.integration import candidates
from tests.integration.conftest import wait_until
from tests.integration.stock_board import stock_board

tvm_env.load()

KEY = "jetson-nano/n1"
called = threading.Event()
tvm_ffi.register_global_func("farm_tests.take_over", lambda _: called.set())
ATTACKS = dict(hostile_board.attacks("farm_tests.take_over"))
TAKE_OVER = hostile_board.frame(hostile_board.CALL, b"\x01" * 12)
GOOD = Outcome(Status.OK, latency_s=(1e-3,), board="n1")


@contextlib.contextmanager
def answering(function: str, data: bytes) -> Iterator[AgentAddress]:
    """Where an agent listens that is in order, but for the answer of one function."""
    with HostileBoard(hostile_board.play_agent({function: data})) as board:
        yield AgentAddress(board.host, board.port)


@pytest.mark.core
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_board_cannot_call_the_client(attack: str) -> None:
    """TVM's client trusts the server; the relay lets nothing but answers pass, and says so."""
    from tvm import rpc

    called.clear()
    with HostileBoard(ATTACKS[attack]) as board, Relay(board.host, board.port) as relay:
        with contextlib.suppress(Exception):
            session = rpc.connect(*relay.address)
            for _ in range(3):  # what was left over of one answer is read with the next
                with contextlib.suppress(Exception):
                    session.get_function("x")
        assert relay.refused
    assert not called.is_set()


def test_a_session_says_that_it_was_attacked() -> None:
    """From the first connection on, and in the middle of work."""
    with HostileBoard(ATTACKS["plainly"]) as board, pytest.raises(BoardHostileError, match="code 2"):
        BoardSession(AgentAddress(board.host, board.port), KEY)
    with (
        answering(protocol.MEASURE, TAKE_OVER) as board,
        BoardSession(board, KEY) as session,
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
    """Its process reports it to the board's driver, which informs the farm and looks for another board."""
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
    holder = BoardHolder()
    with contextlib.closing(holder):
        request = Request(Address(direct, KEY, None), TimeKernel(MeasureSpec(()), b""), OperatingPoint(), 1.0)
        ended = holder.carry_out(1, request)
    assert ended is not None
    return ended


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
        prober.close()
        assert (report.kind, report.health) == ("hostile", "quarantined")
        assert "attacked us" in store.boards.require("n1").health_reason
        for kind in (Kind.BACK, *[Kind.PROBE_PASSED] * 9):
            late = decide_by(Observation(kind), HealthLimits(cooldown_s=0.0))
            store.boards.observe("n1", kind, "test", late)
        assert store.boards.require("n1").health == "quarantined"


def returning(*values: bytes) -> bytes:
    return hostile_board.frame(hostile_board.RETURN, hostile_board.sequence(*values))


HUGE = (hostile_board.number(70), hostile_board.tensor(1 << 40), hostile_board.number(1, hostile_board.POINTER))


@pytest.mark.core
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (hostile_board.answer(b"{}"), "instead of text"),
        (returning(hostile_board.number(hostile_board.NONE), hostile_board.none()), "answered a NoneType"),
        (returning(*HUGE), "answered a Tensor"),
        (hostile_board.answer('{"a":' * 100_000), "nested too deeply"),
        (hostile_board.answer(dataclasses.replace(GOOD, board="n2").to_json()), "'n2', not 'n1'"),
        (hostile_board.answer(dataclasses.replace(GOOD, simulated=True).to_json()), "simulated"),
    ],
)
def test_what_cannot_be_is_not_believed(data: bytes, says: str) -> None:
    """Any invalid answer becomes the farm's own error that names it."""
    with (
        answering(protocol.MEASURE, data) as board,
        BoardSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match=says),
    ):
        session.measure(MeasureSpec(()), b"")


def test_a_number_is_not_taken_for_the_size_of_outputs() -> None:
    """Python makes a terabyte of zeros of the number that stands where a program's outputs belong."""
    number = returning(hostile_board.number(hostile_board.INT), hostile_board.number(10**12))
    with (
        answering(protocol.RUN_MODEL, number) as board,
        BoardSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match="answered a int"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL), b"", {})


@pytest.mark.parametrize("archive", [hostile_board.nested_npz(64, 1 << 18), hostile_board.repeated_npz(1000, 9)])
def test_outputs_that_become_more_than_they_are_are_an_attack(archive: bytes) -> None:
    """The session is over, and the board is to be quarantined as one that had us call functions."""
    sent = hostile_board.answer(protocol.pack_frame(GOOD.to_json(), archive))
    with (
        answering(protocol.RUN_MODEL, sent) as board,
        BoardSession(board, KEY) as session,
        pytest.raises(BoardHostileError, match="attacked us and was cut off: it sent an archive that names"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL), b"", {})


def test_outputs_that_nobody_asked_for_are_not_read() -> None:
    """A board that is to time a program alone sends nothing beside its figures."""
    sent = hostile_board.answer(protocol.pack_frame(GOOD.to_json(), pack_arrays({"out_000": np.zeros(4)})))
    with (
        answering(protocol.RUN_MODEL, sent) as board,
        BoardSession(board, KEY) as session,
        pytest.raises(InvalidReplyError, match="that were not requested"),
    ):
        session.run_model(protocol.RunSpec(protocol.Engine.KERNEL, return_outputs=False), b"", {})


# TVM's own client holds the interpreter while it copies: it cannot share a process with the relay.
_STOCK_SCRIPT = """
import pathlib, sys
import numpy as np
import tvm
from tvm import rpc

host, port, path, size = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4])
remote = rpc.connect(host, port)
remote.upload(str(path))
module = remote.load_module(path.name)
device = remote.cpu()
a, b = (np.random.default_rng(seed).random((size, size), "float32") for seed in (1, 2))
arrays = [tvm.runtime.tensor(value, device) for value in (a, b, np.zeros((size, size), "float32"))]
assert len(module.time_evaluator("main", device, number=1, repeat=2)(*arrays).results) == 2
np.testing.assert_allclose(arrays[2].numpy(), a @ b, rtol=1e-3)
assert bytes(remote.download(path.name)) == path.read_bytes()
try:
    remote.load_module("nowhere.so")
except Exception as error:
    assert "nowhere" in str(error)
    print("as ever")
"""


def test_a_stock_board_works_through_the_relay(tmp_path: pathlib.Path, matmul: bytes) -> None:
    """All that TVM's own server answers a stock script passes: modules, tensors, timings, errors, copies of bytes."""
    (tmp_path / "matmul.so").write_bytes(matmul)
    with stock_board(tmp_path) as port:
        wait_until(lambda: _listens(port), "the server")
        with Relay("127.0.0.1", port) as relay:
            script = [sys.executable, "-c", _STOCK_SCRIPT, *map(str, relay.address), str(tmp_path / "matmul.so")]
            done = subprocess.run([*script, str(candidates.SIZE)], capture_output=True, text=True, timeout=100)
            assert done.stdout == "as ever\n", done.stderr[-3000:]
            assert relay.refused == ""


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


_FUZZ = """
import sys, threading
import tvm_ffi
from tvm import rpc
from farm.connectivity.relay import Relay
from tests import fuzzing, hostile_board
from tests.hostile_board import HostileBoard, Peer
from tests.unit.test_frames import ANSWERS, REFUSED

called = threading.Event()
tvm_ffi.register_global_func("farm_tests.take_over", lambda _: called.set())
seeds = iter(fuzzing.each(int(sys.argv[1])))

def behave(peer: Peer) -> None:
    rng = next(seeds)
    greeting, void = hostile_board.GREETING, hostile_board.void()
    frames = [*ANSWERS.values(), *REFUSED.values()]
    while True:
        if greeting:
            data, greeting = greeting + void, b""
            if rng.random() < 0.2:
                data = fuzzing.mutate_bytes(data, rng)
        else:
            data = rng.choice(frames)
            if rng.random() < 0.7:
                data = fuzzing.mutate_bytes(data, rng)
            elif rng.random() < 0.3:
                hostile_board.call_back(peer, "farm_tests.take_over")
        peer.send(data)
        if rng.random() < 0.1:
            return
        peer.read_frame()

with HostileBoard(behave) as board:
    for _ in range(int(sys.argv[1]) * fuzzing.ROUNDS):
        with Relay(board.host, board.port) as relay:
            # A frame that promises more than comes would be waited for: the session's deadline, shortened.
            threading.Timer(0.5, relay.cut).start()
            kept = []  # until the cut: see BoardSession
            try:
                kept.append(rpc.connect(*relay.address))
                for _ in range(4):
                    kept.append(kept[0].get_function("device_agent.describe"))
                    kept.append(kept[-1]("x"))
            except Exception:
                pass
            relay.cut()
            del kept
    assert not called.is_set()
print("unharmed")
"""


def test_fuzz_mutated_frames_do_the_client_no_harm() -> None:
    """TVM's own client, behind the relay, is neither brought down nor taken over by anything that a board sends."""
    done = subprocess.run(
        [sys.executable, "-c", _FUZZ, "60"], capture_output=True, text=True, timeout=250 * fuzzing.ROUNDS
    )
    assert (done.returncode, done.stdout.split()) == (0, ["unharmed"]), done.stderr[-3000:]
