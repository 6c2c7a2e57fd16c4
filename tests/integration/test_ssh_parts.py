"""The parts of the way to boards that need no server: pinned keys on disk, the tracker's bytes, pauses."""

from __future__ import annotations

import contextlib
import json
import pathlib
import pickle
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

import paramiko
import pytest

from farm.connectivity.board_link import PortRewriter
from farm.connectivity.host_keys import HostKey, KnownHosts, UnknownHostKeyError, require_fingerprint
from farm.connectivity.ssh_handshake import Transport
from farm.connectivity.ssh_socket import WatchedSocket
from farm.errors import UsageError
from tests.integration.conftest import ROOT

# From RFC 8032's first test vector: the public key, in SSH's encoding.
ED25519 = HostKey.from_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINdamAGCsQq31Uv+08lkBzoO4XLz2qYjJa8CGmj3B1Ea comment")
OTHER = HostKey("ssh-ed25519", ED25519.blob[:-1] + b"\0")
MAGIC = struct.pack("<i", 0x2F271)


def test_keys_and_addresses_are_read_as_openssh_does() -> None:
    """The text form is kept; the fingerprint is the unpadded base64 of the SHA-256. The key to be confirmed crosses
    processes with its error.
    """
    assert HostKey.from_text(ED25519.to_text()) == ED25519
    assert require_fingerprint(ED25519.fingerprint) == ED25519.fingerprint
    assert len(ED25519.fingerprint) == len("SHA256:") + 43
    error = pickle.loads(pickle.dumps(UnknownHostKeyError("no key", "look", ED25519)))
    assert (error.message, error.hint, error.key) == ("no key", "look", ED25519)


@pytest.mark.parametrize(
    "text", ["", "ssh-ed25519", "ssh-ed25519 %%%", "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAINdamAGC", "x A"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    """A truncated line, a wrong type, another alphabet."""
    with pytest.raises(ValueError):
        HostKey.from_text(text)


@pytest.mark.parametrize("text", ["", "SHA256:short", "MD5:" + "0" * 43, "aa:bb:cc", "SHA256:" + "!" * 43])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    """With the command that prints one."""
    with pytest.raises(UsageError, match="ssh-keygen -lf"):
        require_fingerprint(text)


@pytest.mark.parametrize("changes", [False, True])
def test_a_host_key_that_changes_later_ends_the_connection(changes: bool) -> None:
    """A later key exchange shows the key of the first one, or there is no connection any more."""
    near, far = socket.socketpair()
    with (
        contextlib.closing(Transport(WatchedSocket(near, 5.0))) as client,
        contextlib.closing(paramiko.Transport(far)) as server,
    ):
        server.add_server_key(paramiko.ECDSAKey.generate())
        server.start_server(threading.Event(), paramiko.ServerInterface())
        client.start_client(timeout=20)
        if changes:
            server.add_server_key(paramiko.ECDSAKey.generate())
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            server.renegotiate_keys()
        assert client.ended.wait(20 if changes else 0) == changes


def test_pins_are_kept_per_address_and_port(tmp_path: pathlib.Path) -> None:
    """In OpenSSH's format, so that ssh itself can use the file; removing one leaves the others and the comments."""
    known = KnownHosts(tmp_path / "home" / "known_hosts")
    assert known.find("nano-01", 22) == ()
    known.add("Nano-01", 22, ED25519)
    known.add("nano-01", 2222, OTHER)
    known.add("nano-01", 22, ED25519)
    known.path.write_text("# the rack by the window\n" + known.path.read_text())
    assert known.find("nano-01", 22) == (ED25519,)
    assert known.find("nano-01", 2222) == (OTHER,)
    assert known.find("nano-02", 22) == ()
    assert known.remove("nano-01", 22)
    assert not known.remove("nano-01", 22)
    assert known.path.read_text() == f"# the rack by the window\n[nano-01]:2222 {OTHER.to_text()}\n"


@pytest.mark.parametrize(
    "line", ["nano-01", "nano-01 ssh-ed25519 xx", "@revoked nano-01 " + ED25519.to_text(), "|1|a|b x y"]
)
def test_a_line_that_is_not_understood_is_named(tmp_path: pathlib.Path, line: str) -> None:
    """Skipping it in silence would turn a pin into none."""
    path = tmp_path / "known_hosts"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(UsageError, match="known_hosts:2: "):
        KnownHosts(path).find("nano-01", 22)


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a,b", "*", "a\nb"])
def test_a_name_that_could_mean_more_than_one_host_is_refused(tmp_path: pathlib.Path, host: str) -> None:
    """Lists, patterns and line breaks have a meaning in the file."""
    with pytest.raises(UsageError, match="no host name"):
        KnownHosts(tmp_path / "known_hosts").add(host, 22, ED25519)


def test_two_processes_lose_no_pin(tmp_path: pathlib.Path) -> None:
    """Four processes write 20 pins each at the same time; all 80 are there."""
    path = tmp_path / "known_hosts"
    program = (
        "import sys, pathlib\nfrom farm.connectivity.host_keys import HostKey, KnownHosts\n"
        "for n in range(20):\n    KnownHosts(pathlib.Path(sys.argv[1])).add("
        "f'{sys.argv[2]}-{n}', 22, HostKey.from_text(sys.argv[3]))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), name, ED25519.to_text()], cwd=ROOT)
        for name in ("a", "b", "c", "d")
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert all(KnownHosts(path).find(f"{name}-{n}", 22) for name in "abcd" for n in range(20))


def frame(message: Any) -> bytes:
    """A message as TVM's tracker protocol has it."""
    text = json.dumps(message).encode()
    return struct.pack("<i", len(text)) + text


def make_rewriter() -> PortRewriter:
    """For the board `local/a`, whose agent's port is 1000 higher here."""
    return PortRewriter("local/a", lambda port: port + 1000)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_agents_ports_are_replaced_however_its_bytes_arrive(step: int) -> None:
    """Registration, offer and the question for keys; cut into any pieces."""
    said = [[5, {"key": "server:local/a", "addr": [None, 9090]}], [3, "local/a", [9090, "local/a:0.5"], None], [7]]
    told = [[5, {"key": "server:local/a", "addr": [None, 10090]}], [3, "local/a", [10090, "local/a:0.5"], None], [7]]
    data, rewrite = MAGIC + b"".join(map(frame, said)), make_rewriter()
    out = b"".join(rewrite(data[at : at + step]) for at in range(0, len(data), step))
    assert out == MAGIC + b"".join(map(frame, told))


@pytest.mark.core
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        MAGIC + frame([3, "local/b", [9090, "local/b:0.5"], None]),
        MAGIC + frame([5, {"key": "server:local/b", "addr": [None, 9090]}]),
        MAGIC + frame([4, "local/a", "", 1]),
        MAGIC + frame([2]),
        MAGIC + frame({"a": 1}),
        MAGIC + struct.pack("<i", -1),
        MAGIC + struct.pack("<i", 1 << 30),
        MAGIC + struct.pack("<i", 3) + b"{]x",
        MAGIC + frame([3, "local/a", [True, 5], None]),
        MAGIC + frame([3, "local/a", [-1, "local/a:0.5"], None]),
        MAGIC + frame([5, {"key": "server:local/a", "addr": [None, 1 << 20]}]),
        MAGIC + struct.pack("<i", 200_000) + b"[" * 200_000,
    ],
)
def test_what_an_agent_does_not_say_is_refused(data: bytes) -> None:
    """Another service's bytes, another board's key, a request, the order to stop, no port, nonsense however deep."""
    with pytest.raises(ValueError):
        make_rewriter()(data)


def test_an_address_of_its_own_is_taken_from_the_agent() -> None:
    """A board could send clients anywhere otherwise."""
    out = make_rewriter()(MAGIC + frame([3, "local/a", [9090, "local/a:1"], "203.0.113.1"]))
    assert out == MAGIC + frame([3, "local/a", [10090, "local/a:1"], None])
