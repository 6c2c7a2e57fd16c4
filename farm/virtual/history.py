"""A virtual board's power, from clocks and load, and its exact history: pieces in which only temperature changed."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

from farm.virtual.parameters import Domain, Individual, Rail

# A piece ends only at a write, so this is hours of tuning; older ones are dropped.
_MAX_PIECES = 200_000

# The start of a board's own clock. Never 0, which marks a time that did not occur.
START_S = 1000.0
# Constant W, and W per degree Celsius of the die.
Power = tuple[float, float]
_LEAK_REFERENCE_C = 25.0
# The power of memory traffic over its share of the peak rate: fitted to a TX2 (`benchmarks/published_power.py`).
_TRAFFIC_EXPONENT = 0.75


class OwnClock:
    """Time that passes only on request."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Piece:
    """A stretch in which a rail draws constant_w + per_c T, while T relaxes from `start_c` to `final_c` with `tau_s`.

    `rails` holds (constant_w, per_c) per rail in the board's order.
    """

    start_s: float
    end_s: float
    start_c: float
    final_c: float
    tau_s: float
    rails: tuple[tuple[float, float], ...]
    busy_cores: float = 0.0
    drawn_j: tuple[float, ...] = ()  # each rail's energy before its start

    def temperature_c(self, at_s: float) -> float:
        return self.final_c + (self.start_c - self.final_c) * math.exp(-(at_s - self.start_s) / self.tau_s)

    def find_crossing_s(self, limit_c: float) -> float | None:
        """When T reaches `limit_c`; None if never."""
        ratio = (limit_c - self.final_c) / (self.start_c - self.final_c) if self.start_c != self.final_c else -1.0
        return self.start_s - self.tau_s * math.log(ratio) if 0 < ratio <= 1 else None

    def power_w(self, rail: int, at_s: float) -> float:
        constant_w, per_c = self.rails[rail]
        return constant_w + per_c * self.temperature_c(at_s)

    def energy_j(self, rail: int, start_s: float, end_s: float) -> float:
        """The integral of the rail's power, in closed form."""
        constant_w, per_c = self.rails[rail]
        if end_s <= start_s:
            return 0.0
        fallen = math.exp(-(start_s - self.start_s) / self.tau_s) - math.exp(-(end_s - self.start_s) / self.tau_s)
        degree_s = self.final_c * (end_s - start_s) + (self.start_c - self.final_c) * self.tau_s * fallen
        return constant_w * (end_s - start_s) + per_c * degree_s


class History:
    """Pieces in order of time, the last one open."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._starts: list[float] = []

    @property
    def start_s(self) -> float:
        """The earliest known time."""
        return self._starts[0]

    def begin(self, piece: Piece) -> None:
        """Start a new piece; one of zero length is replaced."""
        if self.pieces:
            last = self.pieces[-1]
            ended = (last.energy_j(rail, last.start_s, last.end_s) for rail in range(len(last.rails)))
            piece.drawn_j = tuple(map(sum, zip(last.drawn_j, ended, strict=True)))
            if last.end_s <= last.start_s:
                self.pieces.pop()
                self._starts.pop()
        else:
            piece.drawn_j = (0.0,) * len(piece.rails)
        self.pieces.append(piece)
        self._starts.append(piece.start_s)
        if len(self.pieces) > _MAX_PIECES:
            del self.pieces[: _MAX_PIECES // 4], self._starts[: _MAX_PIECES // 4]

    def power_w(self, rail: int, at_s: float) -> float:
        """The power of a rail at a time. Raises ValueError for an unknown one."""
        return self._find(at_s).power_w(rail, at_s)

    def _find(self, at_s: float) -> Piece:
        if at_s < self.start_s or at_s > self.pieces[-1].end_s + 1e-9:
            raise ValueError(f"known from {self.start_s:g} to {self.pieces[-1].end_s:g} s, not {at_s:g}")
        return self.pieces[bisect.bisect_right(self._starts, at_s) - 1]

    def drawn_j(self, rail: int, until_s: float) -> float:
        """The energy of a rail up to a time. Raises ValueError for an unknown one."""
        piece = self._find(until_s)
        return piece.drawn_j[rail] + piece.energy_j(rail, piece.start_s, until_s)

    def energy_j(self, rail: int, start_s: float, end_s: float) -> float:
        """The exact energy. Raises ValueError for a time that is dropped or in the future."""
        return self.drawn_j(rail, end_s) - self.drawn_j(rail, start_s)


def draw(
    domain: Domain, individual: Individual, units: float, powered: float, busy: float, hz: float, traffic: float = 0.0
) -> Power:
    """The power of `units` powered units (cores), a share `powered` of all, each `busy` for that share.

    `traffic` is the memory's, as a share of its peak rate.
    """
    volt = interpolate_v(domain.voltage_v, hz)
    highest_v = domain.voltage_v[-1][1] if domain.voltage_v else volt
    activity = domain.idle_activity + (1 - domain.idle_activity) * busy
    switching_w = individual.capacitance * domain.capacitance_f * volt**2 * hz * activity * units
    leak = individual.leakage * powered * volt / highest_v
    moving_w = domain.traffic_w * traffic**_TRAFFIC_EXPONENT
    constant_w = (
        domain.constant_w + moving_w + switching_w + leak * (domain.leak_w - domain.leak_w_per_c * _LEAK_REFERENCE_C)
    )
    return constant_w, leak * domain.leak_w_per_c


def add(powers: Iterable[Power]) -> Power:
    """Add powers."""
    found = list(powers)
    return sum(each[0] for each in found), sum(each[1] for each in found)


def sum_rails(rails: Iterable[Rail], drawn: Mapping[str, Power]) -> list[Power]:
    """The power on each rail, its regulator's loss included, from every domain's power."""
    sums = []
    for rail in rails:
        constant_w, per_c = add(drawn[name] for name in rail.domains)
        sums.append((constant_w / rail.efficiency, per_c / rail.efficiency))
    return sums


def sum_heat(domains: Iterable[Domain], drawn: Mapping[str, Power]) -> Power:
    """The heat into the die."""
    return add((drawn[d.name][0] * d.heat, drawn[d.name][1] * d.heat) for d in domains)


def interpolate_v(table: tuple[tuple[int, float], ...], hz: float) -> float:
    """The voltage at a clock: linear between entries, constant outside; 1 V without a table."""
    if not table:
        return 1.0
    for (low_hz, low_v), (high_hz, high_v) in itertools.pairwise(table):
        if hz < high_hz:
            return low_v + (high_v - low_v) * max(0.0, hz - low_hz) / (high_hz - low_hz)
    return table[-1][1]
