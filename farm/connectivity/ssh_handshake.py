"""The start of an SSH connection: TCP, key exchange, the pinned host key, the login with a user key.

Every step has a deadline, and every failure an error with advice. `ssh.py` continues from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import paramiko

from farm.connectivity import host_keys
from farm.connectivity.host_keys import MOST_KEYS, HostKey, KnownHosts, UserKey, load_user_keys
from farm.connectivity.ssh_socket import TCP_TIMEOUT_S, WatchedSocket, open_socket
from farm.errors import DeadlineError, FarmError, PermanentError, TransientError
from farm.processes.listening import start_thread

_CHUNK = 1 << 16

# Takes a thirtieth of a second between two local processes; not measured on a busy board, so generous.
CONNECT_TIMEOUT_S = 15.0
# How long a peer may stay silent after a request.
SILENCE_S = 6.0
JOIN_S = 2.0
# Strongest first. One family is offered at a time, since a server shows only one key per connection.
_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("ssh-ed25519",),
    ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ("rsa-sha2-512", "rsa-sha2-256"),
)
# paramiko prints tracebacks of exceptions raised here.
_LOG = "farm.connectivity.ssh.paramiko"


def carry(sock: socket.socket, channel: paramiko.Channel, on_end: Callable[[], None]) -> None:
    """Join and own both; `on_end` is called once after they are closed. Two threads carry, one each way."""
    ended = threading.Lock()

    def end() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            channel.close()
        if not ended.acquire(blocking=False):  # the other direction has ended: both are done
            sock.close()
            on_end()

    def pump(receive: Callable[[int], bytes], send: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := receive(_CHUNK):
                send(data)
        end()

    out, back = (sock.recv, channel.sendall), (channel.recv, sock.sendall)
    for name, (receive, send) in (("farm-ssh-jump-out", out), ("farm-ssh-jump-in", back)):
        if not start_thread(name, pump, receive, send):
            end()


logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


@dataclasses.dataclass(frozen=True)
class SshAddress:
    """A board's sshd and its login. `host_key`: the pinned fingerprint, or empty for the file's.

    Keys are pinned under `host`, the user's name for it; `endpoint` is the actual address if different. `jumps` are the
    hosts on the way, nearest first. Besides `key_file` there are `more_keys` and the keys of the `agent` at that
    socket; with `only_these_keys` only agent keys whose public half is in the files.
    """

    host: str
    user: str
    key_file: Path
    port: int = 22
    host_key: str = ""
    more_keys: tuple[Path, ...] = ()
    agent: str = ""
    only_these_keys: bool = False
    endpoint: str = ""
    jumps: tuple[SshAddress, ...] = ()

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def route(self) -> str:
        """Where the connection goes: login, address and port, the user's name for it, and the hosts on the way."""
        alias = f" ({self.host} in OpenSSH's configuration)" if self.endpoint else ""
        way = ", ".join(each.route for each in self.jumps)
        return f"{self.user}@{self.endpoint or self.host}:{self.port}{alias}" + (f" through {way}" if way else "")


class Transport(paramiko.Transport):
    """A transport that reports its end, in every case, and keeps to the host key of its first key exchange."""

    def __init__(self, sock: WatchedSocket) -> None:
        super().__init__(sock)
        self.ended = threading.Event()
        self.on_end: Callable[[], None] = lambda: None
        self.set_log_channel(_LOG)

    def _verify_key(self, host_key: bytes, sig: bytes) -> None:
        known = self.host_key
        super()._verify_key(host_key, sig)  # type: ignore[misc]  # the stubs lack it
        if known is not None and self.host_key != known:
            raise paramiko.SSHException("the host key changed in a later key exchange")

    def run(self) -> None:
        try:
            super().run()
        finally:
            # Stops paramiko's handshake timer, which would outlive a failed handshake.
            self.packetizer.complete_handshake()
            self.ended.set()
            self.on_end()


def log_in(address: SshAddress, known_hosts: KnownHosts | None, timeout_s: float) -> tuple[Transport, WatchedSocket]:
    """Connect, check the host key, log in. Raises as `SshConnection.connect`."""
    deadline = time.monotonic() + timeout_s
    keys = load_user_keys((address.key_file, *address.more_keys), address.agent, address.only_these_keys)
    pins, kinds = _read_pins(address, known_hosts)
    transport, sock = _open_pinned(address, pins, kinds, deadline, known_hosts)
    try:
        _show_user_keys(transport, address, keys, deadline)
    except BaseException:
        _discard(transport, sock)
        raise
    return transport, sock


def fetch_host_key(address: SshAddress, wanted: Collection[str] = (), known_hosts: KnownHosts | None = None) -> HostKey:
    """Fetch a board's host key without pinned ones, for a person to confirm. Does not log in there.

    With `wanted` fingerprints it requests each key type until one of those is shown; raises HostKeyError if none is. It
    logs in to the jump hosts; `known_hosts` has their keys.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    if wanted:
        transport, sock = _open_pinned(address, list(wanted), set(), deadline, known_hosts)
    else:
        kinds = [kind for family in _FAMILIES for kind in family]
        transport, sock = _exchange_keys(address, kinds, CONNECT_TIMEOUT_S, known_hosts)
    try:
        return _shown_key(transport)
    finally:
        _discard(transport, sock)


def _read_pins(address: SshAddress, known_hosts: KnownHosts | None) -> tuple[list[str], set[str]]:
    """Pinned fingerprints and, if known, the types of their keys. The inventory overrides the file."""
    if address.host_key:
        return [host_keys.require_fingerprint(address.host_key)], set()
    keys = known_hosts.find(address.host, address.port) if known_hosts else ()
    return [key.fingerprint for key in keys], {key.kind for key in keys}


def _open_pinned(
    address: SshAddress, pins: list[str], kinds: set[str], deadline: float, known_hosts: KnownHosts | None
) -> tuple[Transport, WatchedSocket]:
    """A transport with a pinned host key. A server has several keys and shows the requested type."""
    # Signatures of ssh-rsa keys have other names (RFC 8332).
    asked = {kind.replace("ssh-rsa", "rsa-sha2-512") for kind in kinds}
    families = sorted(_FAMILIES, key=lambda family: asked.isdisjoint(family))
    shown: list[HostKey] = []
    for family in families if pins else [tuple(kind for one in _FAMILIES for kind in one)]:
        try:
            transport, sock = _exchange_keys(address, family, deadline - time.monotonic(), known_hosts)
        except paramiko.ssh_exception.IncompatiblePeer:
            continue
        key = _shown_key(transport)
        if key.fingerprint in pins:
            return transport, sock
        _discard(transport, sock)
        shown.append(key)
    if not shown:
        raise PermanentError(f"{address} has no host key of a type that is taken here", "ssh-keygen -A on the board.")
    raise host_keys.changed(str(address), shown, pins) if pins else host_keys.unknown(str(address), shown[0])


def _exchange_keys(
    address: SshAddress, kinds: Sequence[str], timeout_s: float, known_hosts: KnownHosts | None
) -> tuple[Transport, WatchedSocket]:
    """Connect and agree on keys, before the login. Raises IncompatiblePeer if no host key is of `kinds`."""
    deadline = time.monotonic() + max(0.01, timeout_s)
    sock = _open_way(address, deadline, known_hosts)
    left_s = max(0.1, deadline - time.monotonic())
    transport = Transport(sock)
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


def _shown_key(transport: Transport) -> HostKey:
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def _show_user_keys(transport: Transport, address: SshAddress, keys: Sequence[UserKey], deadline: float) -> None:
    """Offer public keys one after the other: never a password or a prompt."""
    refusal: Exception | None = None
    for key in keys[:MOST_KEYS]:
        transport.auth_timeout = max(0.1, deadline - time.monotonic())
        try:
            further = transport.auth_publickey(address.user, key.key)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if deadline - time.monotonic() < 0.2:
                raise DeadlineError(f"{address} did not answer the login of {address.user!r} in time") from error
            if not transport.is_active():
                raise TransientError(f"{address} hung up during the login of {address.user!r}") from error
            refusal = error
            continue
        if further:
            raise PermanentError(f"{address} wants more than a key from {address.user!r}: {', '.join(further)}")
        return
    what = " and ".join(f"{key.name} ({host_keys.fingerprint(key.key.asbytes())})" for key in keys[:MOST_KEYS])
    way = f" -J {','.join(f'{each.user}@{each}' for each in address.jumps)}" if address.jumps else ""
    raise PermanentError(
        f"{address} refuses the key {what} for the user {address.user!r}",
        f"Put it there: ssh-copy-id -i {address.key_file} -p {address.port}{way} {address.user}@{address.host}",
    ) from refusal


def _open_way(address: SshAddress, deadline: float, known_hosts: KnownHosts | None) -> WatchedSocket:
    """A connection to the board's sshd over the jump hosts, logging in to each with a pinned key."""
    if not address.jumps:
        timeout_s = max(0.01, deadline - time.monotonic())
        return open_socket(address.endpoint or address.host, address.port, timeout_s, SILENCE_S)
    *before, last = address.jumps
    jump = dataclasses.replace(last, jumps=tuple(before))
    try:
        carrier, sock = log_in(jump, known_hosts, max(0.1, deadline - time.monotonic()))
    except FarmError as error:
        raise type(error)(f"on the way to {address}: {error.message}", error.hint) from error
    try:
        carrier.set_keepalive(int(SILENCE_S))
        channel = carrier.open_channel(
            "direct-tcpip",
            (address.endpoint or address.host, address.port),
            ("127.0.0.1", 0),
            timeout=max(0.1, deadline - time.monotonic()),
        )
        near, far = socket.socketpair()
    except (paramiko.SSHException, EOFError, OSError) as error:
        _discard(carrier, sock)
        raise TransientError(
            f"{jump} cannot connect to {address}: {error or type(error).__name__}",
            "Is the board powered, and AllowTcpForwarding not forbidden on the host between?",
        ) from error
    near.settimeout(TCP_TIMEOUT_S)
    carry(far, channel, lambda: _discard(carrier, sock))
    return WatchedSocket(near, SILENCE_S)


def hang_up(sock: socket.socket) -> None:
    """Wake the threads that wait on the socket, on both sides; its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _discard(transport: Transport, sock: WatchedSocket) -> None:
    """End an unused transport, thread and socket."""
    hang_up(sock)
    transport.close()
    if transport.ident is not None:
        transport.join(JOIN_S)
    sock.close()
