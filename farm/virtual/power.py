"""The power of a virtual board's parts, from their clocks and load; pure. `board.py` adds it up over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from farm.virtual.parameters import Domain, Individual, Rail

# Constant W, and W per degree Celsius of the die.
Power = tuple[float, float]
_LEAK_REFERENCE_C = 25.0


def draw(domain: Domain, individual: Individual, units: float, powered: float, busy: float, hz: float) -> Power:
    """The power of `units` powered units (cores), a share `powered` of all, each `busy` for that share."""
    volt = interpolate_v(domain.voltage_v, hz)
    highest_v = domain.voltage_v[-1][1] if domain.voltage_v else volt
    activity = domain.idle_activity + (1 - domain.idle_activity) * busy
    switching_w = individual.capacitance * domain.capacitance_f * volt**2 * hz * activity * units
    leak = individual.leakage * powered * volt / highest_v
    constant_w = domain.constant_w + switching_w + leak * (domain.leak_w - domain.leak_w_per_c * _LEAK_REFERENCE_C)
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
