"""A board's session as its driver sees it: jobs in turn, taken back and cut, and a thousand sessions at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from device_agent.protocol import MEASURE, MeasureSpec, OperatingPoint, Outcome, Status
from farm.crew.held_board import Address, Ended, HeldBoard, Request, Session, measuring, opening
from farm.errors import DeadlineError, TransientError
from farm.measure.answers import AgentAddress
from tests import hostile_board
from tests.awaiting import await_here
from tests.hostile_board import HostileBoard

KEY = "jetson-nano/n1"
# Nothing listens there.
NOWHERE = Address(AgentAddress("127.0.0.1", 1), KEY, None)
GOOD = Outcome(Status.OK, latency_s=(1e-3,), board="n1")


@pytest.fixture
def held() -> Iterator[HeldBoard]:
    held = HeldBoard()
    yield held
    held.stop()
    held.stop()


def receive(job: Future[Ended]) -> object:
    return job.result(20.0).result


def test_jobs_are_taken_back_before_they_begin_and_while_they_run(held: HeldBoard) -> None:
    """The next one goes on; without a board it ends at once."""
    # The first job waits for a board that never answers, so that the second has not begun when it is taken back.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        absent = Address(AgentAddress(*silent.getsockname()), KEY, None)
        jobs = [held.ask(Request(absent, opening(60.0), OperatingPoint(), 60.0)) for _ in range(2)]
        for job in reversed(jobs):
            assert job.cancel()
        ended = await_here(held.call(Request(NOWHERE, opening(0.2))))
    assert isinstance(ended.result, TransientError)
    assert not isinstance(ended.result, DeadlineError)


def test_a_stopped_board_answers_nothing_more_and_is_let_go_of(held: HeldBoard) -> None:
    """The connection ends at once, also of a board that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = held.ask(Request(Address(AgentAddress(*silent.getsockname()), KEY, None), opening(60.0)))
        peer, _ = silent.accept()
        held.stop()
        with contextlib.closing(peer), contextlib.suppress(ConnectionResetError):
            peer.settimeout(20.0)
            while peer.recv(100):
                pass
        assert job.cancelled()


def test_a_bug_in_a_job_is_raised(held: HeldBoard) -> None:
    """It is no fault of the board: the engine ends with it."""

    async def buggy(session: Session) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        receive(held.ask(Request(NOWHERE, buggy)))


def test_hundreds_of_boards_measure_at_once() -> None:
    """They need no process and no thread each, and a silent one holds up none."""
    agent = hostile_board.play_agent({MEASURE: hostile_board.answer(GOOD.to_json())})
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(HostileBoard(agent))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        fleet = [HeldBoard() for _ in range(201)]
        for each in fleet:
            stack.callback(each.stop)
        mute = fleet.pop().ask(Request(Address(AgentAddress(*silent.getsockname()), KEY, None), opening(60.0)))
        where = Address(AgentAddress(board.host, board.port), KEY, None)
        request = Request(where, measuring(MeasureSpec(()), b"x" * 50_000), OperatingPoint(), 5.0)
        jobs = [each.ask(request) for each in fleet]
        assert [receive(job) for job in jobs] == [GOOD] * len(fleet)
        assert not mute.done()
