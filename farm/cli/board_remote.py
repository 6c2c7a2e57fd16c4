"""`farm board exec`, `logs` and `trust`: what is done to boards over SSH, and what virtual ones have in its place.

The connection is one of this command's own: the farm's services need not run, and what they carry is not disturbed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from farm import settings as farm_settings
from farm.cli import first_contact, options, output
from farm.cli.options import read_duration_s
from farm.connectivity import board_logs, host_keys, ssh, ssh_config, ssh_handshake
from farm.connectivity import services as connectivity_services
from farm.errors import FarmError, PermanentError, TransientError, UnavailableError, UsageError
from farm.processes import home_log, machine
from farm.settings import Settings
from farm.store import Store, standing
from farm.values import Direct, Ssh, Transport, Virtual

_LOOK_S = 0.25
_AT_ONCE = 32
# For the end of a log to arrive from a board.
_LOG_TIMEOUT_S = 30.0
# The most output of one command on one board, held in memory: a log of a week, not a disk image.
_MAX_OUTPUT_BYTES = 64 << 20
_REST = "farm.rest"


def print_log(path: Path, lines: int, follow: bool) -> None:
    """Print the last lines of a log, and with `follow` new ones until Ctrl-C. Raises UnavailableError without one."""
    # Before the end is read: what is written in between comes twice rather than never.
    follower = home_log.Follower(path) if follow else None
    try:
        with path.open("rb") as file:
            tail = collections.deque(file, lines)
    except FileNotFoundError:
        raise UnavailableError(
            f"there is no log yet: {path}", "The agent has not been started; see `farm up`."
        ) from None
    pass_on(b"".join(tail), b"")
    if follower is None:
        return
    with contextlib.closing(follower), contextlib.suppress(KeyboardInterrupt):
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            pass_on(b"".join(follower.read()), b"")


def pass_on(out: bytes, err: bytes) -> None:
    """Print both streams of another program; on a terminal with control characters shown."""
    for stream, data in ((sys.stdout, out), (sys.stderr, err)):
        if data:
            output.to_stream(stream, data)


class CommandWithRest(typer.core.TyperCommand):
    """Keeps the words after `--` apart from the names of boards."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_REST] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@output.command
def execute(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME… -- COMMAND…", help="Boards, then `--` and the command to run.")
    ],
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Time limit for each board.")] = "60s",
    json: options.Json = False,
) -> None:
    """Run a command on boards over SSH. Ends with its exit code, of several boards with the greatest.

    One word after `--` is a line for the board's shell; several are a program and its arguments, passed as they are.
    """
    boards, command = list(dict.fromkeys(names)), _to_line(context.meta[_REST])
    timeout_s = read_duration_s("--timeout", timeout)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        addresses = {
            name: ssh_config.to_ssh_address(require_ssh(name, fetch_transport(store, name), "`exec`"))
            for name in boards
        }
        for row in store.boards.fetch():
            if row.name in addresses and row.lease and not row.is_reserved_by(machine.name_user()):
                output.tell(
                    f"note: {row.name} is held by {row.lease.owner} for {row.lease.purpose}; "
                    "what runs beside that disturbs it"
                )
    many = len(addresses) > 1

    def show(name: str, done: _Done) -> None:
        if not json:
            _print_done(name, done, many)

    done = _run_everywhere(settings, addresses, command, timeout_s, show)
    if json:
        output.print_json([done[name].to_document(name) for name in boards])
    elif not many:
        raise_first({name: one.error for name, one in done.items() if one.error})
    if code := max(one.code for one in done.values()):
        raise SystemExit(code)


@output.command
def logs(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    lines: Annotated[
        int, typer.Option("--lines", min=1, max=board_logs.MAX_LINES, help="Number of last lines of each log.")
    ] = 100,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="DIR", help="Folder that the board is provisioned to.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
) -> None:
    """Show the logs of a board's agent and clock helper."""
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        transport = fetch_transport(store, name)
    if not isinstance(transport, Ssh):
        folder = settings.home_path / "logs"
        own = "agent.log" if isinstance(transport, Direct) else f"boards/{name}.log"
        print_log(folder / own, lines, follow)
        return
    if follow:
        _follow(settings, name, transport, board_logs.plan_follow_command(lines, prefix))
        return
    command = board_logs.plan_log_command(lines, prefix)
    done = _run_everywhere(
        settings, {name: ssh_config.to_ssh_address(transport)}, command, _LOG_TIMEOUT_S, lambda *_: None
    )[name]
    if done.error:
        raise done.error
    _print_done(name, done, False)
    _require_logs(name, done.code)


def _follow(settings: Settings, name: str, transport: Ssh, command: str) -> None:
    """Print new lines of a board's logs until Ctrl-C."""
    address, known_hosts = (
        ssh_config.to_ssh_address(transport),
        host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME),
    )
    raise_first(first_contact.confirm_host_keys({name: address}, known_hosts, ask=first_contact.find_asker()))
    with ssh.SshConnection.connect(address, known_hosts) as connection, contextlib.suppress(KeyboardInterrupt):
        _require_logs(name, connection.stream(command, pass_on, _LOG_TIMEOUT_S))


def _require_logs(name: str, code: int) -> None:
    if code:
        raise PermanentError(
            f"the logs of {name} could not be read (exit code {code})",
            "Was it provisioned by `farm board provision`? Its prefix can be given with --prefix.",
        )


@dataclasses.dataclass(frozen=True)
class _Done:
    """The end of a command on one board: its result, or the reason for none."""

    seconds: float
    result: ssh.ExecResult | None = None
    error: FarmError | None = None

    @property
    def code(self) -> int:
        return self.result.code if self.result else self.error.exit_code if self.error else 0

    def to_document(self, name: str) -> dict[str, Any]:
        out, err = (self.result.out, self.result.err) if self.result else (b"", b"")
        return {
            "board": name,
            "code": self.result.code if self.result else None,
            "stdout": out.decode(errors="replace"),
            "stderr": err.decode(errors="replace"),
            "seconds": round(self.seconds, 3),
            "error": str(self.error) if self.error else None,
        }


def _run_everywhere(
    settings: Settings,
    addresses: Mapping[str, ssh_handshake.SshAddress],
    command: str,
    timeout_s: float,
    show: Callable[[str, _Done], None],
) -> dict[str, _Done]:
    """Run a command on boards at once; call `show` as each ends."""
    known_hosts = host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME)
    refused = first_contact.confirm_host_keys(addresses, known_hosts, ask=first_contact.find_asker())
    done = {name: _Done(0.0, error=error) for name, error in refused.items()}
    for name, one in done.items():
        show(name, one)

    connections: list[ssh.SshConnection] = []
    stopping = threading.Event()

    def run(address: ssh_handshake.SshAddress) -> _Done:
        began = time.monotonic()
        try:
            with ssh.SshConnection.connect(address, known_hosts) as connection:
                connections.append(connection)
                if stopping.is_set():
                    raise TransientError("interrupted")
                result = connection.exec(command, timeout_s, _MAX_OUTPUT_BYTES)
            return _Done(time.monotonic() - began, result)
        except FarmError as error:
            return _Done(time.monotonic() - began, error=error)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "farm-board-exec") as pool:
        running = {pool.submit(run, addresses[name]): name for name in addresses if name not in refused}
        try:
            for future in concurrent.futures.as_completed(running):
                name = running[future]
                done[name] = future.result()
                show(name, done[name])
        except BaseException:
            # The pool joins its threads: those that wait for a board must stop.
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for connection in connections:
                connection.close("interrupted")
            raise
    return done


def _to_line(words: list[str]) -> str:
    """Return the command line for the boards' shell. Raises UsageError."""
    if not words:
        raise UsageError("what shall be run?", "farm board exec NAME… -- COMMAND…")
    return words[0] if len(words) == 1 else shlex.join(words)


def _print_done(name: str, done: _Done, with_name: bool) -> None:
    """Print a board's output; lines carry the board's name where there are several."""
    if done.result is not None:
        for stream, data in ((sys.stdout, done.result.out), (sys.stderr, done.result.err)):
            if with_name:
                label = f"{name}: ".encode()
                data = b"".join(label + line + b"\n" for line in data.splitlines())
            output.to_stream(stream, data)
        if with_name and done.result.code:
            output.tell(f"{name}: exit code {done.result.code}")
    elif with_name:
        output.tell(f"{name}: {done.error}")


def fetch_transport(store: Store, name: str) -> Transport:
    """Return how a board is reached. Raises UsageError where it is not registered."""
    return standing.parse_transport(store.boards.require(name).transport)


def require_ssh(name: str, transport: Transport, what: str) -> Ssh:
    """Return the transport if it is SSH; `what` needs it. Raises UsageError."""
    if isinstance(transport, Ssh):
        return transport
    if isinstance(transport, Virtual):
        raise UsageError(f"{name} is a virtual board: {what} needs SSH", "It is a process of this machine.")
    raise UsageError(f"{name} is on this machine: {what} needs SSH", "What it shall run can be run right here.")


def raise_first(failed: Mapping[str, FarmError]) -> None:
    """Raise one error as it is; of several, print all on stderr and raise the first."""
    for error in list(dict.fromkeys(failed.values()))[1:]:
        output.stderr.print(f"error: {error}", soft_wrap=True, markup=False, style="red")
    for error in failed.values():
        raise error


@output.command
def trust(
    names: options.Boards,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option("--fingerprint", metavar="SHA256:…", help="Fingerprint of the key to pin; repeatable."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the pinned keys, for instance after a reinstallation.")
    ] = False,
) -> None:
    """Confirm the host keys of boards. Shows each fingerprint and asks, or takes the one given."""
    if forget and fingerprint:
        raise UsageError("--forget and --fingerprint contradict each other", "First forget, then trust.")
    settings = farm_settings.load()
    known_hosts = host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME)
    with options.open_store(settings) as store:
        transports = {
            name: require_ssh(name, fetch_transport(store, name), "a host key") for name in dict.fromkeys(names)
        }
        if forget:
            for name, transport in transports.items():
                _forget(store, known_hosts, name, transport)
            return
    addresses = {name: ssh_config.to_ssh_address(transport) for name, transport in transports.items()}
    before = {name for name, at in addresses.items() if at.host_key or known_hosts.find(at.host, at.port)}
    failed = _compare_pinned({name: addresses[name] for name in before}, known_hosts, fingerprint or ())
    failed |= first_contact.confirm_host_keys(addresses, known_hosts, fingerprint or (), first_contact.find_asker())
    for name in addresses.keys() - failed.keys():
        output.stdout.print(f"{name}: {'its key is the pinned one' if name in before else 'trusted'}")
    confirmed = list(addresses.keys() - failed.keys())
    # Running services connect to these now.
    with contextlib.suppress(UnavailableError):
        if confirmed and (services := connectivity_services.find_services(settings)):
            services.retry(confirmed)
    raise_first(failed)


def _compare_pinned(
    addresses: Mapping[str, ssh_handshake.SshAddress], known_hosts: host_keys.KnownHosts, wanted: Collection[str]
) -> dict[str, FarmError]:
    """Return by board why its pinned key is not valid any more."""
    given = {host_keys.require_fingerprint(text) for text in wanted}

    def look(address: ssh_handshake.SshAddress) -> FarmError | None:
        pins = [address.host_key] if address.host_key else []
        pins = pins or [key.fingerprint for key in known_hosts.find(address.host, address.port)]
        try:
            key = ssh_handshake.fetch_host_key(address, wanted=pins, known_hosts=known_hosts)
        except FarmError as error:
            return error
        return host_keys.changed(str(address), [key], sorted(given)) if given and key.fingerprint not in given else None

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "farm-host-keys") as pool:
        found = dict(zip(addresses, pool.map(look, addresses.values()), strict=True))
    return {name: error for name, error in found.items() if error is not None}


def _forget(store: Store, known_hosts: host_keys.KnownHosts, name: str, transport: Ssh) -> None:
    address = ssh_config.to_ssh_address(transport)
    forgotten = known_hosts.remove(address.host, address.port)
    if transport.host_key:
        unpinned = dataclasses.replace(transport, host_key="")
        forgotten = store.boards.update(name, transport=unpinned, by=machine.name_user()) or forgotten
    output.stdout.print(f"{name}: {'its key is no longer trusted' if forgotten else 'no key was pinned'}")
