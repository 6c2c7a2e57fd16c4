"""The farm on this machine: TVM's tracker and an agent for the host, as child processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from device_agent.protocol.interpreters import python_command
from farm import emulation
from farm.closing import Closing
from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind
from farm.errors import DeadlineError, LeaseOverError, UnavailableError, UsageError
from farm.inventory.board_types import BoardType
from farm.processes import children
from farm.store import Store
from farm.values import Virtual

# As many as leave the host something to search and compile on.
_COUNT = 2
# An agent starts in 2 s on an idle machine.
AGENT_START_TIMEOUT_S = 30.0
FIRST_AGENT_PORT = 9090


def require_model(kind: BoardType) -> None:
    """Refuse a type of which there are no virtual boards. Raises UsageError."""
    if not kind.simulation:
        raise UsageError(f"there are no virtual boards of type {kind.name}", "`farm board list --types` says which.")


def require_virtual(store: Store, kind: BoardType, by: str) -> list[str]:
    """Register virtual boards of a type where there are none; return the names of new ones.

    Raises UsageError for a type that has no model, UnavailableError where they would run their own code and cannot.
    """
    require_model(kind)
    if emulation.runs_own_code(kind):
        emulation.require_installed()
    rows = store.boards.fetch()
    if any(row.simulated and row.board_type == kind.name for row in rows):
        return []
    taken = {row.name for row in rows}
    names = (name for n in itertools.count(1) if (name := f"virtual-{kind.name}-{n}") not in taken)
    added = list(itertools.islice(names, _COUNT))
    for seed, name in enumerate(added):
        store.boards.register(name, kind.name, Virtual(seed), {}, by=by)
    return added


class LocalFarm(Closing):
    """Tracker and agent as child processes, as a `Site`. `cores` are those the agent may use (all: None)."""

    # No lease: no other process knows this tracker.
    lease = None
    has_board = True
    can_change = False

    def __init__(self, tracker_port: int, folder: Path, cores: set[int] | None = None) -> None:
        """Start both; `folder` takes their logs. Raises UnavailableError, DeadlineError."""
        self._folder = folder
        self._cores = cores
        self._ready_file = folder / "agent.json"
        self._started: subprocess.Popen[bytes] | None = None
        self.tracker = Tracker.start(tracker_port, folder / "tracker.log")
        try:
            self._start_agent()
        except BaseException:
            self.close()
            raise

    def ensure_alive(self) -> list[str]:
        """Restart processes that died, and say which. The agent registers with a restarted tracker."""
        died = []
        if not self.tracker.is_alive:
            died.append("tracker")
            port = self.tracker.port
            self.tracker.stop()
            self.tracker = Tracker.start(port, self._folder / "tracker.log")
            if self.tracker.port != port:  # another process took the port meanwhile; the agent knows only the old one
                children.stop(self._agent)
        if self._agent.poll() is not None:
            died.append("agent")
            self._start_agent()
        return died

    def restart_agent(self) -> None:
        """End the agent at once; `ensure_alive` restarts it. It is our own child."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._agent.pid, signal.SIGKILL)

    def confirm(self) -> bool:
        return True

    def note_refusal(self, error: LeaseOverError) -> None:
        pass

    def observe(self, kind: Kind, detail: str) -> None:
        """Drop the observation: a person sits at this machine."""

    @property
    def _agent(self) -> subprocess.Popen[bytes]:
        assert self._started is not None  # `__init__` raises otherwise
        return self._started

    def close(self) -> None:
        if self._started is not None:
            children.stop(self._started)
        self.tracker.stop()

    def _start_agent(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        log = self._folder / "agent.log"
        command = python_command("-m", "device_agent", "serve", "--board-type", "local")
        command += ["--tracker", f"{self.tracker.host}:{self.tracker.port}", "--port", str(FIRST_AGENT_PORT)]
        # The agent's range begins below the tracker's default port and reaches past it, so a second farm finds room.
        command += [
            "--port-end",
            str(FIRST_AGENT_PORT + 400),
            "--exit-with-parent",
            "--ready-file",
            str(self._ready_file),
        ]
        self._started = children.start(command, log, os.environ, self._cores)
        deadline = time.monotonic() + AGENT_START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._ready_file.exists():
                self.key = str(json.loads(self._ready_file.read_text())["key"])
                return
            if self._agent.poll() is not None:
                ended = children.explain_end(log, self._agent.returncode)
                raise UnavailableError(f"the agent ended at once: {ended}")
            time.sleep(0.02)
        children.stop(self._agent)
        raise DeadlineError(f"the agent was not ready within {AGENT_START_TIMEOUT_S:g} s: {children.explain_end(log)}")


def share_cores(isolation: str) -> tuple[set[int], set[int]]:
    """Divide cores between the board and the host's work. Only `own-core` divides them."""
    cores = sorted(os.sched_getaffinity(0))
    if isolation != "own-core":
        return set(cores), set(cores)
    if len(cores) < 2:
        raise UsageError("FARM_ISOLATION=own-core needs at least two cores", "Use exclusive on this machine.")
    half = len(cores) // 2
    return set(cores[half:]), set(cores[:half])
