"""Switch the power of boards by their users' commands, and cycle boards that hang.

The rules are below; threads of this module run the commands.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.errors import FarmError, UsageError
from farm.inventory.power_commands import BOARD, PowerCommands, can_switch
from farm.processes import children
from farm.services.probe_rules import ProbePast
from farm.store import Store
from farm.store.leases import PROBE
from farm.types.documents import BoardInfo
from farm.values import Health, Lease

# Retries of the command that switches on, so that one failure does not leave the board off.
_TRIES_ON = 2
# Time of the lease beyond the commands'.
_MARGIN_S = 30.0

# Probes that failed in a row: one may be a hiccup.
FAILED_PROBES = 2
# Not connected for this long, without a refusal: longer than a reboot of a Jetson takes.
LOST_S = 180.0
BY = "services"
PURPOSE = "power cycle"
_AT_ONCE = 4
_log = logging.getLogger(__name__)


def parse_power(document: dict[str, Any] | None) -> PowerCommands | None:
    """Parse the commands in the store's column; None where there are none."""
    return None if document is None else PowerCommands.model_validate(document)


def take_board(
    store: Store, name: str, owner: str, purpose: str, commands: PowerCommands, allowed: Collection[Health]
) -> Lease:
    """Lease a board, connected or not, for the duration of switching. Raises TransientError where it is taken."""
    ttl_s = (1 + _TRIES_ON) * commands.timeout_s + commands.pause_s + _MARGIN_S
    return store.leases.acquire(name, owner, purpose, ttl_s=ttl_s, allowed=frozenset(allowed), within_reach=False)


def switch(board: str, commands: PowerCommands, action: str, hurry: threading.Event | None = None) -> str:
    """Switch a board `off`, `on`, or `cycle` it; return the last output. Blocks.

    `hurry` shortens the pause between off and on. Raises UsageError where there is no command for it, PermanentError or
    TransientError where one fails; the message says if the board stays off.
    """
    if not commands.can(action):
        raise UsageError(
            f"no command switches {board} {action}" if action != "cycle" else f"no command cycles the power of {board}",
            "Its `power:` in the fleet file says which there are; docs/howto/switch-power.md says how.",
        )
    if (words := getattr(commands, action)) is not None:
        return _run(board, commands, words, action)
    assert commands.off is not None and commands.on is not None  # noqa: PT018 - guaranteed by `can`
    _run(board, commands, commands.off, "off")
    (hurry or threading.Event()).wait(commands.pause_s)
    for left in reversed(range(_TRIES_ON)):
        try:
            return _run(board, commands, commands.on, "on")
        except FarmError as error:
            if not left:
                raise type(error)(f"{board} was switched off and not on again: {error.message}") from error
    raise AssertionError


def _run(board: str, commands: PowerCommands, words: list[str], action: str) -> str:
    command = [words[0], *(word.replace(BOARD, board) for word in words[1:])]
    environment = {"FARM_BOARD": board, "FARM_POWER": action}
    return children.run(command, commands.timeout_s, environment=environment)


class PowerOrder(StrEnum):
    """What to do about a board."""

    CYCLE = "cycle"
    GIVE_UP = "give_up"


def plan_power(row: BoardInfo, past: ProbePast | None, lost_s: float | None, boot_s: float) -> PowerOrder | None:
    """Decide what to do about a board with power commands; None for nothing.

    `row` is one of `store.boards.fetch`. `lost_s`: how long it was not connected, None where it is. Boards that an
    operator took out of service or holds are left alone.
    """
    if row.lease is not None or (row.quarantine is not None and row.quarantine.held):
        return None
    if row.health not in (Health.GOOD, Health.SUSPECT, Health.QUARANTINED) or not row.seen_at:
        return None
    if lost_s is None:
        hangs = past is not None and not past.passed and not past.skipped and past.tries >= FAILED_PROBES
    else:
        hangs = lost_s >= LOST_S
    if not hangs or min(row.power_cycled_s, default=boot_s) < boot_s:
        return None
    if len(row.power_cycled_s) < HealthLimits().cycles:
        return PowerOrder.CYCLE
    return None if row.health == Health.QUARANTINED else PowerOrder.GIVE_UP


def is_network_down(lost: int, kept: int) -> bool:
    """Whether so many boards are lost at once that the network is at fault."""
    return lost > 1 and lost > kept / 2


def tell(store: Store, name: str, kind: Kind, detail: str) -> bool:
    """Report what the services observe of a board, and log it; False where it was removed, or the store is busy."""
    try:
        store.boards.observe(name, kind, BY, decide_by(Observation(kind, detail)))
    except FarmError as error:
        _log.warning("%s: %s", name, error, extra={"board": name})
        return False
    _log.info("%s: %s %s", name, kind, detail, extra={"board": name})
    return True


class Powering:
    """Cycles the power of boards. Used by the keeper's main thread alone."""

    def __init__(self, store: Store, defer: Callable[[Callable[[], None]], None]) -> None:
        """`defer` has the main thread do something soon."""
        self._store, self._defer = store, defer
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "farm-power")
        self._ending = threading.Event()
        self._lost_since: dict[str, float] = {}
        # Until when a board has time to boot, unless it left and returned meanwhile.
        self._boots_until: dict[str, float] = {}
        self._away: set[str] = set()
        self.busy: set[str] = set()

    def step(
        self,
        rows: Sequence[BoardInfo],
        reachable: Collection[str],
        refused: Collection[str],
        past: dict[str, ProbePast],
    ) -> None:
        """Cycle boards that hang; remove them from `past`. `refused` boards are up and refuse our login."""
        now = time.monotonic()
        lost = {row.name for row in rows} - set(reachable)
        self._lost_since = {name: self._lost_since.get(name, now) for name in lost}
        own = [row for row in rows if can_switch(row.power, "cycle") and row.name not in self.busy]
        if not own:
            return
        documents = self._store.boards.fetch_power()
        cut_off = is_network_down(len(self._lost_since), len(rows))
        for row in own:
            name = row.name
            since = self._lost_since.get(name)
            if since is not None and (cut_off or name in refused):
                continue
            commands = parse_power(documents.get(name))
            if commands is None:
                continue
            order = plan_power(row, past.get(name), None if since is None else now - since, commands.boot_s)
            if order is PowerOrder.GIVE_UP:
                tell(self._store, name, Kind.NOT_REVIVED, f"{len(row.power_cycled_s)} times")
            elif order is PowerOrder.CYCLE:
                self._begin(name, commands)
                past.pop(name, None)

    def find_booting(self, reachable: Collection[str]) -> set[str]:
        """Return boards that are not to be probed yet: they are being cycled, or boot."""
        now = time.monotonic()
        self._away |= self._boots_until.keys() - set(reachable)
        for name in list(self._boots_until):
            if now >= self._boots_until[name] or (name in self._away and name in reachable):
                del self._boots_until[name]
                self._away.discard(name)
        return self.busy | self._boots_until.keys()

    def close(self) -> None:
        """Finish cycles in progress: a board is not left switched off. Blocks for a command or two."""
        self._ending.set()
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, name: str, commands: PowerCommands) -> None:
        owner = f"power@{socket.gethostname()} pid {os.getpid()}"
        try:
            lease = take_board(self._store, name, owner, PURPOSE, commands, PROBE)
        except FarmError as error:  # another was faster
            _log.info("the power of %s is not cycled: %s", name, error, extra={"board": name})
            return
        self.busy.add(name)
        _log.warning("%s hangs: cycling its power", name, extra={"board": name})
        self._pool.submit(self._cycle, name, commands, lease)

    def _cycle(self, name: str, commands: PowerCommands, lease: Lease) -> None:
        try:
            result = (Kind.POWER_CYCLED, switch(name, commands, "cycle", self._ending))
        except FarmError as error:
            result = (Kind.POWER_FAILED, error.message)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the board must not stay leased
            _log.exception("cycling the power of %s", name, extra={"board": name})
            result = (Kind.POWER_FAILED, f"a bug of the farm's: {error!r}")
        if self._ending.is_set():
            with Store(self._store.location) as store:  # the main loop, which runs deferred work, has ended
                self._conclude(store, name, commands, lease, *result)
        else:
            self._defer(lambda: self._conclude(self._store, name, commands, lease, *result))

    def _conclude(
        self, store: Store, name: str, commands: PowerCommands, lease: Lease, kind: Kind, detail: str
    ) -> None:
        self.busy.discard(name)
        if kind is Kind.POWER_CYCLED:
            self._boots_until[name] = time.monotonic() + commands.boot_s
        tell(store, name, kind, detail)
        store.leases.give_back(lease)
