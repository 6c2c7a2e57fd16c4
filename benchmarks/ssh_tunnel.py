"""Measure an SSH connection to a board, with a real sshd on loopback: bandwidth and round trips against a direct
connection and OpenSSH's own forward, files, commands, connecting, idle connections.

Default budget: below a minute.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import _machine

from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_files import get, put
from farm.connectivity.tunnels import Forward
from tests.integration.sshd import Sshd, running_sshd
from tests.ports import find_free_port

_CHUNK = bytes(1 << 18)
# What the service does with a connection, as its first byte says.
_TAKE, _GIVE, _ECHO = b"t", b"g", b"e"
_START_TIMEOUT_S = 10.0

Address = tuple[str, int]


class Service:
    """Plays the agent: takes bytes and says how many, gives bytes, or echoes single ones."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, contextlib.suppress(OSError):
            kind = client.recv(1)
            size = int.from_bytes(_read(client, 8), "big")
            if kind == _TAKE:
                _read(client, size)
                client.sendall(b"!")
            elif kind == _GIVE:
                _send(client, size)
            while kind == _ECHO and (byte := client.recv(1)):
                client.sendall(byte)


def _send(sock: socket.socket, size: int) -> None:
    while size > 0:
        sock.sendall(_CHUNK[:size])
        size -= len(_CHUNK)


def _read(sock: socket.socket, size: int) -> bytes:
    """The last piece of `size` bytes."""
    last = b""
    while size > 0:
        last = sock.recv(min(size, 1 << 18))
        if not last:
            raise SystemExit("the connection ended early")
        size -= len(last)
    return last


def _connect(address: Address, kind: bytes, size: int) -> socket.socket:
    sock = socket.create_connection(address, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(kind + size.to_bytes(8, "big"))
    return sock


def time_way(address: Any, size: int, rounds: int, pings: int) -> dict[str, Any]:
    """Up, down and round trip. `address` is called for each connection."""
    up, down, trips = [], [], []
    for _ in range(rounds):
        with _connect(address(), _TAKE, size) as sock:
            began = time.perf_counter()
            _send(sock, size)
            _read(sock, 1)
            up.append(size / (time.perf_counter() - began))
        began = time.perf_counter()
        with _connect(address(), _GIVE, size) as sock:
            _read(sock, size)
        down.append(size / (time.perf_counter() - began))
    with _connect(address(), _ECHO, 0) as sock:
        for _ in range(pings):
            began = time.perf_counter()
            sock.sendall(b"x")
            sock.recv(1)
            trips.append(time.perf_counter() - began)
    return {
        "up_mb_per_s": _machine.spread(up, 1e-6),
        "down_mb_per_s": _machine.spread(down, 1e-6),
        "round_trip_ms": _machine.spread(trips, 1e3),
    }


@contextlib.contextmanager
def openssh_forward(server: Sshd, target: Address) -> Iterator[Address]:
    """The same forward by OpenSSH's client, for comparison."""
    port = find_free_port()
    command = ["ssh", "-N", "-F", "none", "-i", str(server.folder / "user_key"), "-p", str(server.port)]
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes"):
        command += ["-o", option]
    command += ["-L", f"127.0.0.1:{port}:{target[0]}:{target[1]}", f"{server.address.user}@127.0.0.1"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit("ssh -L does not start") from None
                time.sleep(0.02)
        yield "127.0.0.1", port
    finally:
        process.terminate()
        process.wait(10)


def time_idle(server: Sshd, count: int, seconds: float) -> dict[str, Any]:
    """The share of one core that `count` connections take while nothing goes through them."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(SshConnection.connect(server.pinned))
        began, used = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.perf_counter() - began)
        return {"connections": count, "percent_of_a_core": _machine.round_to(100 * share, 3)}


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    """All figures."""
    size = options.megabytes * 1_000_000
    rounds, pings = options.rounds, 50 if options.quick else 500
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_sshd(folder / "sshd"))
        service = Service()
        stack.callback(service.close)
        times: dict[str, list[float]] = {"connect": [], "exec": []}
        for _ in range(max(3, rounds)):
            began = time.perf_counter()
            SshConnection.connect(server.pinned).close()
            times["connect"].append(time.perf_counter() - began)
        connection = stack.enter_context(SshConnection.connect(server.pinned))
        for _ in range(4 * rounds):
            began = time.perf_counter()
            connection.exec("true", 10)
            times["exec"].append(time.perf_counter() - began)
        figures |= {f"{name}_ms": _machine.spread(values, 1e3) for name, values in times.items()}
        _machine.say("forwards")
        figures["direct"] = time_way(lambda: service.address, size, rounds, pings)
        forward = stack.enter_context(Forward(lambda: connection, service.address[1]))
        figures["forward"] = time_way(lambda: forward.address, size, rounds, pings)
        if shutil.which("ssh"):
            with openssh_forward(server, service.address) as address:
                figures["openssh_forward"] = time_way(lambda: address, size, rounds, pings)
        _machine.say("files")
        source = folder / "file"
        source.write_bytes(os.urandom(1_000_000) * options.megabytes)
        there = str(folder / "there")
        figures["put_mb_per_s"] = _machine.round_to(size / put(connection, source, there).seconds / 1e6)
        figures["put_again_s"] = _machine.round_to(put(connection, source, there).seconds)
        figures["get_mb_per_s"] = _machine.round_to(size / get(connection, there, folder / "back").seconds / 1e6)
        _machine.say("idle")
        figures["idle"] = time_idle(server, 4 if options.quick else 32, 2 if options.quick else 15)
    return figures


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="bytes per transfer, in millions (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="transfers each way (default: 3)")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.rounds = 5, 1
    with _machine.only_json() as emit, _machine.scratch() as folder:
        quiet = _machine.wait_until_quiet(options.quick)
        emit("ssh_tunnel", vars(options), {"machine_quiet": quiet} | measure(options, folder))


if __name__ == "__main__":
    main()
