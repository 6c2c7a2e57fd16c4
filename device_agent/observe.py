"""What the sensors say while a worker runs, and what that comes to: power while timing, energy per call.

The sampler is a thread of the session that lives only while a worker does: nothing may be forked beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from device_agent.board_time import BoardTime
from device_agent.errors import SensorError
from device_agent.marks import Phases
from device_agent.power import energy
from device_agent.power.sensors import PowerSensors
from device_agent.power.trace import Trace
from device_agent.protocol import Energy, EnergySpec, PowerWindow, SensorInfo

# Often enough for sensors that refresh every 6.6 ms to miss little, at <= 2 % of a core.
RATE_HZ = 100.0


class Observer:
    """Samples every rail beside a worker. `infos` are the sensors as measured at the agent's start."""

    def __init__(
        self, sensors: PowerSensors, infos: tuple[SensorInfo, ...], time: BoardTime, rate_hz: float = RATE_HZ
    ) -> None:
        self._sensors = sensors
        self._infos = infos
        self._time = time
        self._rate_hz = rate_hz
        self._trace: Trace | None = None

    def plan_window(self, spec: EnergySpec) -> tuple[float, float, float]:
        """How long in s to be idle, to repeat the kernel, and to run it before that; 0 where there is no sensor."""
        if not self._sensors.rails:
            return 0.0, 0.0, 0.0
        idle_s = energy.plan_idle(self._infos, spec.idle_s) if spec.idle_s else 0.0
        busy_s = energy.plan_window(self._infos, spec, self._sensors.total_rails)
        return idle_s, busy_s, energy.plan_margin(self._infos)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Sample until left. Does nothing on a board without sensors."""
        self._trace = None
        if not self._sensors.rails:
            yield
            return
        watch = self._time.make_watch(self._sensors, self._rate_hz)
        watch.start()
        try:
            yield
        finally:
            # A driver that hangs keeps its thread; power is then unknown for this measurement.
            with contextlib.suppress(SensorError):
                watch.stop()
                self._trace = watch.trace()

    def read_power(self, phases: Phases) -> PowerWindow | None:
        """Power while the samples were taken; None without a sensor or a single value in that time."""
        return self._window(phases.timing_start_s, phases.timing_end_s)

    def read_energy(self, phases: Phases, spec: EnergySpec) -> Energy | None:
        """Energy per call over the window that was asked for; None without one."""
        calls = round(phases.busy_calls)
        busy = self._window(phases.busy_start_s, phases.busy_end_s, calls, spec.min_updates, steady=True)
        if busy is None:
            return None
        idle = self._window(phases.idle_start_s, phases.idle_end_s, steady=True)
        return energy.energy_per_call(busy, idle, busy.calls)

    def _window(
        self, start_s: float, end_s: float, calls: int = 0, min_updates: int = 0, *, steady: bool = False
    ) -> PowerWindow | None:
        if self._trace is None or not end_s > start_s > 0:
            return None
        sensors, infos = self._sensors, self._infos
        return energy.integrate(
            self._trace, start_s, end_s, sensors, infos, calls=calls, min_updates=min_updates, steady=steady
        )
