"""Several coordinators on one PostgreSQL store: each a home of its own, as on a machine of its own."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from farm.processes.machine import name_coordinator
from farm.store import Store
from tests.acceptance.conftest import Home, new_home, wait_until
from tests.integration.board_hosts import BoardHost
from tests.postgresql import Cluster


class Coordinator:
    def __init__(self, home: Home, url: str) -> None:
        self.home, self.url = home, url
        home.environment["FARM_STORE"] = url

    def run(self, *arguments: str) -> str:
        done = self.home.run(*arguments)
        assert done.code == 0, done.err
        return done.out

    def status(self) -> dict[str, dict[str, Any]]:
        document = self.home.run("status", "--json").json()
        return {board["name"]: board for board in document["boards"]}

    def lends(self) -> set[str]:
        return {name for name, board in self.status().items() if board["registered"]}

    @property
    def name(self) -> str:
        return name_coordinator(pathlib.Path(self.home.environment["FARM_HOME"]))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """For the block its machine stands still: nothing runs, and no connection of it ends."""
        processes = self.home.processes()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def kill_everything(self) -> None:
        """As if its machine had lost its power: every process that it started, by kill -9."""
        while found := self.home.processes():
            for process in found:
                with contextlib.suppress(Exception):
                    process.kill()


@contextlib.contextmanager
def coordinators(cluster: Cluster, count: int = 2) -> Iterator[list[Coordinator]]:
    url = cluster.make(empty=False)
    with contextlib.ExitStack() as stack:
        yield [Coordinator(stack.enter_context(new_home()), url) for _ in range(count)]


def register(coordinator: Coordinator, host: BoardHost) -> None:
    coordinator.run(
        *("board", "add", host.name, "--board-type", host.board_type, "--ssh", f"root@{host.address}"),
        *("--key-file", str(host.key_file), "--host-key", host.fingerprint),
    )


def wait_in_service(url: str, names: set[str], timeout_s: float = 60.0) -> None:
    with Store(url) as store:

        def are_good() -> bool:
            rows = {row.name: row for row in store.boards.fetch()}
            return all(rows[name].state != "offline" and rows[name].health == "good" for name in names)

        wait_until(are_good, f"{names} to be good", timeout_s)
