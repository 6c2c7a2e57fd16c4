"""`farm doctor`: test every hop to a board, in order, with the real parts; name the one that fails.

The hops are in `doctor_ssh` and `doctor_agent`, the checks of hardware in `doctor_hardware`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from farm.connectivity.host_keys import FILE_NAME, KnownHosts
from farm.connectivity.services import Services, find_services, using_services
from farm.connectivity.ssh_config import to_ssh_address
from farm.errors import BoardUnsafeError, FarmError, LeaseOverError, PermanentError
from farm.inventory.board_types import require_board_type
from farm.processes.children import tail
from farm.services.checks import Check, Doubt, Level, Show, Work, run_chain, run_check, run_each
from farm.services.doctor_agent import AgentHops
from farm.services.doctor_hardware import HardwareChecks
from farm.services.doctor_ssh import SshHops
from farm.settings import Settings
from farm.store import Store
from farm.store.standing import parse_transport
from farm.types.documents import BoardInfo
from farm.values import Health, Ssh
from farm.version import __version__

SCHEMA = "tvm-farm board report 1"
_LEAST_FREE_BYTES = 1 << 30
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")


@dataclasses.dataclass(frozen=True)
class Examined:
    """The result of one board. `report`, of its hardware, can be sent away; None where the board was not reached."""

    passed: bool
    unsafe: bool = False
    report: dict[str, Any] | None = None


def examine_boards(
    settings: Settings,
    names: Collection[str],
    show: Callable[[str, Check], None],
    note: Callable[[str], None],
    hardware: bool = False,
) -> list[Examined]:
    """Examine boards one after another, with `hardware` against their types. `show` gets each check at once.

    Uses the farm's services, or its own meanwhile, with a message to `note`. Raises UsageError for a board that is not
    registered.
    """
    with contextlib.ExitStack() as stack:
        # Opened when the first board gets that far, and kept for all others.
        opened: list[Services] = []

        def services() -> Services:
            if not opened:
                opened.append(stack.enter_context(using_services(settings, names, note)))
            return opened[0]

        return [_Examination(settings, name, services, hardware).run(functools.partial(show, name)) for name in names]


def check_boards(settings: Settings, store: Store) -> list[Check]:
    """List a line for each registered board, and for the services, from their data: no connection is made."""
    services = find_services(settings)
    ways: dict[str, dict[str, Any]] = {}
    if services is None:
        checks = [Check("services", Level.OK, "not running; `farm up` starts them, and commands that need them do")]
    else:
        checks = [run_check("services", lambda: _describe_services(services, ways))]
    return checks + [_check_board(row, ways.get(row.name)) for row in store.boards.fetch()]


def _describe_services(services: Services, ways: dict[str, dict[str, Any]]) -> str | Doubt:
    """Describe the services; fill `ways` with the state of each board's connection."""
    status = services.fetch_status()
    ways |= {board["name"]: board for board in status["boards"]}
    tracker = status["tracker"]
    summary = (
        f"pid {status['pid']}; tracker {tracker['host']}:{tracker['port']} {'up' if tracker['up'] else 'DOWN'}, "
        f"restarted {tracker['restarts']} times; "
        f"{sum(bool(way['way_up']) for way in ways.values())} of {len(ways)} connections up"
    )
    if not tracker["up"]:
        raise PermanentError(summary, "See `farm logs`, and tracker.log in FARM_HOME/logs.")
    if tracker["restarts"]:
        return Doubt(summary, "`farm logs` says why it ended.")
    return summary


def _check_board(row: BoardInfo, way: Mapping[str, Any] | None) -> Check:
    name, health = f"board {row.name}", row.health
    summary = f"{row.state}, {health}"
    advice = f"farm doctor {row.name}"
    if health == Health.UNSAFE:
        return Check(name, Level.FAILED, f"{summary}: {row.health_reason}", f"farm board show {row.name}")
    if way is not None and not way["reachable"] and health not in (Health.MAINTENANCE, Health.RETIRED):
        return Check(name, Level.WARNING, f"{summary}: {way['trouble']}", advice)
    if health in (Health.QUARANTINED, Health.SUSPECT):
        return Check(name, Level.WARNING, f"{summary}: {row.health_reason}", advice)
    return Check(name, Level.OK, summary)


class SessionWatch:
    """Notices errors that end a session: what follows is not tried."""

    def __init__(self) -> None:
        self.over = ""
        self.unsafe = False

    def watched(self, work: Work) -> Work:
        """Wrap a check."""

        def watch() -> str | Doubt:
            try:
                return work()
            except FarmError as error:
                self.unsafe = self.unsafe or isinstance(error, BoardUnsafeError)
                if not isinstance(error, PermanentError) or isinstance(error, LeaseOverError):
                    self.over = self.over or f"the session has ended: {error.message}"
                raise

        return watch


class _Examination:
    """One board's hops, and with `hardware` the checks of its hardware."""

    def __init__(self, settings: Settings, name: str, open_services: Callable[[], Services], hardware: bool) -> None:
        self._settings, self._name, self._open_services, self._hardware = settings, name, open_services, hardware

    def run(self, show: Show) -> Examined:
        """Run all of them."""
        with contextlib.ExitStack() as stack:
            opened: list[tuple[Store, BoardInfo]] = []

            def open_store() -> str:
                store = stack.enter_context(Store(self._settings.store_location))
                opened.append((store, store.boards.require(self._name)))
                return str(store.location)

            first: list[tuple[str, Work]] = [
                ("config", lambda: describe_home(self._settings)),
                ("store", open_store),
                ("registered", lambda: describe_board(opened[0][1])),
            ]
            if not run_chain(first, show):
                return Examined(passed=False)
            store, board = opened[0]
            hops, agent = plan_way(self._settings, store, board, self._open_services, stack)
            if not self._hardware:
                return Examined(run_chain(hops + agent.plan(), show))
            if not run_chain(hops + agent.plan_way(), show):
                return Examined(passed=False)
            return self._check_hardware(agent, board, show)

    def _check_hardware(self, agent: AgentHops, board: BoardInfo, show: Show) -> Examined:
        """Run the hops of the board and all checks of its hardware, which need no other."""
        began, at, watch = time.monotonic(), time.time(), SessionWatch()
        checks: list[Check] = []
        facts: dict[str, Any] = {}

        def note(check: Check) -> None:
            checks.append(check)
            show(check)

        def run(hops: list[tuple[str, Work]]) -> None:
            run_each([(hop, watch.watched(work)) for hop, work in agent.guarded(hops)], note, lambda: watch.over)

        run(agent.plan_board())
        if watch.unsafe:
            return Examined(passed=False, unsafe=True)
        kind, about = require_board_type(str(board.board_type)), agent.session.description
        run(HardwareChecks(agent.session, kind, about.clocks, agent.require_kernel, facts).plan())
        hidden = _list_names(self._settings, board)
        said = {key: value for key, value in about.to_dict().items() if key not in ("name", "clocks", "sensors")}
        facts |= {"description": said, "clocks_before": about.clocks.to_dict()}
        report = {
            "schema": SCHEMA,
            "board_type": kind.name,
            "title": kind.title,
            "simulated": about.simulated,
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)),
            "took_s": round(time.monotonic() - began, 1),
            "farm_version": __version__,
            "agent_version": about.agent_version,
            "checks": hide([check.to_document() for check in checks], hidden),
            "facts": hide(facts, hidden),
        }
        return Examined(all(check.ok for check in checks), watch.unsafe, report)


def _list_names(settings: Settings, board: BoardInfo) -> dict[str, str]:
    """Map the names that a report to others must not hold to replacements."""
    hidden = {str(settings.home_path): "FARM_HOME", str(board.name): "NAME", socket.gethostname(): "HOST"}
    transport = parse_transport(board.transport)
    if isinstance(transport, Ssh):
        hidden |= {transport.host: "HOST", transport.identity_file: "KEY"}
    hidden[str(Path.home())] = "HOME"
    return {word: instead for word, instead in hidden.items() if len(word) > 1 and word != board.board_type}


def hide(value: Any, hidden: Mapping[str, str]) -> Any:
    """Replace these words, and every IPv4 address, in the document's texts and keys."""
    if isinstance(value, str):
        for word in sorted(hidden, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", hidden[word], value)
        return _ADDRESS.sub("ADDRESS", value)
    if isinstance(value, Mapping):
        return {hide(key, hidden): hide(each, hidden) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide(each, hidden) for each in value]
    return value


def plan_way(
    settings: Settings,
    store: Store,
    board: BoardInfo,
    open_services: Callable[[], Services],
    stack: contextlib.ExitStack,
) -> tuple[list[tuple[str, Work]], AgentHops]:
    """Plan the hops over SSH to a row of the store's, where there are any, and those beyond; `stack` closes both."""
    hops: list[tuple[str, Work]] = []
    name = str(board.name)
    log = settings.home_path / "logs" / "boards" / f"{name}.log"
    read_log_tail: Callable[[], str] = lambda: tail(log)  # noqa: E731 - replaced below
    transport = parse_transport(board.transport)
    if isinstance(transport, Ssh):
        ssh = SshHops(name, transport, to_ssh_address(transport), KnownHosts(settings.home_path / FILE_NAME))
        stack.callback(ssh.close)
        hops += ssh.plan()
        read_log_tail = ssh.read_log_tail
    agent = AgentHops(settings, store, board, open_services, read_log_tail)
    stack.callback(agent.close)
    return hops, agent


def describe_home(settings: Settings) -> str:
    """Describe FARM_HOME and its free space. Raises PermanentError where that is too little."""
    home = settings.home_path
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        raise PermanentError(f"only {free >> 20} MiB free under {home}", "Free some space, or set FARM_HOME elsewhere.")
    return f"FARM_HOME {home}, {free >> 30} GiB free"


def describe_board(board: BoardInfo) -> str | Doubt:
    """Describe a row of the store's boards. Raises PermanentError for a retired one."""
    transport = parse_transport(board.transport)
    where = f"ssh {to_ssh_address(transport).route}" if isinstance(transport, Ssh) else transport.kind
    simulated = " (simulated)" if board.simulated else ""
    summary = f"{board.board_type}/{board.name}{simulated}, {where}; {board.state}, {board.health}"
    if board.health == Health.RETIRED:
        raise PermanentError(f"{summary}: it is kept for its history only", f"farm board release {board.name}")
    if board.health != Health.GOOD:
        return Doubt(f"{summary}: {board.health_reason}")
    return summary
