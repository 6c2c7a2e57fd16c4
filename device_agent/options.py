"""The options of the `device-agent` command, validated as they are parsed."""

from __future__ import annotations

import argparse
from pathlib import Path

import device_agent
from device_agent.protocol import EVERY_CLUSTER, NAME_RULE, OperatingPoint, ProtocolError, is_name, texts


def make_parser(
    common: argparse.ArgumentParser | None = None, serve: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """Build the parser of the whole command line. Options of `common` are every command's, of `serve` that one's."""
    parser = argparse.ArgumentParser(prog="device-agent", description="The tvm-farm program on a board.")
    parser.add_argument("--version", action="version", version=device_agent.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    own, output = _common_options(), argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    shared = [own, common] if common else [own]
    commands.add_parser("describe", parents=[*shared, output], help="say what this board is")
    serving = [*shared, serve] if serve else shared
    _add_serve(commands.add_parser("serve", parents=serving, help="offer this board to clients"))

    clocks = commands.add_parser("clocks", help="look at the clocks, hold them, put them back")
    verbs = clocks.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("show", parents=[*shared, output], help="every clock, its limits and who holds it")
    pin = verbs.add_parser(
        "pin", parents=[*shared, output], help="hold an operating point until Ctrl-C, then put every clock back"
    )
    _add_point(pin)
    pin.add_argument("--for", dest="seconds", type=_seconds, metavar="SECONDS", help="hold this long instead")
    restore = verbs.add_parser("restore", parents=[*shared, output], help="put back what was left, and clear `unsafe`")
    restore.add_argument("--force", action="store_true", help="take the clocks from their holder")

    power = commands.add_parser("power", parents=[*shared, output], help="read the power sensors for a while")
    power.add_argument("--seconds", type=_seconds, default=2.0, help="how long to look (default: 2)")
    power.add_argument("--rate-hz", type=_seconds, default=100.0, help="reads per second (default: 100)")

    metrics = commands.add_parser("metrics", parents=[*shared], help="tell Prometheus what the sensors say")
    metrics.add_argument("--port", type=_port, default=9101, help="where to listen on 127.0.0.1 (default: 9101)")
    metrics.add_argument("--agent-port", type=_port, default=9090, help="where the agent listens (default: 9090)")
    _add_exit_with_parent(metrics)

    doctor = commands.add_parser("doctor", parents=[*shared, output], help="check everything that this board needs")
    doctor.add_argument("--pin", action="store_true", help="also hold the highest CPU clock for a moment and restore")
    return parser


def _common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--board-type", type=parse_name, help="kind of board (default: what the device tree says, else `local`)"
    )
    parser.add_argument("--name", type=parse_name, help="name of this board (default: the host's name)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--root", default="/", metavar="DIR", help="another root for /sys, /proc and /etc")
    parser.add_argument(
        "--meter",
        default="",
        metavar="COMMAND",
        help="a program that prints lines `SECONDS WATTS` of an external power meter, sampled beside the rails",
    )
    parser.add_argument(
        "--clock-helper",
        metavar="SOCKET",
        help="the clock helper's socket (default: the service's, else one of our own)",
    )
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--tracker", type=_address, metavar="HOST:PORT", help="TVM tracker to register with")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1; every host that reaches it can run code on this board)",
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
    allowed = serve.add_mutually_exclusive_group()
    allowed.add_argument("--no-programs", action="store_true", help="run models only, no programs of clients")
    allowed.add_argument(
        "--programs",
        action="append",
        type=Path,
        metavar="PATH",
        help="run no other program than this one; repeatable (default: any, also those that clients send)",
    )
    serve.add_argument(
        "--metrics-port", type=_port, metavar="PORT", help="also run `device-agent metrics` there, as a child"
    )
    serve.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where to remember which leases are over (default: only as long as this process runs)",
    )
    serve.add_argument(
        "--gpu-folder",
        type=Path,
        metavar="DIR",
        help="folder of TVM's plug-in for the GPU (default: as it came with the agent)",
    )
    _add_exit_with_parent(serve)
    serve.add_argument(
        "--ready-file", type=Path, metavar="PATH", help="write {port, pid, key} there as JSON once clients can come"
    )
    serve.add_argument("--ready-fd", type=int, metavar="N", help="the same, to an inherited file descriptor")


def _add_exit_with_parent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the process that started this one is gone"
    )


def _add_point(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-freq",
        action="append",
        default=[],
        type=_cpu_freq,
        metavar="[CLUSTER=]FREQ",
        help="e.g. 1479MHz, a57=1.2704GHz; without a cluster: every one that is online",
    )
    parser.add_argument("--cores", type=_cores, metavar="LIST", help="CPUs online, e.g. 0,3-5")
    parser.add_argument("--gpu-freq", type=_freq, metavar="FREQ")
    parser.add_argument("--memory-freq", type=_freq, metavar="FREQ")
    parser.add_argument("--power-mode", metavar="NAME", help="an nvpmodel mode, applied before the rest")


def read_point(options: argparse.Namespace) -> OperatingPoint:
    """The operating point that `clocks pin` was given. Raises ProtocolError for an empty one."""
    point = OperatingPoint(
        power_mode=options.power_mode,
        cores_online=options.cores,
        cpu_freq_hz=dict(options.cpu_freq),
        gpu_freq_hz=options.gpu_freq,
        memory_freq_hz=options.memory_freq,
    )
    if point.is_empty:
        raise ProtocolError("nothing to hold; give --cpu-freq, --cores, --gpu-freq, --memory-freq or --power-mode")
    return point


def parse_name(text: str) -> str:
    """Parse the name of a board or a board type. Raises ArgumentTypeError."""
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: {NAME_RULE}")
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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _freq(text: str) -> int:
    try:
        return texts.parse_hz(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _cpu_freq(text: str) -> tuple[str, int]:
    cluster, equals, freq = text.rpartition("=")
    return (cluster if equals else EVERY_CLUSTER), _freq(freq)


def _cores(text: str) -> tuple[int, ...]:
    try:
        cpus = texts.parse_cpus(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not cpus:
        raise argparse.ArgumentTypeError("no CPU is named")
    return cpus
