"""The terms of the fit: what a point's clocks contribute to its latency and power, as plain arrays over a grid.

`model` fits their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from farm.points.values import GridPoint

Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
# Possible minimum speeds of a clock that follows the load; one of them will be near enough.
_LEAST = (0.3, 0.6)


@dataclasses.dataclass(frozen=True)
class Domain:
    """One clock over all points: `speed` relative to its highest (0 where it is off), units relative to the most."""

    name: str
    speed: Floats
    units: Floats
    held: bool = True

    @property
    def speeds(self) -> list[Floats]:
        """Return its speed; for a clock that follows the load also its possible minima."""
        return [self.speed, *(np.maximum(self.speed, least) for least in _LEAST if not self.held)]

    @property
    def varies(self) -> bool:
        return bool(np.ptp(self.speed) or np.ptp(self.units))

    @property
    def on(self) -> Floats:
        return (self.speed > 0).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of every grid point. `place` is where a point lies for the residual: columns in [0, 1]."""

    domains: tuple[Domain, ...]
    place: Floats

    @property
    def size(self) -> int:
        return int(self.place.shape[0])

    def take(self, rows: Sequence[int]) -> Terms:
        """Return the terms of some points."""
        at = list(rows)
        return Terms(tuple(Domain(d.name, d.speed[at], d.units[at], d.held) for d in self.domains), self.place[at])


@dataclasses.dataclass(frozen=True)
class Knee:
    """A domain's voltage: 1 up to the relative speed `at`, from there on linear to 1 + `rise` at full speed.

    Jetson CPUs and GPUs have such a floor (tables in the L4T kernel, tegra210-dvfs.c), and so have server GPUs
    (Schoonhoven et al. 2022, Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning).
    """

    at: float = 1.0
    rise: float = 0.0

    def voltage(self, speed: Floats) -> Floats:
        if self.at >= 1:
            return np.ones_like(speed)
        return np.asarray(1 + self.rise * np.maximum(0.0, speed - self.at) / (1 - self.at))


def build_terms(points: Sequence[GridPoint]) -> Terms:
    """Build the terms of a grid; a clock that never changes is part of the constant."""
    domains: list[Domain] = []
    columns: list[Floats] = []
    for index, setting in enumerate(points[0].domains):
        settings = [point.domains[index] for point in points]
        freqs = np.array([float(s.freq_hz or 0) for s in settings])
        units = np.array([float(s.units) for s in settings])
        if not freqs.max():
            # Only the core count of this clock is known.
            freqs = (units > 0).astype(np.float64)
        freqs = np.where(units > 0, freqs, 0.0)
        held = all(s.held for s in settings if s.units)
        domain = Domain(setting.name, freqs / max(freqs.max(), 1.0), units / max(units.max(), 1.0), held)
        if not domain.varies:
            continue
        domains.append(domain)
        on = domain.speed > 0
        # Distances in time matter, and time goes with 1 / f; the logarithm lies between that and f.
        logs = np.where(on, np.log(np.where(on, domain.speed, 1.0)), 0.0)
        columns += [logs, domain.units, on.astype(np.float64)]
        columns.append(np.array([float(s.held) for s in settings]))
    variants = sorted({point.variant for point in points})
    columns += [np.array([float(point.variant == name) for point in points]) for name in variants[1:]]
    spread = [column for column in columns if np.ptp(column)]
    scaled = [(column - column.min()) / np.ptp(column) for column in spread]
    place = np.stack(scaled, axis=1) if scaled else np.zeros((len(points), 0))
    return Terms(tuple(domains), place)


def latency_terms(terms: Terms) -> Floats:
    """Return the columns of time in their own units: a constant, each clock's part. Shape (points, terms)."""
    columns = [np.ones(terms.size)]
    shared = [domain for domain in terms.domains if domain.name not in ("gpu", "memory")]
    for domain in terms.domains:
        columns += [_inverse(speed) for speed in domain.speeds]
        if np.ptp(domain.units):
            columns.append(_inverse(domain.speed * domain.units))
        if domain in shared:
            # Work of cores that are offline moves to the others.
            columns += [(1 - domain.on) * _inverse(other.speed) for other in shared if other is not domain]
    if len(shared) > 1:
        # Work that is spread over all cores: by their sum where it is divided evenly in time, by the slowest where not.
        columns.append(_inverse(sum((d.speed * d.units for d in shared), np.zeros(terms.size))))
        columns.append(np.max([_inverse(d.speed) for d in shared], axis=0))
    return _distinct(columns)


def power_terms(terms: Terms, knees: Sequence[Knee], latency: Floats) -> Floats:
    """Return the columns of power: idle, and for each clock what always switches, what works, and what leaks.

    Work has a fixed number of cycles per inference, each costing C V^2: power V^2 / latency. So utilisation is not
    needed as an input. `latency` is in its own units. Shape (points, terms), the same for all knees.
    """
    per_call = 1 / latency
    columns = [np.ones(terms.size), per_call]
    for domain, knee in zip(terms.domains, knees, strict=True):
        volt = knee.voltage(domain.speed)
        columns += [domain.units * speed * volt**2 for speed in domain.speeds]
        columns.append(domain.on * volt**2 * per_call)
        if domain.name != "memory":
            columns.append(domain.units * domain.on * volt)
    return np.stack(columns, axis=1)


def _inverse(speed: Floats) -> Floats:
    """Return 1 / speed, 0 where it is off."""
    on = speed > 0
    return np.where(on, 1 / np.where(on, speed, 1.0), 0.0)


def _distinct(columns: Sequence[Floats]) -> Floats:
    """Scale columns to a maximum of 1, and drop repeated ones."""
    kept: list[Floats] = []
    for column in columns:
        if not column.any():
            continue
        scaled = column / column.max()
        if not any(np.allclose(scaled, other, atol=1e-9) for other in kept):
            kept.append(scaled)
    return np.stack(kept, axis=1)
