"""The model of a virtual board: clocks, load, power and temperature, advanced to the current time on demand.

No I/O: its files are in `tree.py`. Between two changes only the temperature varies, so energy has a closed form
(`history.py`). One class: every change first settles the energy and heat of the whole board.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterator

from device_agent.board_types import BoardType
from device_agent.protocol import EVERY_CLUSTER
from device_agent.protocol.hardware import PowerMode
from farm.virtual import parameters
from farm.virtual.clocks import CpuCluster, Gpu, Lag, LimitedClock, Load, MemoryClock, share_out
from farm.virtual.history import START_S, History, OwnClock, Piece, Power, add, draw, sum_heat, sum_rails
from farm.virtual.parameters import GPU, MEMORY, Domain

# The name in `exact_energy_j` of the board type's total.
TOTAL = "total"
_HEAT = "heat"
# The domain with this name draws its constant at the fan's full speed.
_FAN = "fan"
# Trip-point crossings are exact up to rounding.
_TOLERANCE_C = 1e-6
_LOAD_AVERAGE_S = 60.0
_FOREVER = math.inf
# How long a board with its own clock was idle before its start: longer than any sensor averages.
_BEFORE_S = 100.0


class VirtualBoard:
    """The board `seed` of a type. `clock` returns seconds that never run backwards.

    Change the state only within `change()`. Raises ProtocolError for a type that cannot be simulated.
    """

    def __init__(self, board_type: BoardType, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.board_type = board_type
        self.seed = seed
        self.parameters = parameters.read_simulation(board_type)
        self.individual = parameters.draw_individual(self.parameters.spread, seed)
        self._clock = clock
        self._domains = {domain.name: domain for domain in self.parameters.domains}
        self._rails = {rail.name: rail for rail in self.parameters.rails}
        self.rail_names = tuple(self._rails)
        power = board_type.power
        board_total = power.board_total if self.parameters.optional_sensors else ()
        self.total_rails = tuple(name for name in (*power.total, *board_total) if name in self._rails)
        self._columns = {name: index for index, name in enumerate((*self.rail_names, TOTAL, _HEAT))}
        self.cpus = tuple(sorted(cpu for cluster in board_type.clusters for cpu in cluster.cpus))
        self.hardware: object | None = None  # `tree.py`'s data beside the model
        self.boots = 0
        self.power_mode: PowerMode | None = None
        self.history = History()
        self._lag, self.acting_hz = Lag(), dict[str, int]()
        self._loads: dict[Hashable, Load] = {}
        self._schedule: list[tuple[float, Callable[[], None]]] = []
        self._busy_core_s = 0.0
        self._load_average = 0.0
        self.over_currents = 0
        self._throttled = False
        self._throttled_until_s = self._over_current_until_s = -_FOREVER
        self.fan_pwm = 0
        self._next_event_s = _FOREVER
        self._moment_s: float | None = None
        self._holds_until_s = _FOREVER
        self.boot_s = clock()
        self._boot()
        self._begin_piece(self.boot_s, self._settled_temperature_c())
        self._plan_event(self.boot_s)

    # State: read after `advance`.

    def advance(self) -> float:
        """Advance the model to the clock; return the time in s."""
        now_s = self._clock()
        while self._next_event_s <= now_s:
            self._settle(self._next_event_s)
        self._piece.end_s = max(self._piece.end_s, now_s)
        return self._piece.end_s

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Allow changes of state; the model follows at the block's end, also after an error."""
        now_s = self.advance()
        try:
            yield
        finally:
            self._settle(now_s)

    @property
    def temperature_c(self) -> float:
        return self._piece.temperature_c(self._piece.end_s)

    @property
    def throttled(self) -> bool:
        """Whether heat (or an injected fault) slows the board down."""
        return self._throttled or self._piece.end_s < self._throttled_until_s

    @property
    def over_current(self) -> bool:
        """Whether the supply's alarm is on."""
        return self._piece.end_s < self._over_current_until_s

    @property
    def busy_core_s(self) -> float:
        """CPU time used since boot, over all cores."""
        return self._busy_core_s + self._piece.busy_cores * (self._piece.end_s - self._piece.start_s)

    @property
    def load_average(self) -> float:
        """The kernel's load average over one minute."""
        busy, passed_s = self._piece.busy_cores, self._piece.end_s - self._piece.start_s
        return busy + (self._load_average - busy) * math.exp(-passed_s / _LOAD_AVERAGE_S)

    @property
    def uptime_s(self) -> float:
        return self._piece.end_s - self.boot_s

    @property
    def gpu_device(self) -> str:
        """The GPU's device name in this release; "" without a GPU."""
        devices = self.board_type.gpu.devices if self.board_type.gpu else ("",)
        return devices[-1 if self.parameters.release == "R36" else 0]

    def find_next_event_s(self) -> float | None:
        """The time of the next spontaneous change; None without one."""
        return None if self._next_event_s == _FOREVER else self._next_event_s

    def cluster_of(self, cpu: int) -> CpuCluster:
        """Raise StopIteration for a CPU that the board lacks."""
        return next(cluster for cluster in self.clusters.values() if cpu in cluster.cpus)

    def online_in(self, cluster: CpuCluster) -> tuple[int, ...]:
        return tuple(cpu for cpu in cluster.cpus if cpu in self.online)

    def exact_power_w(self, rail: str, at_s: float | None = None) -> float:
        """The power of a rail, or of TOTAL, now or at a past time. Raises ValueError for an unknown time."""
        now_s = self.advance()
        return self.history.power_w(self._columns[rail], now_s if at_s is None else at_s)

    @contextlib.contextmanager
    def look_back(self, at_s: float) -> Iterator[Callable[[], float]]:
        """Show sensors as of `at_s`. Yields a function that returns until when the values read held."""
        self._moment_s, self._holds_until_s = min(at_s, self.advance()), _FOREVER
        try:
            yield lambda: self._holds_until_s
        finally:
            self._moment_s = None

    def moment_s(self) -> float:
        """The time that sensors show: now, or the past within `look_back`."""
        return self.advance() if self._moment_s is None else self._moment_s

    def holds_until(self, until_s: float) -> None:
        """Report that a value being read changes at `until_s`."""
        self._holds_until_s = min(self._holds_until_s, until_s)

    def exact_energy_j(self, rail: str, start_s: float, end_s: float) -> float:
        """The exact energy of a rail, or of TOTAL. Raises KeyError, ValueError for an unknown time."""
        self.advance()
        return self.history.energy_j(self._columns[rail], start_s, end_s)

    def drawn_j(self, rail: str) -> float:
        """The energy of a rail, or of TOTAL, since the model began. Raises KeyError."""
        return self.history.drawn_j(self._columns[rail], self.advance())

    # What others do to it.

    @property
    def is_live(self) -> bool:
        """Whether its time passes in real time."""
        return not isinstance(self._clock, OwnClock)

    def let_pass(self, seconds: float) -> None:
        """Let time pass at once. Raises ValueError on a live board."""
        self._require_own_clock().now_s += seconds
        self.advance()

    def begin_anew(self) -> None:
        """Reset the clock to its start, with the board settled in its present state and no history.

        Scheduled actions keep their distance. Raises ValueError on a live board.
        """
        clock = self._require_own_clock()
        back_s = self.advance() - START_S
        clock.now_s = START_S
        self._schedule = [(when_s - back_s, action) for when_s, action in self._schedule]
        self._loads = {
            owner: dataclasses.replace(load, expires_s=load.expires_s - back_s) for owner, load in self._loads.items()
        }
        self._throttled_until_s -= back_s
        self._over_current_until_s -= back_s
        self._throttled = False
        self._busy_core_s = self._load_average = 0.0
        self.history, self._lag = History(), Lag()
        self.boot_s = START_S - _BEFORE_S
        self._begin_piece(self.boot_s, self._settled_temperature_c())
        self._settle(START_S)

    def _require_own_clock(self) -> OwnClock:
        if isinstance(self._clock, OwnClock):
            return self._clock
        raise ValueError("the board's time passes by itself")

    def set_load(self, owner: Hashable, load: Load | None) -> None:
        """Set what `owner` computes from now on; None: nothing."""
        with self.change():
            if load is None:
                self._loads.pop(owner, None)
            else:
                self._loads[owner] = load

    def set_online(self, cpu: int, online: bool) -> None:
        """Hot-plug one core, within `change()`. The first core cannot go offline."""
        cluster = self.cluster_of(cpu)
        if online and not self.online_in(cluster) and self.parameters.release in ("R28", "R32"):
            # Linux 4.9 recreates a policy; later kernels keep the requests (struct freq_qos_request).
            cluster.clock.reset_limits()
        (self.online.add if online else self.online.discard)(cpu)

    def apply_power_mode(self, mode: PowerMode) -> None:
        """Apply what nvpmodel writes, within `change()`: cores, caps, and the hardware's lower limits."""
        self.power_mode = mode
        for cpu in self.cpus:
            online = mode.cores_online is None or cpu in mode.cores_online
            if online != (cpu in self.online):
                self.set_online(cpu, online)
        for cluster in self.clusters.values():
            cap_hz = mode.cpu_max_hz.get(cluster.name, mode.cpu_max_hz.get(EVERY_CLUSTER))
            cluster.clock.set_limits(0, int(cap_hz) if cap_hz else cluster.clock.table[-1])
        if self.gpu:
            self.gpu.clock.set_limits(0, mode.gpu_max_hz or self.gpu.clock.table[-1])
        if self.memory:
            self.memory.cap_hz = mode.memory_max_hz or 0

    def reboot(self) -> None:
        """Return to the boot state, except for temperature. Within `change()` or as a scheduled action."""
        self._boot()

    def throttle(self, seconds: float = _FOREVER) -> None:
        """Throttle as if overheated, within `change()`; 0 ends it."""
        self._throttled_until_s = self._piece.end_s + seconds if seconds > 0 else -_FOREVER

    def raise_over_current(self, seconds: float) -> None:
        """Simulate a supply drop, within `change()`: an alarm and low clocks for a while."""
        self.over_currents += 1
        self._over_current_until_s = self._piece.end_s + seconds

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action at an exact later time."""
        with self.change():
            self._schedule.append((self._piece.end_s + delay_s, action))

    # How it works.

    def _boot(self) -> None:
        board_type, simulation = self.board_type, self.parameters
        tegra, old = bool(simulation.release), simulation.release in ("R28", "R32")
        self.boots += 1
        self.boot_s = self.history.pieces[-1].end_s if self.history.pieces else self.boot_s
        self._loads.clear()
        self._busy_core_s = self._load_average = 0.0
        self.over_currents = 0
        self._throttled_until_s = self._over_current_until_s = -_FOREVER
        self.fan_pwm = 0
        self.online = set(self.cpus)
        default = "schedutil" if "schedutil" in simulation.governors else simulation.governors[0]
        self.clusters: dict[str, CpuCluster] = {}
        for cluster in board_type.clusters:
            domain = self._domains[cluster.name]
            clock = LimitedClock(cluster.freqs_hz or domain.freqs_hz, simulation.governors, default, old, tegra)
            self.clusters[cluster.name] = CpuCluster(cluster, domain, clock)
        self.gpu: Gpu | None = None
        if board_type.gpu and board_type.gpu.freqs_hz:
            governors = simulation.gpu_governors or ("performance", "simple_ondemand", "userspace")
            first = "nvhost_podgov" if "nvhost_podgov" in governors else governors[0]
            self.gpu = Gpu(LimitedClock(board_type.gpu.freqs_hz, governors, first, old, tegra))
        self.memory: MemoryClock | None = None
        self.memory_hz = 0
        if board_type.memory and board_type.memory.freqs_hz:
            self.memory = MemoryClock(board_type.memory.freqs_hz)
        self.power_mode = None
        wanted = board_type.default_power_mode if simulation.power_mode is None else simulation.power_mode
        modes = {mode.id: mode for mode in board_type.power_modes}
        if modes:
            self.apply_power_mode(modes.get(wanted if wanted is not None else -1, board_type.power_modes[0]))

    @property
    def _piece(self) -> Piece:
        return self.history.pieces[-1]

    def _settle(self, at_s: float) -> None:
        """Begin a new piece at `at_s` with the changed state; find the next spontaneous change."""
        self._piece.end_s = max(self._piece.end_s, at_s)
        self._load_average = self.load_average
        self._busy_core_s = self.busy_core_s
        temperature_c = self._piece.temperature_c(at_s)
        due = [action for when_s, action in self._schedule if when_s <= at_s]
        self._schedule = [(when_s, action) for when_s, action in self._schedule if when_s > at_s]
        for action in due:
            action()
        self._loads = {owner: load for owner, load in self._loads.items() if load.expires_s > at_s}
        thermal = self.parameters.thermal
        if temperature_c >= thermal.trip_c - _TOLERANCE_C:
            self._throttled = True
        elif temperature_c <= thermal.trip_c - thermal.hysteresis_c + _TOLERANCE_C:
            self._throttled = False
        self._begin_piece(at_s, temperature_c)
        self._plan_event(at_s)

    def _begin_piece(self, at_s: float, temperature_c: float) -> None:
        slowed = self._throttled or at_s < max(self._throttled_until_s, self._over_current_until_s)
        ratio = self.parameters.thermal.throttle_ratio if slowed else 1.0
        self._set_clocks(ratio, at_s)
        rails = self._sum_rails()
        constant_w, per_c = rails[self._columns[_HEAT]]
        resistance = self.individual.resistance * self.parameters.thermal.resistance_c_per_w
        resistance *= 1 - self.parameters.thermal.fan_cooling * self.fan_pwm / 255
        damping = 1 - resistance * per_c
        final_c = (self.parameters.thermal.ambient_c + resistance * constant_w) / damping
        tau_s = self.parameters.thermal.time_constant_s / damping
        busy = sum(cluster.busy for cluster in self.clusters.values())
        self.history.begin(Piece(at_s, at_s, temperature_c, final_c, tau_s, rails, busy))

    def _settled_temperature_c(self) -> float:
        """The steady-state temperature."""
        self._begin_piece(self.boot_s, self.parameters.thermal.ambient_c)
        return self._piece.final_c

    def _plan_event(self, at_s: float) -> None:
        thermal = self.parameters.thermal
        limit_c = thermal.trip_c - thermal.hysteresis_c if self._throttled else thermal.trip_c
        events = [load.expires_s for load in self._loads.values()] + [when_s for when_s, _ in self._schedule]
        events += self._lag.list_due_s(at_s)
        events += [until_s for until_s in (self._throttled_until_s, self._over_current_until_s) if until_s > at_s]
        if (self._piece.final_c < limit_c) if self._throttled else (self._piece.final_c > limit_c):
            crossing_s = self._piece.find_crossing_s(limit_c)
            if crossing_s is not None:
                events.append(max(crossing_s, at_s + 1e-6))
        self._next_event_s = min(events, default=_FOREVER)

    def _set_clocks(self, ratio: float, at_s: float) -> None:
        """Distribute the load, and set every clock from it; `acting_hz` are those of the hardware."""
        delay_s = self.parameters.clock_delay_s
        self.traffic, gpu, wanted_memory, wanted_gpu = share_out(self._loads.values(), self.clusters, self.online_in)
        floor_hz = 0
        for cluster in self.clusters.values():
            online = len(self.online_in(cluster))
            cluster.busy = min(cluster.busy, online)
            cluster.hz = cluster.clock.decide(min(cluster.busy, 1.0), ratio * cluster.clock.table[-1])
            self.acting_hz[cluster.name] = self._lag.follow(cluster.name, cluster.true_hz, at_s, delay_s.cpu)
            if online:
                floor_hz = max(floor_hz, cluster.floor_hz())
        if self.gpu:
            self.gpu.busy = gpu
            self.gpu.hz = self.gpu.clock.decide(wanted_gpu, ratio * self.gpu.clock.table[-1])
            self.acting_hz[GPU] = self._lag.follow(GPU, self.gpu.hz, at_s, delay_s.gpu)
        if self.memory:
            self.memory_hz = self.memory.decide(floor_hz, wanted_memory)
            self.acting_hz[MEMORY] = self._lag.follow(MEMORY, self.memory_hz, at_s, delay_s.memory)

    def _sum_rails(self) -> tuple[Power, ...]:
        """Every rail, the total, and the heat into the die."""
        drawn = {name: self._draw(domain) for name, domain in self._domains.items()}
        rails = sum_rails(self._rails.values(), drawn)
        total = [rails[self._columns[name]] for name in self.total_rails]
        return *rails, add(total), sum_heat(self._domains.values(), drawn)

    def _draw(self, domain: Domain) -> Power:
        """The power of one domain at its clock and load."""
        units, powered, busy, hz = 1.0, 1.0, 0.0, self.acting_hz.get(domain.name, 0)
        if cluster := self.clusters.get(domain.name):
            units = len(self.online_in(cluster))
            powered = units / len(cluster.cpus)
            busy = cluster.busy / units if units else 0.0
        elif domain.name == GPU and self.gpu:
            if self.gpu.gated:
                return domain.constant_w, 0.0
            busy = self.gpu.busy
        elif domain.name == MEMORY and self.memory:
            busy = self.traffic
        elif domain.name == _FAN:
            return domain.constant_w * self.fan_pwm / 255, 0.0
        rate = self.traffic * self.acting_hz[MEMORY] / self.memory.table[-1] if self.memory else self.traffic
        return draw(domain, self.individual, units, powered, busy, hz, rate)
