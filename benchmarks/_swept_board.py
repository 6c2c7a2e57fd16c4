"""A virtual board with parameters drawn at random, doing work drawn at random: exact truth, and noisy visits.

Power, heat, clocks and the memory's floor are those of `farm.virtual`; work on clusters, GPU and memory that
overlaps more or less is this module's, since virtual boards time CPU code only. The ranges are `RANGES`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import _machine  # noqa: F401  makes the checkout importable
import numpy as np

from device_agent.board_types import BoardType, load_board_types
from device_agent.protocol import EVERY_CLUSTER, Clocks, DomainClocks
from farm.inventory.board_types import require_board_type
from farm.measure.statistics import summarise
from farm.points.grid import Coupling, GridRequest, plan_grid
from farm.points.values import Z95, Estimate, Grid, GridPoint, PointMeasurement
from farm.sweep.fit.terms import Floats
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load

# Factors on what the board type's file says, and what is drawn outright. Uniform unless named otherwise.
RANGES: dict[str, tuple[float, float]] = {
    "capacitance_factor": (0.6, 1.5),
    "idle_activity_factor": (0.5, 2.0),
    "leakage_factor": (0.5, 2.0),
    "constant_power_factor": (0.6, 1.5),
    "knee_frequency_factor": (0.75, 1.15),
    "voltage_rise_factor": (0.5, 1.4),
    "thermal_resistance_factor": (0.7, 1.3),
    "latency_at_highest_clocks_s": (0.005, 0.06),  # log-uniform
    "overlap_norm": (1.0, 6.0),  # 1: parts one after the other; the higher, the more they overlap
    "serial_share": (0.1, 0.9),  # of the CPU's part
    "waiting_share": (0.0, 1.0),  # of the time that a core is busy without work of its own
    "sample_noise": (0.003, 0.02),  # relative standard deviation of one latency sample
    "visit_noise": (0.0005, 0.004),  # the same between visits, for latency and for power
    "drift_at_end": (-0.03, 0.03),  # of latency and of power, linear part
    "drift_wave": (0.0, 0.01),  # amplitude of the rest
    "start_temperature_c": (-1.5, 1.5),  # how far a visit starts from the middle of the window allowed
}
WINDOW_S = 5.0
# Settling, waiting for the start temperature, the idle baseline.
OVERHEAD_S = 4.0
_UPDATE_S = 0.4224
# One value of the INA3221 on the boards' total rails: 8 mA at 5.09 V, 2 mA at 19 V.
_STEP_W = {"jetson-nano": 0.0407, "jetson-tx2": 0.038}
_MAX_SAMPLES = 40
_TIMESCALE_S = 600.0
ALL: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """Which grid of which board type."""

    board_type: str
    request: GridRequest


CASES = {
    "jetson-nano": Case("jetson-nano", GridRequest({EVERY_CLUSTER: ALL}, gpu_freqs_hz=ALL)),
    "jetson-tx2": Case(
        "jetson-tx2", GridRequest({EVERY_CLUSTER: ALL}, cores=((0, 3, 4, 5), (0, 1, 2, 3, 4, 5)), gpu_freqs_hz=ALL)
    ),
    "jetson-nano, CPU only": Case("jetson-nano", GridRequest({EVERY_CLUSTER: ALL})),
}


def describe_clocks(board: VirtualBoard) -> Clocks:
    """What an agent of this board would report."""
    clusters = tuple(
        DomainClocks(c.name, available_hz=c.clock.table, cpus=c.cpus, online=c.cpus, isolated=c.isolated)
        for c in board.clusters.values()
    )
    gpu = DomainClocks("gpu", available_hz=board.gpu.clock.table) if board.gpu else None
    memory = DomainClocks("memory", available_hz=board.memory.table) if board.memory else None
    return Clocks(clusters, gpu, memory)


class NoisyBoard:
    """Noisy visits to points whose truth is known, by grid row: `latency_s`, and `power_w` at 45 C or None.

    `per_c` is W per C, `step_w` one value of the power sensor.
    """

    def __init__(
        self, grid: Grid, latency_s: Floats, power_w: Floats | None, rng: np.random.Generator, step_w: float, per_c: Any
    ) -> None:
        self.grid, self.latency_s, self.power_w, self.rng = grid, latency_s, power_w, rng
        self.energy_j = latency_s if power_w is None else latency_s * power_w
        self._step_w, self._per_c = step_w, per_c * np.ones(len(grid))
        self.rows = {point.key: row for row, point in enumerate(grid.points)}
        self.visits = 0
        self._sample_noise = self._draw("sample_noise")
        self._visit_noise = (self._draw("visit_noise"), self._draw("visit_noise"))
        self._drifts = [(self._draw("drift_at_end"), self._draw("drift_wave"), self._wave()) for _ in range(2)]

    def _draw(self, name: str) -> float:
        return float(self.rng.uniform(*RANGES[name]))

    def _wave(self) -> tuple[float, float]:
        return float(self.rng.uniform(0.5, 2.0)), float(self.rng.uniform(0, 2 * math.pi))

    def drift(self, quantity: int, at_s: float) -> float:
        """How far the board's latency (0) or power (1) has moved since the sweep began, as a logarithm."""
        end, wave, (speed, phase) = self._drifts[quantity]
        passed = at_s / _TIMESCALE_S
        return end * passed + wave * (math.sin(speed * 2 * math.pi * passed + phase) - math.sin(phase))

    def visit(self, key: str) -> PointMeasurement:
        """Measure one point once, as a board would."""
        row = self.rows[key]
        at_s = self.visits * (WINDOW_S + OVERHEAD_S)
        self.visits += 1
        latency_shift = self.drift(0, at_s) + self._visit_noise[0] * self.rng.standard_normal()
        middle = self.latency_s[row] * math.exp(latency_shift)
        count = int(np.clip(WINDOW_S / middle, 3, _MAX_SAMPLES))
        samples = middle * (1 + self._sample_noise * self.rng.standard_normal(count))
        summary = summarise(samples)
        latency = Estimate(summary.median, summary.ci_low, summary.ci_high)
        p95_s = float(np.quantile(samples, 0.95))
        found = PointMeasurement(key, latency, at_s, p95_s, board="benchmark", simulated=True)
        return found if self.power_w is None else self._add_power(found, row)

    def _add_power(self, found: PointMeasurement, row: int) -> PointMeasurement:
        assert self.power_w is not None
        heat_w = self._per_c[row] * self._draw("start_temperature_c")
        true_w = (self.power_w[row] + heat_w) * math.exp(
            self.drift(1, found.at_s) + self._visit_noise[1] * self.rng.standard_normal()
        )
        updates = int(WINDOW_S / _UPDATE_S)
        values = true_w + 0.5 * self._step_w * self.rng.standard_normal(updates)
        values = np.round(values / self._step_w) * self._step_w
        power_sd = float(values.std(ddof=1)) / math.sqrt(updates) + self._step_w / math.sqrt(12 * updates)
        watt = float(values.mean())
        power = Estimate(watt, watt - Z95 * power_sd, watt + Z95 * power_sd)
        energy = Estimate.of_log(math.log(watt) + found.latency.log, math.hypot(found.latency.log_sd, power.log_sd))
        return dataclasses.replace(found, power=power, energy=energy)


class SweptBoard(NoisyBoard):
    """Board and work number `seed` of a case. `latency_s`, `power_w` and `energy_j` are the truth, by grid row."""

    def __init__(self, case: Case, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._now_s = 1000.0
        self._board = VirtualBoard(_draw_type(case.board_type, self.rng), seed, lambda: self._now_s)
        grid = plan_grid(describe_clocks(self._board), case.request, _coupling(case.board_type))
        self._draw_work()
        truths = [self._find_truth(point) for point in grid.points]
        latency, power, per_c = (np.array(column) for column in zip(*truths, strict=True))
        step_w = _STEP_W[case.board_type]
        super().__init__(grid, latency / latency.min() * self._fastest_s, power, self.rng, step_w, per_c)

    def _draw_work(self) -> None:
        names = [*self._board.clusters, "gpu", "memory", "constant"]
        shares = self.rng.dirichlet([1.0] * len(names))
        self._work = dict(zip(names, map(float, shares), strict=True))
        low, high = RANGES["latency_at_highest_clocks_s"]
        self._fastest_s = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        self._norm, self._serial, self._waiting = map(self._draw, ("overlap_norm", "serial_share", "waiting_share"))

    def _set_clocks(self, point: GridPoint) -> None:
        board = self._board
        online = point.point.cores_online or board.cpus
        with board.change():
            for cpu in board.cpus:
                if (cpu in board.online) != (cpu in online):
                    board.set_online(cpu, cpu in online)
            for name, hz in point.point.cpu_freq_hz.items():
                board.clusters[name].clock.set_limits(hz, hz)
            if board.gpu and point.point.gpu_freq_hz:
                board.gpu.clock.set_limits(point.point.gpu_freq_hz, point.point.gpu_freq_hz)

    def _find_truth(self, point: GridPoint) -> tuple[float, float, float]:
        """(latency in units of its own, W at the reference temperature, W per C)."""
        board = self._board
        self._set_clocks(point)
        parts: dict[str, float] = {}
        for name, cluster in board.clusters.items():
            count = len(board.online_in(cluster))
            runs_on = cluster if count else next(c for c in board.clusters.values() if board.online_in(c))
            count = count or len(board.online_in(runs_on))
            stretch = self._serial + (1 - self._serial) * len(cluster.cpus) / count
            parts[name] = self._work[name] * stretch * runs_on.clock.table[-1] / runs_on.hz
        if board.gpu:
            parts["gpu"] = self._work["gpu"] * board.gpu.clock.table[-1] / board.gpu.clock.max_hz
        # How fast memory is follows from the load, which follows from how fast memory is: a few turns settle it.
        for _ in range(4):
            memory_hz = board.memory_hz
            parts["memory"] = self._work["memory"] * (board.memory.table[-1] / memory_hz if board.memory else 1.0)
            latency = self._work["constant"] + sum(part**self._norm for part in parts.values()) ** (1 / self._norm)
            self._set_loads(parts, latency)
            if board.memory_hz == memory_hz:
                break
        watt, celsius = board.exact_power_w(TOTAL), board.temperature_c
        self._now_s += 30.0
        later_watt, later_celsius = board.exact_power_w(TOTAL), board.temperature_c
        per_c = (later_watt - watt) / (later_celsius - celsius) if later_celsius != celsius else 0.0
        # A visit starts from the same temperature everywhere and lasts much shorter than the board's time constant.
        return latency, watt + per_c * (45.0 - celsius), per_c

    def _set_loads(self, parts: Mapping[str, float], latency: float) -> None:
        """Who works, and for which share of the time."""
        shares = {name: min(1.0, part / latency) for name, part in parts.items()}
        traffic = min(0.8, shares["memory"])
        for index, (name, cluster) in enumerate(self._board.clusters.items()):
            count = len(self._board.online_in(cluster))
            parallel = 1 + (count - 1) * (1 - self._serial)
            waits = self._waiting * (1 - shares[name]) if index == 0 else 0.0
            rest = {"memory": traffic, "gpu": shares.get("gpu", 0.0)} if index == 0 else {}
            self._board.set_load(name, Load(name, (shares[name] * parallel + waits) if count else 0.0, **rest))


@functools.cache
def _board_types() -> dict[str, BoardType]:
    return load_board_types()


@functools.cache
def _coupling(name: str) -> Coupling:
    return Coupling.of(require_board_type(name))


def _draw_type(name: str, rng: np.random.Generator) -> Any:
    board_type = _board_types()[name]
    section = dict(board_type.simulation)
    section["domains"] = [_draw_domain(domain, rng) for domain in section["domains"]]
    thermal = dict(section["thermal"])
    # Nothing throttles here: points that do are left out of a sweep, which is tested elsewhere.
    thermal |= {"trip_c": 200.0, "critical_c": 210.0}
    thermal["resistance_c_per_w"] *= float(rng.uniform(*RANGES["thermal_resistance_factor"]))
    section["thermal"] = thermal
    return dataclasses.replace(board_type, simulation=section)


def _draw_domain(domain: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    drawn = dict(domain)
    for field, factor in (
        ("capacitance_f", "capacitance_factor"),
        ("idle_activity", "idle_activity_factor"),
        ("leak_w", "leakage_factor"),
        ("constant_w", "constant_power_factor"),
    ):
        factor_value = float(rng.uniform(*RANGES[factor]))
        if field in drawn:
            drawn[field] *= factor_value
    if table := drawn.get("voltage_v"):
        stretch = float(rng.uniform(*RANGES["knee_frequency_factor"]))
        rise = float(rng.uniform(*RANGES["voltage_rise_factor"]))
        drawn["voltage_v"] = _draw_voltages(table, stretch, rise)
    return drawn


def _draw_voltages(table: Sequence[Sequence[float]], stretch: float, rise: float) -> list[list[float]]:
    """The first entry, the floor's end, moves by `stretch`; the top clock stays where it is."""
    low_hz, low_v = table[0]
    high_hz = table[-1][0]
    moved_hz = low_hz * stretch
    return [
        [int(moved_hz + (hz - low_hz) * (high_hz - moved_hz) / (high_hz - low_hz)), low_v + (volt - low_v) * rise]
        for hz, volt in table
    ]
