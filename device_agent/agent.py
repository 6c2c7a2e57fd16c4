"""The `device-agent` command: parse options, assemble the board, run the subcommand.

Exit codes: 0 ok, 1 the work failed, 2 wrong usage, 3 unavailable (no free port, no clock helper), 4 board unsafe.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import device_agent
from device_agent import options, processes
from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError, BadPointError, HelperUnavailableError, UnsafeError
from device_agent.protocol import ProtocolError
from device_agent.protocol.hardware import Cluster
from device_agent.protocol.interpreters import python_command, skip_missing_types
from device_agent.sysfs import VIRTUAL_PREFIX, open_tree

if TYPE_CHECKING:
    from device_agent.emulated.runs import Emulator
    from device_agent.platforms.board import Board


# Where the service listens (`deploy/systemd/tvm-farm-clock-helper.service`).
SERVICE_SOCKET = "/run/tvm-farm/clock-helper.sock"
# Importing Python takes seconds under emulation.
_START_TIMEOUT_S = 60.0
# For a child to end after SIGTERM, and again after SIGKILL.
_STOP_TIMEOUT_S = 5.0


def find_service_socket() -> str | None:
    """Find the socket of this board's clock helper service; None without the service.

    A user outside the agent's group gets the path too; the client then reports which group to join.
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
        self.folder = self._stack.enter_context(processes.work_folder("device-rig-"))

    def start_simulator(self, board_type: str, seed: int, faults: Sequence[str], live: bool = False) -> str:
        """Start a virtual board; return the `--root` that names it. `live` runs it in real time.

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

    def start_emulator(self, folder: Path, clusters: Sequence[Cluster], kept: Path | None = None) -> Emulator | None:
        """Start the aarch64 emulator for these clusters; None if a core cannot be emulated. `kept` caches outputs.

        Raises HelperUnavailableError.
        """
        from device_agent.emulated.pipeline import load_core
        from device_agent.emulated.runs import Emulator

        cores = {each.name: core for each in clusters if (core := load_core(each.core)) is not None}
        kinds = {each.core for each in clusters if not each.isolated}
        if len(cores) != len(clusters) or len(kinds) != 1:
            return None
        path = self.folder / "emulator.sock"
        command = ["-m", "device_agent.emulated", "--socket", str(path), "--natives", str(folder)]
        self._start([*command, "--exit-with-parent"], path.exists)
        core = next(cores[each.name] for each in clusters if not each.isolated)
        return Emulator(path, core, cores, kept=kept and kept / folder.name)

    def start_helper(self, root: str) -> str:
        """Start a private clock helper for the tree `root`; return its socket. Raises HelperUnavailableError."""
        path = str(self.folder / "clock-helper.sock")
        state = self.folder / "state"
        state.mkdir()
        # The helper acts as root: on a virtual board it uses the privileged socket.
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
        """Start `device-agent metrics` beside an agent. The agent goes on if it fails."""
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
        """End the children, the helper first, so that it restores the clocks."""
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


_log = logging.getLogger(__name__)

# Set before NumPy and TVM are imported. The runtime-only library, and BLAS and OpenMP without pools, start no
# threads and fork quickly. TVM_NUM_THREADS sizes TVM's pool in a worker and overrides OMP_NUM_THREADS.
_ENVIRONMENT = {
    "TVM_USE_RUNTIME_LIB": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class UnavailableError(Exception):
    """The agent cannot serve now."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parent = os.getppid()
    if argv is None:  # in a process of its own, SIGTERM must stop the children and remove their folder
        signal.signal(signal.SIGTERM, _end)
        os.environ.update(_ENVIRONMENT)
    chosen = options.make_parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=chosen.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        if chosen.command == "serve" and chosen.port_end < chosen.port:
            raise ProtocolError(f"--port-end {chosen.port_end} is below --port {chosen.port}")
        with contextlib.ExitStack() as stack:
            board = _assemble(chosen, stack)
            if chosen.command == "serve":
                return _serve(chosen, board, parent)
            if chosen.command == "metrics":
                from device_agent import metrics

                return metrics.run(chosen, board)
            from device_agent import commands

            return commands.run(chosen, board)
    except (ProtocolError, BadPointError, NotADirectoryError) as error:
        return _fail(error, 2)
    except (UnavailableError, HelperUnavailableError) as error:
        return _fail(error, 3)
    except UnsafeError as error:
        return _fail(error, 4)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AgentError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _fail(error: Exception, code: int) -> int:
    print(f"device-agent: {error}", file=sys.stderr)
    return code


def _assemble(chosen: argparse.Namespace, stack: contextlib.ExitStack) -> Board:
    """Assemble the board that the options describe; `stack` ends its helper processes."""
    from device_agent.clocks.client import HelperClient
    from device_agent.platforms.board import Board
    from device_agent.platforms.board_types import load_board_types

    types = load_board_types()
    if chosen.fault and not chosen.virtual:
        raise ProtocolError("--fault harms virtual boards only; give --virtual TYPE")
    if chosen.meter and chosen.virtual and chosen.time != "live":
        raise ProtocolError("a meter's time is this machine's: a virtual board needs --time live beside --meter")
    root, socket_path, work_folder = chosen.root, chosen.clock_helper, chosen.work_folder
    emulator = None
    if chosen.virtual:
        if chosen.virtual not in types or not types[chosen.virtual].simulation:
            known = ", ".join(name for name, facts in types.items() if facts.simulation)
            raise ProtocolError(f"no virtual board of type {chosen.virtual!r}; there are: {known}")
        beside = stack.enter_context(Rig())
        root = chosen.root = beside.start_simulator(chosen.virtual, chosen.seed, chosen.fault, chosen.time == "live")
        socket_path = socket_path or beside.start_helper(root)
        work_folder = work_folder or beside.folder / "work"
        if folder := getattr(chosen, "emulator_folder", None):
            emulator = beside.start_emulator(folder, types[chosen.virtual].clusters, work_folder / "outputs")
    elif socket_path is None and root == "/" and (service := find_service_socket()):
        socket_path = service
    elif socket_path is None and (os.geteuid() == 0 or root != "/") and _writes_clocks(chosen):
        socket_path = stack.enter_context(Rig()).start_helper(root)
    access = None
    if socket_path:
        access = HelperClient(socket_path)
        stack.callback(access.close)
    return Board(
        chosen.name or _host_name(),
        chosen.board_type or chosen.virtual,
        device_agent.__version__,
        open_tree(root),
        access,
        getattr(chosen, "max_library_bytes", 0),
        types,
        work_folder,
        emulator,
        chosen.meter,
    )


def _writes_clocks(chosen: argparse.Namespace) -> bool:
    """Whether a one-shot command needs a clock helper. `serve` runs without root, with the service's helper or none."""
    return getattr(chosen, "verb", "") in ("pin", "restore") or bool(getattr(chosen, "pin", False))


def _host_name() -> str:
    """Reduce the host's name to a valid board name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:63]
    return name or "board"


def _serve(chosen: argparse.Namespace, board: Board, parent: int) -> int:
    gc.disable()  # until TVM is loaded
    from tvm_ffi import core, registry

    skip_missing_types(core, registry)
    from device_agent.listener import rpc
    from device_agent.platforms import gpu
    from device_agent.session import session

    try:
        listener = rpc.open_listener(chosen.host, chosen.port, chosen.port_end)
    except rpc.AllPortsBusyError as error:
        raise UnavailableError(f"{error}; give another --port and --port-end") from error
    port = listener.getsockname()[1]
    board.measure_sensors()
    session.load_tvm(board)
    gpu.use_folder(chosen.gpu_folder, board.facts, board.tree.simulated)
    _log.info("board %s listens on %s:%d%s", board.key, chosen.host, port, " (simulated)" * board.tree.simulated)
    with contextlib.ExitStack() as stack:
        if chosen.metrics_port:
            beside = stack.enter_context(Rig())
            beside.start_metrics(chosen.root, chosen.metrics_port, port, board.name, board.board_type)
        _listen(chosen, board, parent, listener, port)
    return 0


def _listen(chosen: argparse.Namespace, board: Board, parent: int, listener: socket.socket, port: int) -> None:
    from device_agent.listener import rpc
    from device_agent.listener.tracker import TrackerLink
    from device_agent.session import session

    rpc.Listener(
        listener,
        board.key,
        TrackerLink(chosen.tracker, board.key, port) if chosen.tracker else None,
        functools.partial(session.serve, board),
        _announcer(chosen, {"port": port, "pid": os.getpid(), "key": board.key}),
        parent=parent if chosen.exit_with_parent else None,
        on_timeout=session.return_exception,
        before_session=board.look_again,
        state_dir=chosen.state_dir,
    ).run()


def _announcer(chosen: argparse.Namespace, facts: dict[str, object]) -> Callable[[], None]:
    """Return the function that reports the agent as ready."""
    text = json.dumps(facts) + "\n"

    def announce() -> None:
        _log.info("ready for clients")
        if chosen.ready_file is not None:
            unfinished = chosen.ready_file.with_name(chosen.ready_file.name + ".part")
            unfinished.write_text(text)
            unfinished.replace(chosen.ready_file)  # atomic: a reader never sees half a file
        if chosen.ready_fd is not None:
            os.write(chosen.ready_fd, text.encode())
            os.close(chosen.ready_fd)

    return announce


if __name__ == "__main__":
    sys.exit(main())
