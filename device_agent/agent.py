"""The `device-agent` command: reads its options, puts the parts together, serves.

Exit codes: 0 ok, 1 the work failed, 2 wrong usage, 3 unavailable (no free port).
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import device_agent

_log = logging.getLogger(__name__)

# Names go into tracker keys, file names and metrics labels; the tracker splits keys at colons, TVM at blanks.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

# Set before NumPy and TVM are imported. The runtime library alone starts no threads and is quick to fork; so are
# BLAS and OpenMP without pools. TVM's pool in a worker is sized by TVM_NUM_THREADS, which wins over OMP_NUM_THREADS.
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
    options = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )
    try:
        if options.command == "describe":
            return _describe(options)
        return _serve(options, parent)
    except UnavailableError as error:
        print(f"device-agent: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"device-agent: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="device-agent", description="The tvm-farm program on a board.")
    parser.add_argument("--version", action="version", version=device_agent.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--board-type", type=_name, default="local", help="kind of board (default: local)")
    common.add_argument("--name", type=_name, default=None, help="name of this board (default: the host's name)")
    common.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")

    describe = commands.add_parser("describe", parents=[common], help="say what this board is")
    describe.add_argument("--json", action="store_true", help="one JSON document instead of a table")

    serve = commands.add_parser("serve", parents=[common], help="offer this board to clients")
    serve.add_argument("--tracker", type=_address, metavar="HOST:PORT", help="TVM tracker to register with")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1; whoever reaches it runs code on this board)",
    )
    serve.add_argument("--port", type=_port, default=9090, help="first port to try (default: 9090)")
    serve.add_argument("--port-end", type=_port, default=9199, help="last port to try (default: 9199)")
    serve.add_argument(
        "--max-library-bytes",
        type=_positive,
        default=512 << 20,
        metavar="BYTES",
        help="largest library, program or upload taken (default: 512 MiB)",
    )
    serve.add_argument(
        "--exit-with-parent", action="store_true", help="end when the process that started this one is gone"
    )
    serve.add_argument(
        "--ready-file", type=Path, metavar="PATH", help="write {port, pid, key} there as JSON once clients can come"
    )
    serve.add_argument("--ready-fd", type=int, metavar="N", help="the same, to an inherited file descriptor")
    return parser


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name: letters, digits, dot, dash and underscore, 63 at most, no dash or dot first"
        )
    return text


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _host_name() -> str:
    """The host's name as far as it fits a board's name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:63]
    return name or "board"


def _describe(options: argparse.Namespace) -> int:
    from device_agent.describe import Machine

    name = options.name or _host_name()
    description = Machine().describe(name, options.board_type, device_agent.__version__).to_dict()
    if options.json:
        print(json.dumps(description))
        return 0
    for field, value in description.items():
        print(f"{field:20} {value if value not in ((), {}, []) else '-'}")
    return 0


def _serve(options: argparse.Namespace, parent: int) -> int:
    if options.port_end < options.port:
        print(f"device-agent: --port-end {options.port_end} is below --port {options.port}", file=sys.stderr)
        return 2
    os.environ.update(_ENVIRONMENT)
    from device_agent import rpc, session
    from device_agent.tracker import TrackerLink

    board = session.Board(
        options.name or _host_name(), options.board_type, device_agent.__version__, options.max_library_bytes
    )
    try:
        listener = rpc.open_listener(options.host, options.port, options.port_end)
    except rpc.AllPortsBusyError as error:
        raise UnavailableError(f"{error}; give another --port and --port-end") from error
    port = listener.getsockname()[1]
    session.load_tvm(board)
    _log.info("board %s listens on %s:%d", board.key, options.host, port)
    rpc.Listener(
        listener,
        board.key,
        TrackerLink(options.tracker, board.key, port) if options.tracker else None,
        functools.partial(session.serve, board),
        _announcer(options, {"port": port, "pid": os.getpid(), "key": board.key}),
        parent=parent if options.exit_with_parent else None,
        on_timeout=session.return_exception,
    ).run()
    return 0


def _announcer(options: argparse.Namespace, facts: dict[str, object]) -> Callable[[], None]:
    """What to do once clients can come: tell whoever waits for it."""
    text = json.dumps(facts) + "\n"

    def announce() -> None:
        _log.info("ready for clients")
        if options.ready_file is not None:
            unfinished = options.ready_file.with_name(options.ready_file.name + ".part")
            unfinished.write_text(text)
            unfinished.replace(options.ready_file)  # whoever waits for the file must never read half of it
        if options.ready_fd is not None:
            os.write(options.ready_fd, text.encode())
            os.close(options.ready_fd)

    return announce


if __name__ == "__main__":
    sys.exit(main())
