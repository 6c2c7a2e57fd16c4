"""Processes that an agent needs beside itself: a virtual board's simulator, and a clock helper where none runs.

On a real board both the agent and the helper are services of their own (`deploy/systemd/`); here they are children that
end with us.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from device_agent import processes, workspace
from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError, HelperUnavailableError
from device_agent.protocol.hardware import Cluster
from device_agent.protocol.interpreters import python_command
from device_agent.sysfs import VIRTUAL_PREFIX

if TYPE_CHECKING:
    from device_agent.emulated.runs import Emulator

# Where the service listens (`deploy/systemd/tvm-farm-clock-helper.service`).
SERVICE_SOCKET = "/run/tvm-farm/clock-helper.sock"
# Importing Python takes seconds under emulation.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


def find_service_socket() -> str | None:
    """The clock helper's service of this board; None where there is none.

    Its folder is for root and the agent's group alone: whom it shuts out is told so by the client, with whom to ask.
    """
    try:
        Path(SERVICE_SOCKET).stat()
    except PermissionError:
        return SERVICE_SOCKET
    except OSError:
        return None
    return SERVICE_SOCKET


class Rig:
    """A simulator and a clock helper as children, in a temporary folder. Start from the main thread only."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(workspace.work_folder("device-rig-"))

    def start_simulator(self, board_type: str, seed: int, faults: Sequence[str], live: bool = False) -> str:
        """Start a virtual board, `live` or in a time of its own; return the `--root` that names it.

        Raises HelperUnavailableError.
        """
        path = str(self.folder / "board.sock")
        command = ["-m", "device_agent.virtual.server", board_type, "--seed", str(seed), "--socket", path]
        for fault in faults:
            command += ["--fault", fault]
        if live:
            command.append("--live")
        self._start([*command, "--exit-with-parent"], lambda: Path(path).exists() and Path(path + ".root").exists())
        return VIRTUAL_PREFIX + path

    def start_emulator(self, folder: Path, clusters: Sequence[Cluster]) -> Emulator | None:
        """Start what runs aarch64 code as on these clusters' cores; None where one of them cannot be emulated.

        Raises HelperUnavailableError.
        """
        from device_agent.emulated.core import load_core
        from device_agent.emulated.runs import Emulator

        cores = {each.name: core for each in clusters if (core := load_core(each.core)) is not None}
        kinds = {each.core for each in clusters if not each.isolated}
        if len(cores) != len(clusters) or len(kinds) != 1:
            return None
        path = self.folder / "emulator.sock"
        command = ["-m", "device_agent.emulated", "--socket", str(path), "--natives", str(folder)]
        self._start([*command, "--exit-with-parent"], path.exists)
        core = next(cores[each.name] for each in clusters if not each.isolated)
        return Emulator(path, core, cores, kept=self.folder / "outputs")

    def start_helper(self, root: str) -> str:
        """Start a clock helper of our own for the tree `root`; return its socket. Raises HelperUnavailableError."""
        path = str(self.folder / "clock-helper.sock")
        state = self.folder / "state"
        state.mkdir()
        # The helper plays root: on a virtual board it comes in by the privileged door.
        root = root + ".root" if root.startswith(VIRTUAL_PREFIX) else root
        command = ["-m", "device_agent.clocks.helper", "--socket", path, "--state-dir", str(state), "--root", root]

        def answers() -> bool:
            with contextlib.suppress(AgentError, OSError), contextlib.closing(HelperClient(path)) as client:
                client.status()
                return True
            return False

        self._start([*command, "--exit-with-parent"], answers)
        return path

    def start_metrics(self, root: str, port: int, agent_port: int, name: str, board_type: str) -> None:
        """Start `device-agent metrics` beside an agent. Where it cannot serve it ends, and the agent goes on."""
        command = ["-m", "device_agent", "metrics", "--root", root, "--name", name, "--board-type", board_type]
        command += ["--port", str(port), "--agent-port", str(agent_port), "--exit-with-parent"]
        self._start(command, lambda: True)

    def _start(self, command: Sequence[str], ready: Callable[[], bool]) -> None:
        log = self.folder / f"{command[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                python_command(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ
            )
        self._stack.callback(_stop, process)
        processes.spare(process.pid)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            if process.poll() is not None:
                said = log.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
                raise HelperUnavailableError(f"{command[1]} ended at once: {said}")
            if time.monotonic() > deadline:
                raise HelperUnavailableError(f"{command[1]} was not ready within {_START_TIMEOUT_S:g} s")
            select.select([], [], [], 0.01)

    def stop(self) -> None:
        """End both, the helper first: it restores what is still held."""
        self._stack.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_TIMEOUT_S)
