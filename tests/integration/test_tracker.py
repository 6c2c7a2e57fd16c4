"""TVM's tracker as a child process, and our client of it against trackers that are busy, dead, frozen or none."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import anyio
import psutil
import pytest

from farm.connectivity import tracker as farm_tracker
from farm.connectivity.tracker import Tracker
from farm.errors import DeadlineError, TransientError, UnavailableError
from tests.integration.conftest import wait_until
from tests.ports import find_free_port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    tracker = Tracker.start(find_free_port(), tmp_path_factory.mktemp("tracker") / "tracker.log")
    yield tracker
    tracker.stop()


def test_a_busy_port_is_skipped(running: Tracker, tmp_path: pathlib.Path) -> None:
    """A second tracker takes the next free port and both serve."""
    second = Tracker.start(running.port, tmp_path / "tracker.log")
    try:
        assert running.port < second.port <= running.port + farm_tracker.LAST_PORT_OFFSET
        assert anyio.run(second.fetch_summary)["queue_info"] == {}
        assert running.is_alive
    finally:
        second.stop()


def test_no_free_port_is_said(tmp_path: pathlib.Path) -> None:
    """Where ten ports in a row are taken, the error names them and the setting."""
    first = 65526
    held = []
    try:
        for port in range(first, 65536):
            sock = socket.socket()
            held.append(sock)
            sock.bind(("127.0.0.1", port))
            sock.listen()
        with pytest.raises(UnavailableError, match="in use") as caught:
            Tracker.start(first, tmp_path / "tracker.log")
        assert "FARM_TRACKER_PORT" in caught.value.hint
    finally:
        for sock in held:
            sock.close()


def test_a_request_ends_at_its_deadline(running: Tracker) -> None:
    """No board of that key: the error says which and how long was waited."""
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"local/absent.*0\.3 s"):
        anyio.run(running.request, "local/absent", 0.3)
    assert time.monotonic() - started < 3


def test_a_request_that_gave_up_takes_no_board(running: Tracker) -> None:
    """After its deadline a request leaves nothing behind that would swallow the next free board."""
    with pytest.raises(DeadlineError):
        anyio.run(running.request, "local/late", 0.2)
    found = anyio.run(running.fetch_summary)
    assert (found["queue_info"].get("local/late", {}).get("free", 0), found["server_info"]) == (0, [])


def test_a_dead_tracker_is_transient(tmp_path: pathlib.Path) -> None:
    """Killed: it is known to be dead, and calls end at once with an error that may be retried."""
    tracker = Tracker.start(find_free_port(), tmp_path / "tracker.log")
    process = tracker._process
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not tracker.is_alive, "the tracker's end")
    with pytest.raises(TransientError, match="does not answer"):
        anyio.run(tracker.fetch_summary)
    with pytest.raises(TransientError, match="does not answer"):
        anyio.run(tracker.request, "local/x", 1.0)
    tracker.stop()


def test_a_frozen_tracker_is_transient(tmp_path: pathlib.Path) -> None:
    """Stopped with SIGSTOP: a call ends at its deadline."""
    tracker = Tracker.start(find_free_port(), tmp_path / "tracker.log")
    try:
        process = tracker._process
        os.killpg(process.pid, signal.SIGSTOP)
        with pytest.raises(TransientError, match="does not answer"):
            anyio.run(tracker.fetch_summary, 0.3)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        tracker.stop()


def test_stopping_leaves_no_process(tmp_path: pathlib.Path) -> None:
    """The tracker's own helper process ends with it."""
    tracker = Tracker.start(find_free_port(), tmp_path / "tracker.log")
    process = tracker._process
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    tracker.stop()
    tracker.stop()
    assert not psutil.wait_procs(family, timeout=10)[1]


def serve_once(answer: bytes) -> tuple[str, int]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4)
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    host, port = listener.getsockname()
    return host, port


def test_something_else_listens() -> None:
    """A server of another kind is not taken for a tracker."""
    with pytest.raises(UnavailableError, match="not a TVM tracker"):
        anyio.run(Tracker(*serve_once(b"HTTP/1.1 400 Bad Request\r\n\r\n")).fetch_summary)


@pytest.mark.parametrize("rest", [b"\xff\xff\xff\x7f", b"\x02\x00\x00\x00{]"], ids=["length", "json"])
def test_a_tracker_that_answers_nonsense(rest: bytes) -> None:
    """Garbage after the greeting is an error of the farm's own, not a crash or an endless read."""
    greeting = (0x2F271).to_bytes(4, "little")
    with pytest.raises(TransientError, match=r"does not answer|nonsense"):
        anyio.run(Tracker(*serve_once(greeting + rest)).fetch_summary)
