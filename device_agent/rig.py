"""Child processes of an agent: a private clock helper, and the exporter of metrics."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from device_agent import processes
from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError, HelperUnavailableError
from device_agent.protocol.interpreters import python_command

# Importing Python takes seconds under emulation.
_START_TIMEOUT_S = 60.0
# For a child to end after SIGTERM, and again after SIGKILL.
_STOP_TIMEOUT_S = 5.0


class Rig:
    """An agent's child processes, in a temporary folder. Start from the main thread only."""

    # The modules that are run.
    helper, agent = "device_agent.clocks.helper", "device_agent"

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(processes.work_folder("device-rig-"))

    def start_helper(self, root: str) -> str:
        """Start a private clock helper for the tree `root`; return its socket. Raises HelperUnavailableError."""
        path = str(self.folder / "clock-helper.sock")
        state = self.folder / "state"
        state.mkdir()
        command = ["-m", self.helper, "--socket", path, "--state-dir", str(state), "--root", root]

        def answers() -> bool:
            with contextlib.suppress(AgentError, OSError), contextlib.closing(HelperClient(path)) as client:
                client.status()
                return True
            return False

        self.start([*command, "--exit-with-parent"], answers)
        return path

    def start_metrics(self, root: str, port: int, agent_port: int, name: str, board_type: str) -> None:
        """Start `device-agent metrics` beside an agent. The agent goes on if it fails."""
        command = ["-m", self.agent, "metrics", "--root", root, "--name", name, "--board-type", board_type]
        command += ["--port", str(port), "--agent-port", str(agent_port), "--exit-with-parent"]
        self.start(command, lambda: True)

    def start(self, command: Sequence[str], ready: Callable[[], bool]) -> None:
        """Start `python -m MODULE ...` and wait until it is `ready`. Raises HelperUnavailableError."""
        log = self.folder / f"{command[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                python_command(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ
            )
        self._stack.callback(_stop, process)
        processes.SPARED.add(process.pid)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            if process.poll() is not None:
                said = log.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
                raise HelperUnavailableError(f"{command[1]} ended at once: {said}")
            if time.monotonic() > deadline:
                raise HelperUnavailableError(f"{command[1]} was not ready within {_START_TIMEOUT_S:g} s")
            select.select([], [], [], 0.01)

    def stop(self) -> None:
        """End the children, the helper first, so that it restores the clocks."""
        self._stack.close()

    def __enter__(self) -> Self:
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
