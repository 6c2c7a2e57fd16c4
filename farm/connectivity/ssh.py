"""One SSH connection to a board: opened with a pinned host key and a user key, watched, with a deadline on every call.

Forwards are in `tunnels.py`, files in `ssh_files.py`, reconnection in `board_link.py`. This module starts no child
process, so that no PR_SET_PDEATHSIG depends on its threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import paramiko

from farm.closing import Closing
from farm.connectivity import ssh_handshake
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh_handshake import CONNECT_TIMEOUT_S, JOIN_S, SshAddress, Transport, hang_up
from farm.connectivity.ssh_socket import WatchedSocket
from farm.errors import BoardLostError, DeadlineError, FarmError, PermanentError, TransientError

_CHUNK = 1 << 16
# A background program may hold the output open for ever after the command has ended.
_LINGER_S = 0.5
# Far more than arrives between two reads; a board that sends more is cut off.
_PASSED_BYTES = 64 << 20

# For sshd to open a channel or a forward.
CHANNEL_TIMEOUT_S = 5.0
# A dead peer is noticed after this plus `SILENCE_S`: 8 s.
KEEPALIVE_S = 2.0
MAX_OUTPUT_BYTES = 1 << 20
# sshd's MaxSessions is 10 by default; commands and SFTP count, forwards do not.
_MAX_SESSIONS = 8
_FULL_PAUSE_S = 0.1
ServeChannel = Callable[[paramiko.Channel], None]


@dataclasses.dataclass
class Output:
    """`code` is None where the connection ended first."""

    code: int | None
    out: bytes
    err: bytes


def read_output(channel: paramiko.Channel, deadline: float, max_bytes: int) -> Output:
    """Read until the command and its output have ended. `deadline` is monotonic.

    Raises TimeoutError, and PermanentError for a stream longer than `max_bytes`.
    """
    out, err = bytearray(), bytearray()
    ended_at: float | None = None
    # Not `select`, which takes no descriptor above 1023: a coordinator of many boards has more.
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        # Checked first, so that output before the end is still read.
        ended = channel.exit_status_ready()
        closed = channel.closed or channel.eof_received
        moved = _drain(channel, out, err, max_bytes)
        now = time.monotonic()
        if ended and ended_at is None:
            ended_at = now
        if (ended or channel.closed) and not moved:
            if closed or (ended_at is not None and now - ended_at > _LINGER_S):
                break
        elif now > deadline:
            raise TimeoutError
        if closed:
            # No more output; the descriptor stays readable.
            channel.status_event.wait(max(0.0, min(0.1, deadline - now)))
        else:
            poll.poll(10 if ended else max(0, min(100, int(1000 * (deadline - now)))))
    return Output(_exit_code(channel), bytes(out), bytes(err))


def pass_output(channel: paramiko.Channel, take: Callable[[bytes, bytes], None]) -> int | None:
    """Pass both streams to `take` as they arrive, until the command has ended; return its exit code, None if the
    connection ended first.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ended = channel.exit_status_ready() or channel.closed
        out, err = bytearray(), bytearray()
        _drain(channel, out, err, _PASSED_BYTES)
        if out or err:
            take(bytes(out), bytes(err))
        elif ended:
            return _exit_code(channel)
        poll.poll(200)


def _drain(channel: paramiko.Channel, out: bytearray, err: bytearray, max_bytes: int) -> bool:
    moved = False
    for ready, receive, data in (
        (channel.recv_ready, channel.recv, out),
        (channel.recv_stderr_ready, channel.recv_stderr, err),
    ):
        while ready():
            data += receive(_CHUNK)
            moved = True
            if len(data) > max_bytes:
                raise PermanentError(f"the command printed more than {max_bytes} bytes", "Send its output to a file.")
    return moved


def _exit_code(channel: paramiko.Channel) -> int | None:
    if not channel.exit_status_ready():
        return None
    code = channel.recv_exit_status()
    # paramiko reports a missing status, of a killed command or a lost connection, as -1.
    return code if code >= 0 else None


class ExecResult(NamedTuple):
    """A command's result. `code` is 128 plus the signal's number for a killed one, as in shells."""

    code: int
    out: bytes
    err: bytes


class SshConnection(Closing):
    """An authenticated connection. Thread-safe. `lost` is set once it has ended, with the `reason`."""

    def __init__(self, address: SshAddress, transport: Transport, sock: WatchedSocket) -> None:
        """Use `connect`."""
        self.address = address
        self.reason = ""
        self.lost = threading.Event()
        self._transport = transport
        self._sock = sock
        self._closed = False
        self._serving: dict[int, ServeChannel] = {}
        # paramiko stores one answer to a global request at a time.
        self._asking = threading.Lock()
        self._sessions = threading.BoundedSemaphore(_MAX_SESSIONS)
        transport.on_end = self._note_end
        if transport.ended.is_set():
            self._note_end()
        self._keeper = threading.Thread(target=self._keep_alive, name="farm-ssh-keepalive", daemon=True)
        self._keeper.start()

    @classmethod
    def connect(
        cls, address: SshAddress, known_hosts: KnownHosts | None = None, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> SshConnection:
        """Connect, check the host key, then log in with the user key and nothing else.

        Raises UsageError (key file, fingerprint), DeadlineError (no answer, or hangs), TransientError (refused, no
        route, hung up), UnknownHostKeyError (none pinned), HostKeyError (another key), PermanentError (login refused).
        """
        transport, sock = ssh_handshake.log_in(address, known_hosts, timeout_s)
        return cls(address, transport, sock)

    @property
    def peer_name(self) -> str:
        """The version string of the board's sshd."""
        return self._transport.remote_version

    def open_to(self, port: int) -> paramiko.Channel:
        """Open a channel to a loopback port of the board. Raises TransientError, PermanentError, else as `connect`."""
        with self._translated(f"port {port} of the board", CHANNEL_TIMEOUT_S):
            return self._transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=CHANNEL_TIMEOUT_S
            )
        raise AssertionError  # unreachable: `_translated` never swallows an exception

    def listen(self, port: int, serve: ServeChannel, timeout_s: float = CHANNEL_TIMEOUT_S) -> int:
        """Make the board listen on its loopback; `serve` gets each connection and must not block. Returns the port.

        `port` 0 lets the board choose. Raises TransientError for a taken port, BoardLostError.
        """
        # paramiko waits for this answer without a deadline.
        timer = threading.Timer(timeout_s, self._abort, (f"it did not answer a forward within {timeout_s:g} s",))
        timer.daemon = True
        with self._asking:
            timer.start()
            # A program on the board may connect at once, even before the answer is read.
            self._serving[port] = serve
            try:
                self._sock.expect_answer()
                got = self._transport.request_port_forward("127.0.0.1", port, self._dispatch)
            except paramiko.SSHException as error:
                self._require_alive()
                raise TransientError(
                    f"{self.address} refused to listen on its port {port} for us",
                    "Another program or an earlier connection has the port, or its sshd_config forbids "
                    "AllowTcpForwarding.",
                ) from error
            finally:
                timer.cancel()
        self._require_alive()
        self._serving[got] = serve
        return int(got)

    def exec(self, command: str, timeout_s: float, max_bytes: int = MAX_OUTPUT_BYTES) -> ExecResult:
        """Run a command in the board's shell and wait for its end; a failing command is a result, not an error.

        Raises DeadlineError after `timeout_s` (the board then ends the command, even without this process),
        PermanentError if it prints more than `max_bytes` to either stream, BoardLostError.
        """
        deadline = time.monotonic() + timeout_s
        # sshd leaves a command running when its channel closes, so the board must end it. The outer shell stays, to
        # turn a signal into an exit code.
        wrapped = f"timeout -k 2 {int(timeout_s) + 2} sh -c {shlex.quote(command)}; exit $?"
        what = f"the command {shorten(command)!r}"
        with self.session(what, timeout_s) as channel, self._translated(what, timeout_s):
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            channel.exec_command(wrapped)
            channel.shutdown_write()
            output: Output = read_output(channel, deadline, max_bytes)
            if output.code is None:
                self._require_alive()
                raise BoardLostError(f"{self.address} ended {what} without a result")
            return ExecResult(output.code, output.out, output.err)
        raise AssertionError

    def stream(self, command: str, take: Callable[[bytes, bytes], None], start_timeout_s: float) -> int:
        """Run a command in the board's shell and pass both output streams to `take` as they arrive, for any duration;
        return its exit code. Its standard input ends with this call, or this process.

        Raises DeadlineError if it has not started within `start_timeout_s`, BoardLostError.
        """
        what = f"the command {shorten(command)!r}"
        with self.session(what, start_timeout_s) as channel, self._translated(what, start_timeout_s):
            channel.settimeout(start_timeout_s)
            channel.exec_command(f"sh -c {shlex.quote(command)}")
            code = pass_output(channel, take)
            if code is None:
                self._require_alive()
                raise BoardLostError(f"{self.address} ended {what} without a result")
            return code
        raise AssertionError

    @contextlib.contextmanager
    def session(self, what: str, timeout_s: float) -> Iterator[paramiko.Channel]:
        """A session channel, closed afterwards; at most eight at a time, since sshd refuses more than ten."""
        deadline = time.monotonic() + timeout_s
        if not self._sessions.acquire(timeout=timeout_s):
            raise DeadlineError(f"{what} had to wait for others on {self.address} for more than {timeout_s:g} s")
        try:
            channel = self._open(f"opening a channel for {what}", deadline)
            try:
                yield channel
            finally:
                with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                    channel.close()
        finally:
            self._sessions.release()

    def _open(self, what: str, deadline: float) -> paramiko.Channel:
        """Open a session channel. A busy sshd frees a session some time after it was closed: ask again for a while."""
        last = min(deadline, time.monotonic() + CHANNEL_TIMEOUT_S)
        while True:
            left_s = max(0.01, min(CHANNEL_TIMEOUT_S, deadline - time.monotonic()))
            with self._translated(what, left_s):
                try:
                    return self._transport.open_session(timeout=left_s)
                except paramiko.ChannelException as error:
                    if error.code != paramiko.common.OPEN_FAILED_CONNECT_FAILED or time.monotonic() > last:
                        raise
            time.sleep(_FULL_PAUSE_S)

    def close(self, reason: str = "closed by us") -> None:
        """End it with all channels. Idempotent and thread-safe; blocks for up to 2 s."""
        self._closed = True
        self._abort(reason)
        for thread in (self._transport, self._keeper):
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    def _abort(self, reason: str) -> None:
        self.reason = self.reason or reason
        hang_up(self._sock)

    def _note_end(self) -> None:
        """Record the end; paramiko's thread calls this last."""
        if not self.reason:
            cause = self._transport.get_exception()
            self.reason = str(cause.args[-1]) if isinstance(cause, OSError) and cause.args else "the board hung up"
        self.lost.set()

    def _keep_alive(self) -> None:
        while True:
            # Exactly when due, or a dead peer would be found up to one period later.
            due_s = self._sock.heard_at + KEEPALIVE_S - time.monotonic()
            if self.lost.wait(max(0.05, due_s)):
                return
            if due_s > 0:
                continue
            with self._asking, contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._sock.expect_answer()
                # Every server refuses it, which is an answer. Ends with the connection at the latest.
                self._transport.global_request("keepalive@openssh.com", wait=True)

    def _dispatch(self, channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]) -> None:
        """Serve a connection to a port that the board listens on; called on paramiko's thread."""
        serve = self._serving.get(server[1])
        if serve is not None:
            serve(channel)
        else:  # it came before `listen` had the answer; the client retries
            threading.Thread(target=channel.close, name="farm-ssh-refuse", daemon=True).start()

    def _require_alive(self) -> None:
        if not self._transport.is_active():
            # Its thread records the reason last.
            self.lost.wait(JOIN_S)
            raise BoardLostError(f"the connection to {self.address} ended: {self.reason}")

    @contextlib.contextmanager
    def _translated(self, what: str, timeout_s: float) -> Iterator[None]:
        """Translate paramiko's errors."""
        self._require_alive()
        try:
            yield
        except FarmError:
            raise
        except paramiko.ChannelException as error:
            if error.code == paramiko.common.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED:
                raise PermanentError(
                    f"{self.address} forbids {what}", "Its sshd_config needs AllowTcpForwarding and PermitOpen for it."
                ) from error
            raise TransientError(f"{self.address} cannot open {what}: {error.text}") from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            if isinstance(error, EOFError | ConnectionError):
                # The reading thread may not have noticed the end yet.
                self._abort("the board hung up")
                self.lost.wait(JOIN_S)
            self._require_alive()
            if isinstance(error, TimeoutError) or "Timeout" in str(error):
                raise DeadlineError(f"{what} took more than {timeout_s:g} s on {self.address}") from error
            raise BoardLostError(f"{self.address} ended {what}: {str(error) or type(error).__name__}") from error


def shorten(command: str) -> str:
    """Shorten a command for messages: one line, 60 characters."""
    line = " ".join(command.split())
    return line if len(line) <= 60 else line[:59] + "…"
