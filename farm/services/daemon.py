"""The services' process: lock, log, tracker, keeper, control socket; and the effect of each request.

Services that `farm up` started stay until `farm down`. Those that another command started end with the last command
that holds them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol.interpreters import python_command
from farm import settings as farm_settings
from farm.connectivity.services import SERVICES, ControlServer
from farm.errors import FarmError, UnavailableError, UsageError
from farm.processes import children
from farm.processes.children import Backoff, Restarts
from farm.processes.machine import find_engines_gone
from farm.services.keeper import Keeper
from farm.services.notices import Notifier
from farm.services.probing import skipped
from farm.services.telemetry import Telemetry
from farm.store import Store

_LOOK_S = 5.0
# A campaign that kills every engine gets another at growing pauses.
_BACKOFF = Backoff(first_s=60.0, last_s=3600.0)
# The process waits until its engine has loaded TVM and Ray, on a busy machine.
_LIMIT_S = 180.0
LOG_FILE = "take-over.log"

# The loop does deferred work at once; it is busy for seconds only while the tracker restarts.
_LOOP_TIMEOUT_S = 40.0
# A command that started us connects at once; a killed one never does.
_FIRST_HOLD_S = 30.0
# Under the system's temporary folder: a Unix socket's path has at most 107 bytes, and FARM_HOME may be longer.
_FOLDER = "farm-services-"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_log = logging.getLogger(__name__)


class TakeOver:
    """Active while `on`. Used by the keeper's main thread alone."""

    def __init__(self, store: Store, logs: Path, on: bool = False) -> None:
        """`logs` is the folder for the process's output."""
        self.on = on
        self._store, self._log_file = store, logs / LOG_FILE
        self._look_at = 0.0
        self._tries: dict[str, Restarts] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0

    def watch(self, keeper: Keeper | None = None) -> None:
        """Start the process for campaigns that have no engine; cheap to call on every turn."""
        now = time.monotonic()
        if self._process is not None and (self._process.poll() is not None or now > self._until):
            self.close()
        if not self.on or self._process is not None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if not isinstance(self._store.location, str):
            return  # a file: this host's own, whose campaigns wait for their operator
        try:
            if not self._store.engines.fetch_living():
                self._store.campaigns.interrupt_untaken()
            left = self._store.campaigns.fetch_left(find_engines_gone(self._store))
            names = [name for name in left if self._tries.setdefault(name, Restarts(_BACKOFF)).due]
            if names:
                self._begin(names)
        except FarmError as error:  # the store is busy, or there is no memory for a process
            _log.warning("%s", error)

    def close(self) -> None:
        """End the process, if one runs. Campaigns that it has resumed wait for any engine."""
        if self._process is not None:
            children.stop(self._process)
            self._process = None

    def _begin(self, names: list[str]) -> None:
        for name in names:
            self._tries[name].note_end()
            _log.info("campaign %s was left by an engine that is gone; taking it over", name, extra={"campaign": name})
        command = python_command("-m", "farm.campaign.engine", "--take-over", *names)
        self._process = children.start(command, self._log_file, os.environ)
        self._until = time.monotonic() + _LIMIT_S


def main(argv: Sequence[str] | None = None) -> int:
    """Run the services until they are ended. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m farm.services")
    parser.add_argument("--stay", action="store_true", help="until it is ended, also without users")
    parser.add_argument("--boards", default=None, help="only these, comma-separated")
    parser.add_argument("--take-over", action="store_true", help="go on with campaigns whose engine was killed")
    parser.add_argument("--foreground", action="store_true", help="log to stderr")
    options = parser.parse_args(argv)
    wanted = None if options.boards is None else [name for name in options.boards.split(",") if name]
    return SERVICES.main(
        lambda settings: Daemon(settings, wanted, options.stay, options.take_over).run(), foreground=options.foreground
    )


class Daemon:
    """The services of one FARM_HOME."""

    def __init__(
        self, settings: farm_settings.Settings, wanted: Sequence[str] | None, stay: bool, take_over: bool = False
    ) -> None:
        self._takes_over = take_over
        self._settings, self._wanted, self._stay = settings, wanted, stay
        self._started_at = time.time()
        self._began = time.monotonic()
        self._held_once = False
        self._metrics: tuple[str, int] | None = None

    def run(self) -> None:
        """Start, serve, and clean up."""
        home = self._settings.home_path
        signals: list[int] = []  # while it starts: what is made meanwhile is cleaned up, too
        for number in _ENDING:
            signal.signal(number, lambda *_: signals.append(1))
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(Store(self._settings.store_location))
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            cores = len(os.sched_getaffinity(0))
            self._keeper = Keeper(self._settings, store, cores, self._wanted, home / "logs")
            stack.callback(self._keeper.close)
            self._take_over = TakeOver(store, home / "logs", on=self._takes_over)
            self._keeper.watchers.append(self._take_over.watch)
            stack.callback(self._take_over.close)
            telemetry = Telemetry(self._settings)
            stack.callback(telemetry.close)
            self._keeper.watchers.append(telemetry.watch)
            self._keeper.probing.on_report = telemetry.note_report
            self._metrics = telemetry.address
            stack.callback(Notifier(self._settings).close)
            for number in _ENDING:
                signal.signal(number, lambda *_: self._keeper.stop())
            if signals:
                self._keeper.stop()
            self._control = ControlServer(folder / "control", self.handle, self._keeper.wake)
            stack.callback(self._control.close)
            tracker = self._keeper.tracker
            SERVICES.publish(
                home,
                control=str(folder / "control"),
                tracker=(tracker.host, tracker.port),
                metrics=self._metrics,
                started_at=self._started_at,
            )
            _log.info("up, tracker on %s:%d", tracker.host, tracker.port)
            self._keeper.run(self._may_end)
            _log.info("ending")

    def handle(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Execute a command's request, on a thread of its own. Raises FarmError."""
        match verb:
            case "status":
                return self._do(self._show)
            case "need":
                names = arguments.get("boards")
                self._do(lambda: self._keeper.need(names))
                return self._do(self._show)
            case "stay":
                self._do(lambda: self._keeper.need(None))
                self._stay = True
                if arguments.get("take_over") is not None:
                    self._take_over.on = bool(arguments["take_over"])
                return self._do(self._show)
            case "retry":
                return self._do(lambda: self._keeper.retry(list(arguments["boards"])))
            case "probe":
                return self._probe([str(name) for name in arguments["boards"]], float(arguments["timeout_s"]))
        raise UsageError(f"the farm's services do not know the request {verb!r}", "They may be of another version.")

    def _do(self, work: Any) -> Any:
        try:
            return self._keeper.submit(work).result(_LOOP_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise UnavailableError(f"the farm's services were busy for {_LOOP_TIMEOUT_S:g} s") from None

    def _probe(self, names: list[str], timeout_s: float) -> list[dict[str, Any]]:
        """Return a report for each board, in order; one that was not probed in time has a reason and is `skipped`."""
        deadline = time.monotonic() + timeout_s
        self._do(lambda: self._keeper.need(names))
        probing = self._keeper.probing
        answers = self._do(lambda: [(name, probing.request(name)) for name in names])
        reports = []
        for name, answer in answers:
            try:
                reports.append(answer.result(max(0.0, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                self._do(lambda name=name, answer=answer: probing.withdraw(name, answer))
                kept = self._keeper.boards.get(name)
                last = probing.reports.get(name, {})
                reason = str(last["reason"]) if last.get("skipped") else ""
                why = (kept.trouble or reason) if kept is not None else "it is retired"
                reason = f"no answer within {timeout_s:g} s" + (f": {why}" if why else "")
                reports.append(skipped(name, timeout_s, reason))
        return reports

    def _may_end(self) -> bool:
        held = self._control.holds > 0
        self._held_once = self._held_once or held
        patience_over = self._held_once or time.monotonic() - self._began > _FIRST_HOLD_S
        return not self._stay and not held and patience_over

    def _show(self) -> dict[str, Any]:
        keeper, now = self._keeper, time.monotonic()
        return {
            "pid": os.getpid(),
            "started_at": self._started_at,
            "stays": self._stay,
            "held_by": self._control.holds,
            "takes_over": self._take_over.on,
            "tracker": {
                "host": keeper.tracker.host,
                "port": keeper.tracker.port,
                "up": keeper.tracker.is_alive,
                "restarts": keeper.tracker_restarts,
            },
            "metrics": None if self._metrics is None else f"http://{self._metrics[0]}:{self._metrics[1]}/metrics",
            "probe_worker": {"busy_with": sorted(keeper.probing.busy)},
            "boards": [
                {
                    "name": board.name,
                    "key": board.key,
                    "transport": board.transport.kind,
                    "kept_by": keeper.leases.find(board.name).keeper,
                    "way_up": board.state.up,
                    "registered": board.registered,
                    "reachable": board.reachable,
                    "way_since_s": now - board.state.since,
                    "connects": board.state.connects,
                    "trouble": board.trouble,
                    "probe": keeper.probing.reports.get(board.name),
                }
                for _, board in sorted(keeper.boards.items())
            ],
        }
