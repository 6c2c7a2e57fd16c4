"""A board type's `simulation:` section, validated; in SI units.

The numbers are in `inventory/board_types/*.yaml`, each with its source or marked as assumed. The model is `board.py`.
"""

from __future__ import annotations

import dataclasses
import random

from device_agent.board_types import BoardType
from device_agent.protocol import Message, ProtocolError

# Domains with clocks of their own; others (SoC, carrier) are constant, or a cluster.
GPU = "gpu"
MEMORY = "memory"


@dataclasses.dataclass(frozen=True)
class Domain(Message):
    """The power of one part of the board: C V^2 f of what switches, leakage, a constant, a part that follows traffic.

    A cluster's `capacitance_f` is per core. `voltage_v` maps clocks to V, linear in between and constant outside;
    without it the voltage is 1 V. Leakage is at 25 C and the highest voltage with every core online.
    """

    name: str  # a cluster's name, `gpu`, `memory`, or anything else
    capacitance_f: float = 0.0
    idle_activity: float = 0.0  # share of the capacitance that switches while clocked and idle
    voltage_v: tuple[tuple[int, float], ...] = ()
    constant_w: float = 0.0
    traffic_w: float = 0.0  # W at the peak rate of memory traffic
    leak_w: float = 0.0
    leak_w_per_c: float = 0.0
    heat: float = 1.0  # share of the power that warms the die
    freqs_hz: tuple[int, ...] = ()  # for a board type without a table


@dataclasses.dataclass(frozen=True)
class Rail(Message):
    """One measured rail: the sum of its domains over the converter's efficiency.

    `error` is its median relative error against published measurements that it was fitted to; None: it is assumed.
    """

    name: str
    domains: tuple[str, ...]
    volt: float
    efficiency: float = 1.0
    shunt_ohm: float = 0.005
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Sensor(Message):
    """The INA3221s' settings. `samples` are averaged per value; each takes `conversion_s` for both quantities."""

    samples: int = 64
    conversion_s: float = 0.0011
    noise_lsb: float = 0.5  # standard deviation of one value, in steps of the shunt's converter
    supply_ohm: float = 0.0  # the supply's internal resistance


@dataclasses.dataclass(frozen=True)
class Thermal(Message):
    """One thermal node. Above `trip_c` CPU and GPU are limited to `throttle_ratio` of their highest clock."""

    ambient_c: float = 25.0
    resistance_c_per_w: float = 5.0
    time_constant_s: float = 60.0
    trip_c: float = 97.0
    hysteresis_c: float = 3.0
    throttle_ratio: float = 0.5
    critical_c: float = 102.5
    constant_c: tuple[tuple[str, float], ...] = ()  # zones that show a constant
    unpowered: tuple[str, ...] = ()  # zones that give an error
    cooling: tuple[str, ...] = ()  # types of the cooling devices that slow the board down
    fan_cooling: float = 0.0  # share of the thermal resistance removed by the fan at full speed
    fan_w: float = 0.0  # the fan's power at full speed


@dataclasses.dataclass(frozen=True)
class Latency(Message):
    """How much slower this board is than the host: per cluster at its highest clocks, then by clock.

    `core_share` of the time scales with the cluster's clock, the rest with the memory's.
    """

    slowdown: tuple[tuple[str, float], ...] = ()
    core_share: float = 0.75
    noise: float = 0.004  # standard deviation, relative


@dataclasses.dataclass(frozen=True)
class ClockDelay(Message):
    """Seconds from a change of a clock, as the kernel shows it, until the hardware runs at it."""

    cpu: float = 0.0
    gpu: float = 0.0
    memory: float = 0.0


@dataclasses.dataclass(frozen=True)
class Spread(Message):
    """How much boards of one type differ, each as the half width of a uniform range around 1."""

    capacitance: float = 0.05
    leakage: float = 0.2
    resistance: float = 0.1
    latency: float = 0.03
    sensor_gain: float = 0.0


@dataclasses.dataclass(frozen=True)
class Simulation(Message):
    """The model parameters of a board type beyond its tables."""

    release: str = ""  # R32, R35, R36: selects files and their behaviour; "": a board without L4T
    revision: str = ""
    model: str = ""
    compatible: tuple[str, ...] = ()
    gpu_path: str = ""  # folder of the GPU's device
    governors: tuple[str, ...] = ("performance", "powersave", "userspace", "schedutil")
    gpu_governors: tuple[str, ...] = ()
    power_mode: int | None = None  # the initial mode, if the board type does not say
    optional_sensors: bool = False  # whether sensors of some carriers only are fitted
    domains: tuple[Domain, ...] = ()
    rails: tuple[Rail, ...] = ()
    sensor: Sensor = dataclasses.field(default_factory=Sensor)
    thermal: Thermal = dataclasses.field(default_factory=Thermal)
    latency: Latency = dataclasses.field(default_factory=Latency)
    clock_delay_s: ClockDelay = dataclasses.field(default_factory=ClockDelay)
    spread: Spread = dataclasses.field(default_factory=Spread)


@dataclasses.dataclass(frozen=True)
class Individual:
    """How one board differs from its type; factors around 1."""

    capacitance: float
    leakage: float
    resistance: float
    latency: float
    sensor_gain: float


def draw_individual(spread: Spread, seed: int) -> Individual:
    """The board that `seed` selects, reproducibly."""
    dice = random.Random(seed)
    names = [field.name for field in dataclasses.fields(Individual)]
    return Individual(**{name: 1 + getattr(spread, name) * dice.uniform(-1, 1) for name in names})


def read_simulation(board_type: BoardType) -> Simulation:
    """Read and check the section. Raises ProtocolError for a contradiction."""
    if not board_type.simulation:
        raise ProtocolError(f"{board_type.name} has no `simulation` section, so it cannot be simulated")
    try:
        simulation = Simulation.from_dict(board_type.simulation)
    except ProtocolError as error:
        raise ProtocolError(f"simulation of {board_type.name}: {error}") from error
    domains = {domain.name for domain in simulation.domains}
    problems = [f"cluster {c.name} has no domain" for c in board_type.clusters if c.name not in domains]
    tables = {domain.name: domain.freqs_hz for domain in simulation.domains}
    problems += [
        f"cluster {cluster.name} has no clocks"
        for cluster in board_type.clusters
        if not cluster.freqs_hz and not tables.get(cluster.name)
    ]
    if board_type.gpu and GPU not in domains:
        problems.append("the GPU has no domain")
    if board_type.memory and MEMORY not in domains:
        problems.append("the memory has no domain")
    modelled = {rail.name for rail in simulation.rails}
    problems += [
        f"rail {rail} has no model"
        for chip in board_type.power.chips
        if chip.fitted or simulation.optional_sensors
        for rail in chip.rails
        if rail and rail not in modelled
    ]
    problems += [
        f"rail {rail.name} sums an unknown domain {name}"
        for rail in simulation.rails
        for name in rail.domains
        if name not in domains
    ]
    # No steady state exists if leakage heats the die by more than a degree per degree.
    runaway = sum(domain.leak_w_per_c * domain.heat for domain in simulation.domains)
    if runaway * simulation.thermal.resistance_c_per_w * (1 + simulation.spread.leakage) > 0.5:
        problems.append("leakage grows too fast with temperature")
    if problems:
        raise ProtocolError(f"simulation of {board_type.name}: {'; '.join(problems)}")
    return simulation
