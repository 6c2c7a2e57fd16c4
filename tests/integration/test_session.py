"""A board's session against real agents: overruns, deaths and foreign servers at the other end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import Engine, Limits, MeasureSpec, RunSpec, Status, TensorSpec
from farm.connectivity.tracker import Tracker
from farm.errors import BoardLostError, DeadlineError
from farm.measure import session as farm_session
from farm.measure.blocking import BlockingSession
from tests.integration import candidates
from tests.integration.conftest import PATIENCE_S, wait_until

pytestmark = pytest.mark.core

SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")


def spec(entry: str = "main", timeout_s: float = 10.0) -> MeasureSpec:
    return MeasureSpec((SHAPE,) * 3, entry=entry, limits=Limits(timeout_s=timeout_s, threads=1))


def test_a_kernel_runs_on_given_arrays(client: Tracker, agent: Any, matmul: bytes) -> None:
    """What comes back is what NumPy computes, in the order of the arguments."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(SHAPE.shape).astype("float32") for _ in range(2))
    with BlockingSession(client, agent.key) as session:
        run = RunSpec(Engine.KERNEL, limits=Limits(threads=1))
        outcome, outputs = session.run_model(run, matmul, {"a": a, "b": b, "c": np.zeros_like(a)})
    assert outcome.status is Status.OK
    assert np.abs(list(outputs.values())[-1] - a @ b).max() < 1e-4


def test_a_program_travels_once(client: Tracker, agent: Any, matmul: bytes) -> None:
    """Rounds and sweeps run the same one again and again: all but the first run send its inputs alone."""
    program = matmul + bytes(4 * farm_session.LEAST_BYTES)
    arrays = {name: np.ones(SHAPE.shape, "float32") for name in "abc"}
    run = RunSpec(Engine.KERNEL, limits=Limits(threads=1))
    with BlockingSession(client, agent.key) as session:
        marks = [session.sent_bytes]
        for _ in range(3):
            outcome, outputs = session.run_model(run, program, arrays)
            assert outcome.status is Status.OK, outcome.message
            marks.append(session.sent_bytes)
    first, second, third = (after - before for before, after in itertools.pairwise(marks))
    assert first > len(program)
    assert second == third < 100_000
    assert float(list(outputs.values())[-1][0, 0]) == SHAPE.shape[0]


def test_an_overrun_raises_and_the_next_session_works(
    client: Tracker, agent: Any, bad: bytes, matmul: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board that does not answer in time is cut off; once its own deadline has passed it serves again."""
    monkeypatch.setattr(farm_session, "_CALL_GRACE_S", -1.5)
    with BlockingSession(client, agent.key) as session:
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"device_agent\.measure within 0\.5 s"):
            session.measure(spec("loops", timeout_s=2.0), bad)
        assert time.monotonic() - started < 1.9
    monkeypatch.undo()
    with BlockingSession(client, agent.key, PATIENCE_S) as session:
        assert session.measure(spec(), matmul).status is Status.OK


def test_an_upload_that_a_board_does_not_take_is_told_from_a_slow_answer(
    client: Tracker, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is stopped takes no more than buffers hold; its upload's deadline comes before the call's."""
    monkeypatch.setattr(farm_session, "_UPLOAD_GRACE_S", 0.2)
    monkeypatch.setattr(farm_session, "_SLOWEST_BYTES_PER_S", 1e8)
    with BlockingSession(client, agent.key) as session:
        family = agent.descendants()
        for process in family:
            process.suspend()
        try:
            with pytest.raises(DeadlineError, match=r"did not take the upload of 67108864 bytes within 0\.9 s"):
                session.measure(spec(), bytes(64 << 20))
        finally:
            for process in family:
                process.resume()
    with BlockingSession(client, agent.key, PATIENCE_S) as session:
        assert session.description.board_type == "local"


def test_a_killed_agent_is_a_lost_board(
    client: Tracker, tracker: Any, start_agent: Callable[..., Any], bad: bytes
) -> None:
    """Kill -9 of the whole agent in the middle of a measurement ends the call at once, as the board's fault."""
    agent = start_agent("--tracker", f"{tracker.host}:{tracker.port}")
    with BlockingSession(client, agent.key) as session:
        family = [*agent.descendants()]

        def kill() -> None:
            wait_until(lambda: agent.session_files("busy"), "the candidate to loop")
            for process in [*family, *agent.descendants()]:
                if process.is_running():
                    process.kill()
            agent.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(BoardLostError, match="hung up"):
            session.measure(spec("loops", timeout_s=20.0), bad)
        assert time.monotonic() - started < 15
        killer.join()
        agent.process.wait(PATIENCE_S)


def test_closing_twice_is_harmless(client: Tracker, agent: Any) -> None:
    """A closed session may be closed again, and the board is free for the next one."""
    session = BlockingSession(client, agent.key)
    session.close()
    session.close()
    BlockingSession(client, agent.key, PATIENCE_S).close()
