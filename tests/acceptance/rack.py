"""A farm with a board that is a machine of its own, as an operator has it: registered, services up, way watched."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.acceptance.conftest import Home, new_home, wait_until
from tests.integration.board_hosts import BoardHost, board_host

NAME = "nano-01"


class Rack:
    def __init__(self, home: Home, host: BoardHost) -> None:
        self.home, self.host = home, host

    def register(self, host_key: str | None = None, key_file: pathlib.Path | None = None) -> None:
        host = self.host
        added = self.home.run(
            *("board", "add", host.name, "--board-type", host.board_type, "--ssh", f"root@{host.address}"),
            *("--key-file", str(key_file or host.key_file), "--host-key", host_key or host.fingerprint),
        )
        assert added.code == 0, added.err

    def row(self, name: str = NAME) -> dict[str, Any]:
        shown: list[dict[str, Any]] = self.home.run("board", "list", "--json").json()
        return next(row for row in shown if row["name"] == name)

    def state(self, name: str = NAME) -> str:
        """`online` or `offline`, and why, straight from the store: fast enough to time a detection with."""
        rows = self.home.rows("SELECT name, reachable, state_reason FROM boards")
        found = [(reachable, reason) for each, reachable, reason in rows if each == name]
        return "" if not found else f"{'online' if found[0][0] else 'offline'}: {found[0][1]}"

    def wait_state(self, wanted: str, timeout_s: float, name: str = NAME) -> float:
        """Wait until the store says `wanted`; returns how many seconds that took."""
        began = time.monotonic()
        wait_until(lambda: self.state(name).startswith(wanted), f"{name} {wanted}, not {self.state(name)}", timeout_s)
        return time.monotonic() - began

    def trouble(self, name: str = NAME) -> str:
        boards = self.home.run("status", "--json").json()["boards"]
        return str(next((board["trouble"] for board in boards if board["name"] == name), ""))

    def wait_trouble(self, text: str, timeout_s: float, name: str = NAME) -> float:
        """Wait until `farm status` says `text` of the board; returns how many seconds that took."""
        began = time.monotonic()
        wait_until(lambda: text in self.trouble(name), f"{text!r} of {name}", timeout_s)
        return time.monotonic() - began

    def clear(self, name: str = NAME) -> None:
        """Forget what earlier faults made of the board's health, as an operator would who caused them."""
        if self.row(name)["health"] != "good":
            # A probe may have passed meanwhile; then there is nothing to clear.
            cleared = self.home.run("board", "release", name, "--why", "it was a test")
            assert cleared.code == 0 or self.row(name)["health"] == "good", cleared.err

    def probe(self, name: str = NAME) -> tuple[int, dict[str, Any]]:
        done = self.home.run("board", "probe", name, "--json")
        assert done.out, done.err
        [report] = done.json()
        return done.code, report


@contextlib.contextmanager
def running_rack(folder: pathlib.Path, board_type: str = "jetson-nano") -> Iterator[Rack]:
    """A board host, registered, with services up and the board online. Skips where there are no namespaces."""
    with board_host(NAME, folder / "host", board_type) as host, new_home() as home:
        rack = Rack(home, host)
        rack.register()
        try:
            up = home.run("up")
            assert up.code == 0, up.err
            rack.wait_state("online", 30)
            yield rack
        finally:
            home.run("down", "--force")


def timed(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
