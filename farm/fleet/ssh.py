"""One SSH connection to a board: opened with a pinned host key and a user key, watched, with a deadline on every call.

What it carries is elsewhere: forwards in `tunnels.py`, files in `ssh_files.py`, coming back after a loss in
`board_link.py`. No child process is started here, so nobody's PR_SET_PDEATHSIG hangs on one of these threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import paramiko

from farm.errors import BoardLostError, DeadlineError, FarmError, PermanentError, TransientError
from farm.fleet import host_keys
from farm.fleet.host_keys import HostKey, KnownHosts
from farm.fleet.ssh_exec import Output, read_output
from farm.fleet.ssh_socket import WatchedSocket, open_socket
from farm.fleet.user_keys import load_user_key

# Key exchange and login take a busy Jetson Nano up to three seconds.
CONNECT_TIMEOUT_S = 15.0
CHANNEL_TIMEOUT_S = 5.0
# Silence of a dead peer is noticed after the first plus the second: 8 s.
KEEPALIVE_S = 2.0
SILENCE_S = 6.0
MAX_OUTPUT_BYTES = 1 << 20
_JOIN_S = 2.0
# sshd's MaxSessions is 10 by default; commands and SFTP count, forwards do not.
_MAX_SESSIONS = 8
# Strongest first. One family is offered at a time, since a server shows only one key per connection.
_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("ssh-ed25519",),
    ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ("rsa-sha2-512", "rsa-sha2-256"),
)

# paramiko prints tracebacks of what is raised here as an error of ours.
_LOG = "farm.fleet.ssh.paramiko"
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False

ServeChannel = Callable[[paramiko.Channel], None]


@dataclasses.dataclass(frozen=True)
class SshAddress:
    """Where a board's sshd is and who we are there. `host_key`: the pinned fingerprint, or empty for the file's."""

    host: str
    user: str
    key_file: Path
    port: int = 22
    host_key: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ExecResult(NamedTuple):
    """What a command ended with. `code` is 128 plus the signal's number where one ended it, as shells say."""

    code: int
    out: bytes
    err: bytes


class _Transport(paramiko.Transport):
    """Says when it has ended, however it ended."""

    def __init__(self, sock: WatchedSocket) -> None:
        super().__init__(sock)
        self.ended = threading.Event()
        self.on_end: Callable[[], None] = lambda: None
        self.set_log_channel(_LOG)

    def run(self) -> None:
        try:
            super().run()
        finally:
            # A timer of paramiko's, which would otherwise outlive a failed handshake.
            self.packetizer.complete_handshake()
            self.ended.set()
            self.on_end()


class SshConnection:
    """An authenticated connection. Thread-safe. `lost` is set once it has ended, `reason` says why."""

    def __init__(self, address: SshAddress, transport: _Transport, sock: WatchedSocket) -> None:
        """Use `connect`."""
        self.address = address
        self.reason = ""
        self.lost = threading.Event()
        self._transport = transport
        self._sock = sock
        self._closed = False
        self._serving: dict[int, ServeChannel] = {}
        # paramiko has one place for the answer to a global request.
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

        Raises UsageError (key file, fingerprint), DeadlineError (nobody answers, or hangs), TransientError (refused,
        no route, hung up), UnknownHostKeyError (nothing pinned), HostKeyError (another key), PermanentError (login
        refused).
        """
        deadline = time.monotonic() + timeout_s
        user_key = load_user_key(address.key_file)
        pins, kinds = _read_pins(address, known_hosts)
        transport, sock = _open_pinned(address, pins, kinds, deadline)
        try:
            _log_in(transport, address, user_key, deadline)
        except BaseException:
            _discard(transport, sock)
            raise
        return cls(address, transport, sock)

    @property
    def peer_name(self) -> str:
        """The board's sshd in its own words, for reports."""
        return self._transport.remote_version

    def open_to(self, port: int, timeout_s: float = CHANNEL_TIMEOUT_S) -> paramiko.Channel:
        """A channel to a port on the board's loopback. Raises TransientError, PermanentError, as `connect` else."""
        with self._translated(f"port {port} of the board", timeout_s):
            return self._transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=timeout_s
            )
        raise AssertionError  # unreachable: `_translated` swallows nothing

    def listen(self, port: int, serve: ServeChannel, timeout_s: float = CHANNEL_TIMEOUT_S) -> int:
        """Have the board listen on its loopback; `serve` gets each connection and must not block. Returns the port.

        `port` 0 lets the board choose. Raises TransientError where the port is taken there, BoardLostError.
        """
        # paramiko waits for this answer without a deadline.
        timer = threading.Timer(timeout_s, self._abort, (f"it did not answer a forward within {timeout_s:g} s",))
        timer.daemon = True
        with self._asking:
            timer.start()
            # Whoever waits for the port connects at once, maybe before the answer is read.
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
        """Run a command by the board's shell and wait for its end; a failing command is a result, not an error.

        Raises DeadlineError after `timeout_s` (the board ends the command soon after, by itself if we are gone),
        PermanentError where it prints more than `max_bytes` to either stream, BoardLostError.
        """
        deadline = time.monotonic() + timeout_s
        # sshd leaves a command running when its channel closes; only the board can be sure to end it.
        # The outer shell has to stay, to say of a signal what it says of one.
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

    @contextlib.contextmanager
    def session(self, what: str, timeout_s: float) -> Iterator[paramiko.Channel]:
        """A session channel, closed afterwards; at most eight at a time, since sshd refuses more than ten."""
        deadline = time.monotonic() + timeout_s
        if not self._sessions.acquire(timeout=timeout_s):
            raise DeadlineError(f"{what} had to wait for others on {self.address} for more than {timeout_s:g} s")
        try:
            left_s = max(0.01, min(CHANNEL_TIMEOUT_S, deadline - time.monotonic()))
            with self._translated(f"opening a channel for {what}", left_s):
                channel = self._transport.open_session(timeout=left_s)
            try:
                yield channel
            finally:
                with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                    channel.close()
        finally:
            self._sessions.release()

    def close(self, reason: str = "closed by us") -> None:
        """End it, and with it every channel. Safe to call twice and from any thread; blocks for 2 s at most."""
        self._closed = True
        self._abort(reason)
        for thread in (self._transport, self._keeper):
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def __enter__(self) -> SshConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abort(self, reason: str) -> None:
        self.reason = self.reason or reason
        _shut(self._sock)

    def _note_end(self) -> None:
        """Called on paramiko's thread, its last act."""
        if not self.reason:
            cause = self._transport.get_exception()
            self.reason = str(cause.args[-1]) if isinstance(cause, OSError) and cause.args else "the board hung up"
        self.lost.set()

    def _keep_alive(self) -> None:
        while not self.lost.wait(KEEPALIVE_S):
            if time.monotonic() - self._sock.heard_at < KEEPALIVE_S:
                continue
            with self._asking, contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._sock.expect_answer()
                # Refused by every server, which is an answer. Ends when the connection does, at the latest.
                self._transport.global_request("keepalive@openssh.com", wait=True)

    def _dispatch(self, channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]) -> None:
        """Called on paramiko's thread for each connection to a port that the board listens on for us."""
        serve = self._serving.get(server[1])
        if serve is not None:
            serve(channel)
        else:  # it came before `listen` had the answer; whoever connects tries again
            threading.Thread(target=channel.close, name="farm-ssh-refuse", daemon=True).start()

    def _require_alive(self) -> None:
        if not self._transport.is_active():
            # The thread says why in its last act.
            self.lost.wait(_JOIN_S)
            raise BoardLostError(f"the connection to {self.address} ended: {self.reason}")

    @contextlib.contextmanager
    def _translated(self, what: str, timeout_s: float) -> Iterator[None]:
        """Turn paramiko's errors into ours."""
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
            self._require_alive()
            if isinstance(error, TimeoutError) or "Timeout" in str(error):
                raise DeadlineError(f"{what} took more than {timeout_s:g} s on {self.address}") from error
            raise BoardLostError(f"{self.address} ended {what}: {error or type(error).__name__}") from error


def fetch_host_key(host: str, port: int = 22, timeout_s: float = CONNECT_TIMEOUT_S) -> HostKey:
    """The key that a board shows to somebody who knows none: for a person to confirm. Nobody logs in."""
    address = SshAddress(host, "", Path(), port)
    transport, sock = _exchange_keys(address, [kind for family in _FAMILIES for kind in family], timeout_s)
    try:
        return _shown_key(transport)
    finally:
        _discard(transport, sock)


def shorten(command: str) -> str:
    """A command as messages quote it: one line, 60 characters."""
    line = " ".join(command.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _read_pins(address: SshAddress, known_hosts: KnownHosts | None) -> tuple[list[str], set[str]]:
    """Pinned fingerprints and, where known, the types of their keys. The inventory's word goes before the file's."""
    if address.host_key:
        return [host_keys.require_fingerprint(address.host_key)], set()
    keys = known_hosts.find(address.host, address.port) if known_hosts else ()
    return [key.fingerprint for key in keys], {key.kind for key in keys}


def _open_pinned(
    address: SshAddress, pins: list[str], kinds: set[str], deadline: float
) -> tuple[_Transport, WatchedSocket]:
    """A transport whose host key is one of the pinned. A server has several keys and shows the type asked for."""
    # A known RSA key is of type ssh-rsa, whose signatures are named otherwise (RFC 8332).
    asked = {kind.replace("ssh-rsa", "rsa-sha2-512") for kind in kinds}
    families = sorted(_FAMILIES, key=lambda family: asked.isdisjoint(family))
    shown: list[HostKey] = []
    for family in families if pins else [tuple(kind for one in _FAMILIES for kind in one)]:
        try:
            transport, sock = _exchange_keys(address, family, deadline - time.monotonic())
        except paramiko.ssh_exception.IncompatiblePeer:
            continue
        key = _shown_key(transport)
        if key.fingerprint in pins:
            return transport, sock
        _discard(transport, sock)
        shown.append(key)
    if not shown:
        raise PermanentError(f"{address} has no host key of a type that is taken here", "ssh-keygen -A on the board.")
    if not pins:
        host_keys.require_pinned(str(address), shown[0], pins)
    raise host_keys.changed(str(address), shown, pins)


def _exchange_keys(address: SshAddress, kinds: Sequence[str], timeout_s: float) -> tuple[_Transport, WatchedSocket]:
    """Connect and agree on keys; nobody is logged in yet. Raises IncompatiblePeer where no host key is of `kinds`."""
    deadline = time.monotonic() + max(0.01, timeout_s)
    sock = open_socket(address.host, address.port, max(0.01, timeout_s), SILENCE_S)
    left_s = max(0.1, deadline - time.monotonic())
    transport = _Transport(sock)
    options = transport.get_security_options()
    options.key_types = tuple(kinds)
    transport.banner_timeout = transport.handshake_timeout = left_s
    try:
        transport.start_client(timeout=left_s)
        transport.get_remote_server_key()
    except paramiko.ssh_exception.IncompatiblePeer:
        _discard(transport, sock)
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        _discard(transport, sock)
        if deadline - time.monotonic() < 0.2:
            said = f"greeted ({transport.remote_version})" if transport.remote_version else "said nothing"
            raise DeadlineError(
                f"{address} took the connection and {said}, and nothing more within {timeout_s:.0f} s",
                "Its sshd hangs, or the board is out of memory; restart it if this stays.",
            ) from error
        if transport.remote_version:
            raise TransientError(f"{address} hung up during key exchange: {error or 'end of stream'}") from error
        raise TransientError(
            f"what listens at {address} hung up or is no SSH server: {error or 'end of stream'}",
            "Check the port; sshd also turns clients away while too many log in (MaxStartups).",
        ) from error
    except BaseException:
        _discard(transport, sock)
        raise
    return transport, sock


def _shown_key(transport: _Transport) -> HostKey:
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def _log_in(transport: _Transport, address: SshAddress, key: paramiko.PKey, deadline: float) -> None:
    """Public key only: no agent, no password, no question is ever tried."""
    transport.auth_timeout = max(0.1, deadline - time.monotonic())
    fingerprint = host_keys.fingerprint(key.asbytes())
    try:
        further = transport.auth_publickey(address.user, key)
    except (paramiko.SSHException, EOFError, OSError) as error:
        if deadline - time.monotonic() < 0.2:
            raise DeadlineError(f"{address} did not answer the login of {address.user!r} in time") from error
        if not transport.is_active():
            raise TransientError(f"{address} hung up during the login of {address.user!r}") from error
        raise PermanentError(
            f"{address} refuses the key {address.key_file} ({fingerprint}) for the user {address.user!r}",
            f"Put it there: ssh-copy-id -i {address.key_file} -p {address.port} {address.user}@{address.host}",
        ) from error
    if further:
        raise PermanentError(f"{address} wants more than a key from {address.user!r}: {', '.join(further)}")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _discard(transport: _Transport, sock: WatchedSocket) -> None:
    """End a transport that nobody got, thread and socket."""
    _shut(sock)
    transport.close()
    if transport.ident is not None:
        transport.join(_JOIN_S)
    sock.close()
