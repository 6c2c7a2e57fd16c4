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
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import device_agent
from device_agent import options
from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError, BadPointError, HelperUnavailableError, UnsafeError
from device_agent.protocol import ProtocolError
from device_agent.protocol.interpreters import skip_missing_types
from device_agent.rig import Rig
from device_agent.sysfs import Tree, open_tree

if TYPE_CHECKING:
    from device_agent.board_types import BoardType
    from device_agent.session.board import Board, Simulation

# Where the service listens (`deploy/systemd/tvm-farm-clock-helper.service`).
SERVICE_SOCKET = "/run/tvm-farm/clock-helper.sock"
_log = logging.getLogger(__name__)
# Set before NumPy and TVM are imported. The runtime-only library, and BLAS and OpenMP without pools, start no
# threads and fork quickly. TVM_NUM_THREADS sizes TVM's pool in a worker and overrides OMP_NUM_THREADS.
_ENVIRONMENT = {
    "TVM_USE_RUNTIME_LIB": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


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


class UnavailableError(Exception):
    """The agent cannot serve now."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run(argv, options.make_parser(), assemble, Rig)


def run(
    argv: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    assemble: Callable[[argparse.Namespace, contextlib.ExitStack], Board],
    rig: type[Rig],
) -> int:
    """Run the command that `parser` reads, on the board that `assemble` makes of its options."""
    parent = os.getppid()
    if argv is None:  # in a process of its own, SIGTERM must stop the children and remove their folder
        signal.signal(signal.SIGTERM, _end)
        os.environ.update(_ENVIRONMENT)
    chosen = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=chosen.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        if chosen.command == "serve" and chosen.port_end < chosen.port:
            raise ProtocolError(f"--port-end {chosen.port_end} is below --port {chosen.port}")
        with contextlib.ExitStack() as stack:
            board = assemble(chosen, stack)
            if chosen.command == "serve":
                return _serve(chosen, board, parent, rig)
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


def assemble(chosen: argparse.Namespace, stack: contextlib.ExitStack) -> Board:
    """Assemble the board that the options describe; `stack` ends its helper processes."""
    root, socket_path = chosen.root, chosen.clock_helper
    if socket_path is None and root == "/" and (service := find_service_socket()):
        socket_path = service
    elif socket_path is None and (os.geteuid() == 0 or root != "/") and _writes_clocks(chosen):
        socket_path = stack.enter_context(Rig()).start_helper(root)
    return make_board(chosen, stack, open_tree(root), socket_path)


def make_board(
    chosen: argparse.Namespace,
    stack: contextlib.ExitStack,
    tree: Tree,
    socket_path: str | None,
    simulation: Simulation | None = None,
    types: Mapping[str, BoardType] | None = None,
) -> Board:
    """Make the board over `tree`, whose clocks the clock helper at `socket_path` writes; None: nothing does."""
    from device_agent.session.board import Board

    access = None
    if socket_path:
        access = HelperClient(socket_path)
        stack.callback(access.close)
    return Board(
        # The host's name as a valid board name.
        chosen.name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:63] or "board",
        chosen.board_type,
        device_agent.__version__,
        tree,
        access,
        getattr(chosen, "max_library_bytes", 0),
        types,
        chosen.meter,
        simulation,
        [] if getattr(chosen, "no_programs", False) else getattr(chosen, "programs", None),
    )


def _writes_clocks(chosen: argparse.Namespace) -> bool:
    """Whether a one-shot command needs a clock helper. `serve` runs without root, with the service's helper or none."""
    return getattr(chosen, "verb", "") in ("pin", "restore") or bool(getattr(chosen, "pin", False))


def _serve(chosen: argparse.Namespace, board: Board, parent: int, rig: type[Rig]) -> int:
    gc.disable()  # until TVM is loaded
    from tvm_ffi import core, registry

    skip_missing_types(core, registry)
    from device_agent.listener import rpc
    from device_agent.session import session

    try:
        listener = rpc.open_listener(chosen.host, chosen.port, chosen.port_end)
    except rpc.AllPortsBusyError as error:
        raise UnavailableError(f"{error}; give another --port and --port-end") from error
    port = listener.getsockname()[1]
    board.measure_sensors()
    session.load_tvm(board)
    board.use_gpu(chosen.gpu_folder)
    _log.info("board %s listens on %s:%d%s", board.key, chosen.host, port, " (simulated)" * board.tree.simulated)
    with contextlib.ExitStack() as stack:
        if chosen.metrics_port:
            beside = stack.enter_context(rig())
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
