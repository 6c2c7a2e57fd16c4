"""`farm board certify`: the doctor's hops, then its hardware under watch, in one report to send away.

The checks are in `doctor_agent` and `certify_hardware`, the page in `farm.report.bench_page`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farm.connectivity.services import using_services
from farm.errors import BoardUnsafeError, DeadlineError, FarmError, LeaseOverError, PermanentError
from farm.inventory.board_types import require_board_type
from farm.services.board_doctor import describe_board, plan_way
from farm.services.certify_hardware import HardwareChecks
from farm.services.checks import Check, Doubt, Level, Show, Work, run_chain, run_each
from farm.settings import Settings
from farm.store import Store
from farm.store.standing import parse_transport
from farm.types.documents import BoardInfo
from farm.values import Ssh
from farm.version import __version__

SCHEMA = "tvm-farm certificate 1"
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result. `document` is plain JSON, and None where the connection failed."""

    document: dict[str, Any] | None
    reached: bool
    passed: bool
    unsafe: bool


def certify_board(
    settings: Settings, name: str, timeout_s: float, names: bool, show: Show, note: Callable[[str], None]
) -> Certificate:
    """Examine one board within `timeout_s` once it is connected; every clock is released at any end.

    `names` keeps the names of boards, hosts and addresses. Raises UsageError for a board that is not registered.
    """
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(settings.store_location))
        board = store.boards.require(name)
        run = _Run(show)
        services = stack.enter_context(using_services(settings, [name], note))
        way, agent = plan_way(settings, store, board, lambda: services, stack)
        reached = run_chain([("registered", lambda: describe_board(board)), *way, *agent.plan_way()], run.note_way)
        if not reached:
            return Certificate(None, reached=False, passed=False, unsafe=run.unsafe)
        began, at = time.monotonic(), time.time()
        try:
            session = agent.session
        except FarmError as error:  # unsafe: there is no session
            run.note(Check("clocks", Level.FAILED, error.message, error.hint))
            return Certificate(None, reached=True, passed=False, unsafe=isinstance(error, BoardUnsafeError))
        timer = threading.Timer(timeout_s, run.end, [session.cut, f"the deadline of {timeout_s:g} s has passed"])
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        about = session.description
        kind = require_board_type(str(board.board_type))
        run.facts["clocks_before"] = about.clocks.to_dict()
        hardware = HardwareChecks(session, kind, about.clocks, agent.require_kernel, run.facts)
        versions = ("versions", lambda: _describe_versions(about.agent_version))
        hops = [*agent.plan_board(), versions, *hardware.plan()]
        run_each([(hop, run.watched(work)) for hop, work in agent.guarded(hops)], run.note, lambda: run.over)
        run.facts["description"] = {
            key: value for key, value in about.to_dict().items() if key not in ("name", "clocks", "sensors")
        }
        document = {
            "schema": SCHEMA,
            "board_type": kind.name,
            "title": kind.title,
            "simulated": about.simulated,
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)),
            "took_s": round(time.monotonic() - began, 1),
            "farm_version": __version__,
            "agent_version": about.agent_version,
            "result": run.result,
            "checks": [check.to_document() for check in run.checks],
            "facts": run.facts,
        }
        if names:
            document |= {"board": name, "way": [check.to_document() for check in run.way]}
        else:
            hidden = _list_names(settings, board)
            document |= {part: hide(document[part], hidden) for part in ("checks", "facts")}
        return Certificate(document, reached=True, passed=run.passed, unsafe=run.unsafe)


class _Run:
    """The results so far, and why no more can follow."""

    def __init__(self, show: Show) -> None:
        self.way: list[Check] = []
        self.checks: list[Check] = []
        self.facts: dict[str, Any] = {}
        self.over = ""
        self.unsafe = False
        self._show = show

    def note_way(self, check: Check) -> None:
        """Add a hop of the connection, without details: they name hosts and addresses."""
        self._show(check)
        self.way.append(check)

    def note(self, check: Check) -> None:
        """Add a check of the board itself."""
        self._show(check)
        self.checks.append(check)

    def end(self, cut: Callable[[], None], reason: str) -> None:
        """Stop after the running check, whose call is cut. From any thread."""
        self.over = self.over or reason
        cut()

    def watched(self, work: Work) -> Work:
        """Wrap checks so that an error that ends the session ends them."""

        def watch() -> str | Doubt:
            try:
                return work()
            except FarmError as error:
                self.unsafe = self.unsafe or isinstance(error, BoardUnsafeError)
                if self.over and not self.unsafe:  # cut: the call's own error says nothing
                    raise DeadlineError(self.over) from error
                if not isinstance(error, PermanentError) or isinstance(error, LeaseOverError):
                    self.over = self.over or f"the session has ended: {error.message}"
                raise

        return watch

    @property
    def passed(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def result(self) -> str:
        """Describe the result in a word or two."""
        if self.unsafe:
            return "unsafe"
        if any(check.level is Level.FAILED for check in self.checks):
            return "failed"
        if any(check.level is Level.NOT_TRIED for check in self.checks):
            return "incomplete"
        doubts = sum(check.level is Level.WARNING for check in self.checks)
        return f"passed, {doubts} to look at" if doubts else "passed"


def _describe_versions(agent_version: str) -> str | Doubt:
    said = f"agent {agent_version}, farm {__version__}"
    return said if agent_version == __version__ else Doubt(said, "Bring the agent up to date, and certify again.")


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
