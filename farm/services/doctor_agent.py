"""The doctor's hops from the tracker to a kernel run on a board, common to all connections.

They hold a lease of the board, as a probe does, so that no measurement is disturbed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from device_agent.protocol import Description, OperatingPoint, PinStatus, format_hz
from farm.connectivity.services import Services
from farm.crew import calibration
from farm.crew.health import Observation, decide_by, find_kind
from farm.crew.leased_board import LeaseKeeper
from farm.errors import (
    BoardHostileError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    PermanentError,
    TransientError,
    UnavailableError,
)
from farm.inventory.board_types import require_board_type
from farm.measure.blocking import BlockingSession
from farm.processes.machine import name_coordinator
from farm.search.codegen import golden
from farm.services import probe_rules
from farm.services.checks import Doubt, Work
from farm.settings import Settings
from farm.store import Store
from farm.types.documents import BoardInfo
from farm.values import Health, Lease

# A virtual board takes seconds to start; an SSH connection 15 s to time out, and its next attempt follows soon.
WAY_TIMEOUT_S = 40.0
# An agent that lost its tracker tries again every second or two (`_LAST_RETRY_S`, device_agent/listener/tracker.py).
REGISTER_TIMEOUT_S = 8.0
# The services' own probe may be running.
LEASE_TIMEOUT_S = 45.0
# For the tracker to offer a leased board.
REQUEST_TIMEOUT_S = 20.0
_LOOK_S = 0.2
# A retired board is kept for its history; any other may be examined.
_ALLOWED = frozenset(Health) - {Health.RETIRED}


class AgentHops:
    """Examines one board through the farm's services. Not thread-safe; `close` returns the board."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        board: BoardInfo,
        open_services: Callable[[], Services],
        read_log_tail: Callable[[], str],
    ) -> None:
        """`board` is a row of the store's. The first hop calls `open_services`, and fails if that does.

        `read_log_tail` returns the end of the agent's log on one line, empty where it is unreadable.
        """
        self._settings, self._store, self._board = settings, store, board
        self._open_services, self._read_log_tail = open_services, read_log_tail
        self._name = board.name
        self._key = f"{board.board_type}/{self._name}"
        self._stack = contextlib.ExitStack()
        self._opened: Services | None = None
        self._lease: Lease | None = None
        self._session: BlockingSession | None = None
        self._refusal: FarmError | None = None

    def plan(self) -> list[tuple[str, Work]]:
        """List the hops in order; each needs those before it."""
        return self.plan_way() + self.plan_board()

    def plan_way(self) -> list[tuple[str, Work]]:
        """List the hops up to a session with an agent of our protocol."""
        return self.guarded(
            [
                ("tracker", self._tracker),
                ("tunnel" if self._board.transport["kind"] == "ssh" else "connection", self._way),
                ("registration", self._registration),
                ("lease", self._take_lease),
                ("agent", self._agent),
                ("protocol", self._protocol),
            ]
        )

    def plan_board(self) -> list[tuple[str, Work]]:
        """List the hops that use a session."""
        return self.guarded(
            [
                ("clocks", self._clocks),
                ("board type", self._board_type),
                ("sensors", self._sensors),
                ("kernel", self._kernel),
            ]
        )

    def guarded(self, hops: Sequence[tuple[str, Work]]) -> list[tuple[str, Work]]:
        """Wrap hops so that an attack of the board is reported to the farm."""
        return [(name, functools.partial(self._try, hop)) for name, hop in hops]

    @property
    def session(self) -> BlockingSession:
        """The session. Raises the agent's refusal."""
        if self._refusal is not None:
            raise self._refusal
        assert self._session is not None
        return self._session

    def require_kernel(self) -> golden.GoldenKernel:
        """Return the golden kernel for this board. Raises DeadlineError, UnavailableError."""
        kernels = golden.GoldenKernels(self._settings.home_path / calibration.KERNEL_FOLDER)
        return calibration.require_kernel(kernels, require_board_type(self._board.board_type), self._about.architecture)

    def close(self) -> None:
        """Return the board. Safe to call twice."""
        self._stack.close()

    def _try(self, hop: Work) -> str | Doubt:
        """Run a hop; report an attack of the board to the farm."""
        try:
            return hop()
        except BoardHostileError as error:
            kind = find_kind(error)
            self._store.boards.observe(self._name, kind, "doctor", decide_by(Observation(kind, error.message)))
            raise

    @property
    def _services(self) -> Services:
        if self._opened is None:
            self._opened = self._open_services()
        return self._opened

    def _tracker(self) -> str:
        tracker = self._services.tracker
        count = len(anyio.run(tracker.fetch_summary).get("server_info", ()))
        return f"TVM's, on {tracker.host}:{tracker.port}, {count} agents registered"

    def _way(self) -> str:
        found = self._wait("way_up", WAY_TIMEOUT_S)
        return f"stands since {found['way_since_s']:.0f} s, came up {found['connects']} times"

    def _registration(self) -> str:
        try:
            self._wait("reachable", REGISTER_TIMEOUT_S)
        except DeadlineError as error:
            raise DeadlineError(
                f"{error.message}; the agent's log ends: {self._read_log_tail() or '(there is none)'}",
                f"farm board logs {self._name} shows more.",
            ) from error
        return f"as {self._key}"

    def _wait(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Return the board's part of the services' status once `what` is true of it. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while True:
            boards = {board["name"]: board for board in self._services.fetch_status()["boards"]}
            found = boards.get(self._name)
            if found is not None and found[what]:
                return dict(found)
            if time.monotonic() > deadline:
                why = found["trouble"] if found else "the services do not connect it"
                raise DeadlineError(f"not within {timeout_s:g} s: {why}")
            time.sleep(_LOOK_S)

    def _take_lease(self) -> str:
        deadline = time.monotonic() + LEASE_TIMEOUT_S
        owner = f"farm doctor on {socket.gethostname()}, pid {os.getpid()}"
        while True:
            try:
                self._lease = self._store.leases.acquire(
                    *(self._name, owner, "doctor"), allowed=_ALLOWED, through=name_coordinator()
                )
                break
            except TransientError as error:
                held = self._store.boards.require(self._name).lease
                if (held and held.purpose != "probe") or time.monotonic() > deadline:
                    who = f"{held.owner} has it for {held.purpose}" if held else error.message
                    raise TransientError(
                        f"not to be disturbed: {who}" if held else who,
                        "What follows needs the board alone: try again when it is free.",
                    ) from error
            time.sleep(_LOOK_S)
        self._stack.enter_context(LeaseKeeper(self._store.location, self._lease))
        return f"number {self._lease.token}"

    def _agent(self) -> str:
        began = time.monotonic()
        try:
            self._session = BlockingSession(self._services.tracker, self._key, REQUEST_TIMEOUT_S, self._lease)
        except BoardHostileError:
            raise
        except (UnavailableError, BoardUnsafeError) as error:
            # It answers; the hop that this belongs to judges it.
            self._refusal = error
            return "answers"
        self._stack.callback(self._session.close)
        about = self._session.description
        return f"version {about.agent_version}, answers in {time.monotonic() - began:.2f} s"

    @property
    def _about(self) -> Description:
        return self.session.description

    def _protocol(self) -> str:
        if isinstance(self._refusal, BoardUnsafeError):
            return "the same as here"
        return f"{self._about.protocol_version}, the same as here"

    def _clocks(self) -> str | Doubt:
        """Pin every cluster at its highest clock for a moment; the lease is ours."""
        clocks = self._about.clocks
        highest = {one.name: max(one.available_hz) for one in clocks.clusters if one.available_hz and one.online}
        if not highest:
            return Doubt("it offers no clock to hold", "What it measures depends on what its kernel chooses.")
        report = self.session.pin(OperatingPoint(cpu_freq_hz=dict(highest)))
        if report.status is PinStatus.UNAVAILABLE:
            return Doubt(
                f"cannot be held: {report.message}",
                f"On the board: systemctl status tvm-farm-clock-helper; or farm board logs {self._name}",
            )
        if report.status is PinStatus.BUSY:
            return Doubt(f"held by another client: {report.message}", "On the board: device-agent clocks show")
        restored = self.session.unpin()
        for one in (report, restored):
            if one.status is not PinStatus.OK:
                raise PermanentError(f"{one.status}: {one.message}", "On the board: device-agent doctor --pin")
        shown = ", ".join(f"{name} {format_hz(hz)}" for name, hz in highest.items())
        return f"held at {shown} within {report.took_s * 1e3:.0f} ms, and restored"

    def _board_type(self) -> str | Doubt:
        about, wanted = self._about, str(self._board.board_type)
        if wrong := probe_rules.find_wrong_type(wanted, about):
            raise PermanentError(wrong, "Register it anew with its own type, or correct the fleet file.")
        if not about.detected_type:
            return Doubt(f"{wanted}, as its agent is configured; its device tree names no known type")
        return f"{wanted}, as its device tree says"

    def _sensors(self) -> str | Doubt:
        about, kind = self._about, require_board_type(self._board.board_type)
        rails = ", ".join(about.rails) or "none"
        summary = f"{len(about.thermal_zones)} thermal zones; power: {rails}"
        notes = [f"{sensor.rail}: {sensor.note}" for sensor in about.sensors if sensor.note]
        if slow := probe_rules.find_slow_sensors(about.sensors, kind.power.update_period_s):
            notes.append(slow)
        has_total = about.rails and about.total_rails
        advice = "" if has_total else "Without a rail that is the total, energy is unknown, not zero."
        return Doubt("; ".join([summary, *notes]), advice) if notes or advice else summary

    def _kernel(self) -> str:
        kernel = self.require_kernel()
        outcome = calibration.require_right(self.session, kernel)
        return f"{kernel.name} in {statistics.median(outcome.latency_s) * 1e3:.2f} ms, with the right result"
