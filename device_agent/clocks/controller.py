"""Hold a board at an operating point, all of it or none, and restore it afterwards.

`apply` plans, writes and reads back points; `access` has the rights. Everything here blocks, up to a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.apply import apply, is_close, plan_point
from device_agent.clocks.cpufreq import format_cpus
from device_agent.clocks.platform import Platform
from device_agent.errors import AgentError, BadPointError, BusyError, ClockError, HelperUnavailableError, UnsafeError
from device_agent.protocol import EVERY_CLUSTER, Clocks, DomainClocks, OperatingPoint, PinReport, PinStatus
from device_agent.protocol.texts import format_hz

# Restoring a clock that another process moved must not delay a measurement.
_CHECK_S = 1.0


class Controller:
    """One board's clocks in one process. `holder` names this client to others."""

    def __init__(self, platform: Platform, access: ClockAccess, holder: str = "") -> None:
        self.platform = platform
        self.held: OperatingPoint | None = None  # the point reached
        self._access = access
        self._holder = holder

    @staticmethod
    def read(platform: Platform) -> Clocks:
        """Read every clock, but not its holder. Never raises."""
        try:
            platform.hotplug.require_answer()
        except ClockError as error:
            return Clocks(notes=(*platform.notes, str(error)))
        online = platform.hotplug.read_online()
        modes = platform.power_modes
        mode = modes.read_current() if modes else None
        return Clocks(
            clusters=tuple(cluster.read(online) for cluster in platform.clusters),
            gpu=platform.gpu.read() if platform.gpu else None,
            memory=platform.memory.read() if platform.memory else None,
            power_mode=mode.name if mode else None,
            power_modes=modes.names if modes else (),
            notes=platform.notes,
        )

    def show(self) -> Clocks:
        """Read every clock, its holder, and whether the clocks can be trusted. Never raises."""
        clocks = self.read(self.platform)
        try:
            status = self._access.status()
        except (AgentError, OSError) as error:
            return dataclasses.replace(clocks, notes=(*clocks.notes, f"clock helper: {error}"))
        locked = "" if status.holder else find_lock(clocks)
        notes = (*clocks.notes, locked) if locked else clocks.notes
        return dataclasses.replace(clocks, holder=status.holder, unsafe=status.unsafe, notes=notes)

    def pin(self, point: OperatingPoint, deadline_s: float = 5.0) -> PinReport:
        """Hold the board at `point`, on top of what is held already; a power mode replaces everything held.

        Never raises. If refused before the first write, the earlier point stays held, as `reached` says. After any
        other failure nothing is held and everything was restored.
        """
        started_s = time.monotonic()
        wanted = self._merge(point)
        try:
            self.platform.hotplug.require_answer()
            plan = plan_point(self.platform, wanted, self._must_set_mode(point, wanted))
        except BadPointError as error:
            return self._report(PinStatus.REFUSED, str(error), started_s)
        except (AgentError, OSError) as error:
            if self.held is not None:
                return self._give_up(error, started_s)
            return self._report(_status_of(error), str(error), started_s)
        before, self.held = self.held, None
        try:
            locked = "" if before else self._find_lock()
            self._access.begin(self._holder or f"process {os.getpid()}")
        except (AgentError, OSError) as error:
            return self._report(_status_of(error), str(error), started_s)
        try:
            if before is not None and point.power_mode is not None:
                self._release(before)
            reached, notes = apply(self.platform, self._access, plan, started_s + deadline_s)
        except (AgentError, OSError) as error:
            return self._give_up(error, started_s)
        self.held = dataclasses.replace(reached, power_mode=plan.mode.name if plan.mode else wanted.power_mode)
        return self._report(PinStatus.OK, "", started_s, (*([locked] if locked else []), *notes))

    def unpin(self) -> PinReport:
        """Release: restore every clock from before the first pin. Never raises."""
        started_s = time.monotonic()
        held, self.held = self.held, None
        try:
            notes = self._restore()
        except (AgentError, OSError) as error:
            return self._report(_status_of(error), str(error), started_s)
        return self._report(PinStatus.OK, "" if held else "nothing was held", started_s, notes)

    @contextlib.contextmanager
    def gpu_powered(self) -> Iterator[None]:
        """Keep the GPU powered for a block, then restore its power state. Never raises of itself.

        Does nothing if a held point keeps the GPU on, or another client holds the clocks.
        """
        gpu, held = self.platform.gpu, self.held
        if gpu is None or (held is not None and held.gpu_freq_hz is not None):
            yield
            return
        try:
            with contextlib.suppress(AgentError, OSError):
                if held is None:
                    self._access.begin(self._holder or f"process {os.getpid()}")
                gpu.keep_power(self._access)
            yield
        finally:
            # A file that does not go back makes the board unsafe; the helper reports that to the next client.
            with contextlib.suppress(AgentError, OSError):
                gpu.release(self._access)
            if held is None:
                with contextlib.suppress(AgentError, OSError):
                    self._access.restore()

    def check(self, point: OperatingPoint | None = None) -> tuple[str, ...]:
        """Verify `point` (default: what is held); restore what others moved, with a note each.

        Raises ClockError when that fails, or the board does not answer.
        """
        wanted = point or self.held
        if wanted is None:
            return ()
        self.platform.hotplug.require_answer()
        moved = self._find_moved(wanted)
        if not moved:
            return ()
        try:
            plan = plan_point(self.platform, wanted, self._must_set_mode(OperatingPoint(), wanted))
            _, notes = apply(self.platform, self._access, plan, time.monotonic() + _CHECK_S)
        except (AgentError, OSError) as error:
            raise ClockError(f"{'; '.join(moved)}; it could not be put back: {error}") from error
        return (*(f"{what}; it was put back" for what in moved), *notes)

    def _find_lock(self) -> str:
        """Run `find_lock` only if the CPU's limits suggest a lock: the board is nearly always free."""
        online = self.platform.hotplug.read_online()
        clocks = [clock for cluster in self.platform.clusters for clock in cluster.clocks(online)]
        if any(clock.read_low_hz() != clock.read_high_hz() for clock in clocks):
            return ""
        return find_lock(self.read(self.platform))

    def _release(self, before: OperatingPoint) -> None:
        """Release what nvpmodel does not reset when a mode replaces a held point."""
        if self.platform.memory and before.memory_freq_hz is not None:
            self.platform.memory.release(self._access)
        if self.platform.gpu and before.gpu_freq_hz is not None:
            self.platform.gpu.release(self._access)

    def _merge(self, point: OperatingPoint) -> OperatingPoint:
        """`point` on top of what is held. A mode replaces it, because nvpmodel overwrites every limit."""
        held = self.held
        if held is None or point.power_mode is not None:
            return point
        cores = held.cores_online if point.cores_online is None else point.cores_online
        kept = {} if EVERY_CLUSTER in point.cpu_freq_hz else dict(held.cpu_freq_hz)
        if cores is not None:  # an offline cluster is no longer held
            kept = {name: hz for name, hz in kept.items() if self.platform.find_cluster(name).online_of(cores)}
        return OperatingPoint(
            power_mode=held.power_mode,
            cores_online=cores,
            cpu_freq_hz=kept | point.cpu_freq_hz,
            gpu_freq_hz=held.gpu_freq_hz if point.gpu_freq_hz is None else point.gpu_freq_hz,
            memory_freq_hz=held.memory_freq_hz if point.memory_freq_hz is None else point.memory_freq_hz,
        )

    def _must_set_mode(self, point: OperatingPoint, wanted: OperatingPoint) -> bool:
        """A requested mode is set even if it is current: other processes may have moved its limits."""
        if point.power_mode is not None:
            return True
        modes = self.platform.power_modes
        current = modes.read_current() if modes and wanted.power_mode is not None else None
        return current is not None and current.name != wanted.power_mode

    def _find_moved(self, wanted: OperatingPoint) -> list[str]:
        """What differs from the pinned point."""
        moved = []
        online = self.platform.hotplug.read_online()
        if self._must_set_mode(OperatingPoint(), wanted):
            moved.append("another process has set another power mode")
        if wanted.cores_online is not None and set(online) != set(wanted.cores_online):
            moved.append(f"{format_cpus(online)} are online instead of {format_cpus(wanted.cores_online)}")
        for name, hz in wanted.cpu_freq_hz.items():
            if not self.platform.find_cluster(name).is_held_at(hz, online):
                moved.append(f"the limits of {name} are not {format_hz(hz)} any more")
        gpu, memory = self.platform.gpu, self.platform.memory
        if gpu and wanted.gpu_freq_hz is not None and not gpu.is_held_at(wanted.gpu_freq_hz):
            moved.append(f"the limits of gpu are not {format_hz(wanted.gpu_freq_hz)} any more")
        if memory and wanted.memory_freq_hz is not None:
            now_hz = memory.read_hz()
            if not memory.is_locked() or (now_hz is not None and not is_close(now_hz, wanted.memory_freq_hz)):
                moved.append(f"the memory clock is {format_hz(now_hz)} instead of {format_hz(wanted.memory_freq_hz)}")
        return moved

    def _restore(self) -> tuple[str, ...]:
        notes = self._access.restore()
        if self.platform.gpu is not None:
            self.platform.gpu.forget()
        return notes

    def _give_up(self, error: Exception, started_s: float) -> PinReport:
        """Restore everything, and report why."""
        self.held = None
        try:
            notes = self._restore()
        except (AgentError, OSError) as worse:
            message = f"{error}; and the clocks could not be restored: {worse}"
            return self._report(_status_of(worse), message, started_s)
        return self._report(_status_of(error), f"{error}; everything was restored", started_s, notes)

    def _report(self, status: PinStatus, message: str, started_s: float, notes: tuple[str, ...] = ()) -> PinReport:
        clocks = self.show()
        return PinReport(status, message, self.held, clocks, notes, time.monotonic() - started_s)


def find_lock(clocks: Clocks) -> str:
    """Describe a lock on every clock by another process, which leaves no clean state to restore; "" without one."""
    domains: list[DomainClocks] = [domain for domain in clocks.clusters if domain.online and domain.max_hz is not None]
    domains += [clocks.gpu] if clocks.gpu else []
    if not domains or any(domain.min_hz != domain.max_hz or len(domain.available_hz) == 1 for domain in domains):
        return ""
    memory = clocks.memory
    if memory and memory.current_hz is not None and memory.max_hz is not None and memory.current_hz < memory.max_hz:
        return ""
    return "every clock is locked already (jetson_clocks?): unpin restores that lock, not a board left to itself"


def _status_of(error: Exception) -> PinStatus:
    match error:
        case BadPointError():
            return PinStatus.REFUSED
        case BusyError():
            return PinStatus.BUSY
        case UnsafeError():
            return PinStatus.UNSAFE
        case HelperUnavailableError():
            return PinStatus.UNAVAILABLE
    return PinStatus.FAILED
