"""What runs out for a while, descriptors, threads, processes, ends nothing for good."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import paramiko
import pytest

from farm.connectivity.board_link import BoardLink
from farm.connectivity.services import ControlClient, ControlServer
from farm.connectivity.ssh_handshake import SshAddress
from farm.connectivity.tracker import Tracker
from farm.connectivity.tunnels import MAX_LINKS, Forward
from farm.errors import TransientError
from farm.processes import children, listening
from farm.services.probing import Probing
from farm.services.routes import VirtualRoute
from farm.settings import Settings
from farm.values import Virtual

PATIENCE_S = 20.0


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not 0: then even waiting for what is open fails (poll(2)).
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


@contextlib.contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        yield


def out_of_reach() -> None:
    """Stands for a board's connection that is not there."""
    raise TransientError("the board is out of reach")


def require_refusal(address: tuple[str, int]) -> None:
    """A client gets in, and is let go of, because the forward has no board."""
    with socket.create_connection(address, PATIENCE_S) as client:
        client.settimeout(PATIENCE_S)
        assert client.recv(1) == b""


def test_a_forward_outlives_a_lack_of_descriptors() -> None:
    """A client that comes meanwhile waits in the backlog; it, and the next, are served once there is room."""
    with Forward(out_of_reach, 1) as forward:  # type: ignore[arg-type]
        require_refusal(forward.address)
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        with client:
            with no_descriptors():
                client.connect(forward.address)
                time.sleep(2 * listening.PAUSE_S)
            assert client.recv(1) == b""
        require_refusal(forward.address)


def test_a_forward_outlives_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is let go of, and the next one is served."""
    with Forward(out_of_reach, 1) as forward:  # type: ignore[arg-type]
        with no_threads(monkeypatch):
            require_refusal(forward.address)
        errors = [forward.last_error]
        require_refusal(forward.address)
        errors.append(forward.last_error)
        assert [str(error) for error in errors] == ["None", "the board is out of reach"]
        assert len(forward) == 0


def test_a_forward_carries_so_many_and_no_more() -> None:
    """No client takes all descriptors through one board's forward; when one leaves there is room for another."""
    release = threading.Event()

    def wait_then_fail() -> None:
        release.wait(PATIENCE_S)
        raise TransientError("no board")

    with Forward(wait_then_fail, 1) as forward, contextlib.ExitStack() as stack:  # type: ignore[arg-type]
        for _ in range(MAX_LINKS):
            stack.enter_context(socket.create_connection(forward.address, PATIENCE_S))
        require_refusal(forward.address)
        assert len(forward) == MAX_LINKS
        release.set()


def test_the_control_socket_outlives_a_lack(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that ran out of descriptors or threads for a moment still answer."""
    server = ControlServer(tmp_path / "control", lambda verb, arguments: verb, lambda: None)
    client = ControlClient(str(tmp_path / "control"))
    try:
        sock = socket.socket(socket.AF_UNIX)
        with sock, no_descriptors():
            sock.connect(str(tmp_path / "control"))
            time.sleep(2 * listening.PAUSE_S)
        assert client.ask("status") == "status"
        with no_threads(monkeypatch), contextlib.suppress(Exception):
            client.ask("status", 1.0)
        assert client.ask("status") == "status"
    finally:
        server.close()


def test_a_link_without_descriptors_goes_on_trying(tmp_path: pathlib.Path) -> None:
    """That nothing can be opened here, be it its key, is no end of a board's link."""
    key = tmp_path / "key"
    paramiko.ECDSAKey.generate().write_private_key_file(str(key))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = BoardLink(SshAddress("127.0.0.1", "guest", key, listener.getsockname()[1]), connect_timeout_s=1.0)
        with no_descriptors(), link:
            deadline = time.monotonic() + PATIENCE_S
            while link.state.error is None and time.monotonic() < deadline:
                time.sleep(0.02)
            state = link.state
    assert isinstance(state.error, TransientError)
    assert not state.final


def test_what_cannot_be_started_is_no_process(tmp_path: pathlib.Path) -> None:
    """Any resource that the machine lacks raises an error of ours that a retry may repair. One that could not be
    started again is not taken for one that another process runs.
    """
    with pytest.raises(TransientError, match="cannot be started"), no_descriptors():
        children.start(["true"], tmp_path / "log", {})
    (tmp_path / "file").touch()
    with pytest.raises(TransientError, match="cannot be started"):
        children.start(["true"], tmp_path / "file" / "log", {})
    tracker = Tracker("127.0.0.1", 1, children.start(["sleep", "60"], pathlib.Path(os.devnull), os.environ))
    before = tracker.is_alive
    tracker.stop()
    assert (before, tracker.is_alive, Tracker("127.0.0.1", 1).is_alive) == (True, False, True)


def test_a_virtual_board_that_cannot_be_started_is_tried_again(tmp_path: pathlib.Path) -> None:
    """Its way says why it is down, and starts it once there is room."""
    way = VirtualRoute("v", "local", Virtual(0), ("127.0.0.1", 1), tmp_path)
    with no_descriptors():
        error = way.look().error
    assert "cannot be started" in error
    deadline = time.monotonic() + PATIENCE_S
    while way.look().error != "" and not way.starting and time.monotonic() < deadline:
        time.sleep(0.02)
    starting = way.starting
    way.close()
    assert starting


def test_a_probe_that_there_is_no_room_for_is_not_made_and_tried_again(tmp_path: pathlib.Path) -> None:
    """No board is found at fault for it, and once there is room boards are probed."""
    deferred: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    probing = Probing(Settings(home=str(tmp_path)), ("127.0.0.1", 1), deferred.put)
    try:
        probing.request("a")
        with no_descriptors():
            probing.step([], ["a"])
        assert "no board can be probed now" in probing.reports["a"]["reason"]
        assert not probing.busy
        answered = probing.request("a")
        probing.step([], ["a"])
        deferred.get(timeout=PATIENCE_S)()
        assert "no board 'a'" in answered.result(0.0)["reason"]
    finally:
        probing.close()


def test_the_limit_of_descriptors_is_raised() -> None:
    """To what the system allows, and never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
        listening.raise_descriptor_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == min(listening.DESCRIPTORS, hard if hard != resource.RLIM_INFINITY else listening.DESCRIPTORS)
        listening.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
