"""Fits over clocks, drift, fronts: checked against worlds whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_agent.protocol import EVERY_CLUSTER, Clocks, DomainClocks
from farm.points.grid import GridRequest, plan_grid
from farm.points.values import Estimate, Grid
from farm.sweep.fit.drift import MAX_DRIFT, estimate_drift
from farm.sweep.fit.model import Data, fit_latency, fit_power
from farm.sweep.fit.pick import front_rows, hypervolume, improvements, reference_point
from farm.sweep.fit.terms import Knee, build_terms

TABLE = tuple(100_000_000 * step for step in range(1, 13))
CLOCKS = Clocks((DomainClocks("cpu", available_hz=TABLE, cpus=(0, 1)),), DomainClocks("gpu", available_hz=TABLE))


def plan() -> Grid:
    return plan_grid(CLOCKS, GridRequest({EVERY_CLUSTER: ()}, gpu_freqs_hz=()))


def truth(grid: Grid, norm: float) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Latency in s and power in W of work that is half the CPU's and half the GPU's, with a knee in the GPU's."""
    cpu, gpu = (np.array([point.domains[i].freq_hz for point in grid.points]) / TABLE[-1] for i in (0, 1))
    latency = 0.01 * (1 + ((0.5 / cpu) ** norm + (0.5 / gpu) ** norm) ** (1 / norm))
    volt = Knee(0.5, 0.3).voltage(gpu)
    return latency, 2.0 + 0.8 * cpu + 2.5 * gpu * volt**2 * (0.005 / gpu / latency)


@pytest.mark.parametrize("norm", [1.0, 3.0])
def test_twenty_points_tell_the_other_124(norm: float) -> None:
    """From noisy measurements, for every overlap of CPU and GPU; most intervals hold the truth."""
    grid, rng = plan(), np.random.default_rng(1)
    latency, power = truth(grid, norm)
    rows = tuple(int(row) for row in rng.choice(len(grid), 20, replace=False))
    noise = 0.004 * rng.standard_normal((2, 20))
    sds = np.full(20, 0.004)
    terms = build_terms(grid.points)
    times = fit_latency(terms, Data(rows, np.log(latency[list(rows)]) + noise[0], sds))
    watts = fit_power(terms, Data(rows, np.log(power[list(rows)]) + noise[1], sds), np.exp(times.mean))
    for posterior, true in ((times, latency), (watts, power)):
        errors = np.abs(posterior.mean - np.log(true))
        assert float(np.median(errors)) < 0.01
        assert float(np.mean(errors < 1.96 * posterior.sd)) > 0.85


def test_what_was_not_asked_is_less_certain() -> None:
    """A fit from low clocks alone is less sure of the highest ones than of those between."""
    grid = plan()
    latency, _ = truth(grid, 1.0)
    slow = [r for r, p in enumerate(grid.points) if max(d.freq_hz or 0 for d in p.domains) <= TABLE[5]]
    rows = tuple(slow[::2])
    posterior = fit_latency(
        build_terms(grid.points), Data(rows, np.log(latency[list(rows)]), np.full(len(rows), 0.003))
    )
    assert posterior.sd[-1] > 2 * posterior.sd[slow].max()


def test_an_error_that_all_share_widens_intervals_but_moves_nothing() -> None:
    """Drift that is not known well is in every interval once, not averaged away over many points."""
    grid = plan()
    latency, _ = truth(grid, 1.0)
    rows = tuple(range(0, 144, 7))
    terms, logs = build_terms(grid.points), np.log(latency[list(rows)])
    alone = fit_latency(terms, Data(rows, logs, np.full(len(rows), 0.003)))
    shared = fit_latency(terms, Data(rows, logs, np.full(len(rows), 0.003), shared_sd=0.02))
    assert np.allclose(alone.mean, shared.mean)
    assert shared.sd.min() >= 0.02


def test_steady_drift_is_found_and_taken_out() -> None:
    """Five visits of an anchor that slows down by 4 % correct the visits between them."""
    rng = np.random.default_rng(3)
    anchors = np.arange(5) * 100.0
    logs = 1.0 + 0.04 * anchors / 400 + 0.001 * rng.standard_normal(5)
    between = np.array([0.0, 150.0, 400.0])
    found = estimate_drift(anchors.tolist(), logs.tolist(), [0.001] * 5, between)
    assert np.allclose(found.shift, 0.04 * between / 400, atol=0.006)
    assert found.largest == pytest.approx(0.04, abs=0.006)
    assert not found.is_too_large


def test_drift_beyond_repair_or_unknown_is_said() -> None:
    """A board that slowed down by a third is not corrected but refused. No correction, and intervals as wide as what
    boards are known to do.
    """
    found = estimate_drift([0, 100, 200], [0.0, 0.15, 0.3], [0.002] * 3, np.array([200.0]))
    assert found.is_too_large
    assert found.largest > MAX_DRIFT
    found = estimate_drift([], [], [], np.array([10.0, 20.0]))
    assert not found.shift.any()
    assert (found.sd > 0.005).all()


def test_figures_of_a_front_are_sound() -> None:
    """Two steps of a staircase, computed by hand; points beyond the corner count for nothing. Anything else is a
    mistake of the caller.
    """
    latency, cost = np.array([1.0, 2.0, 9.0]), np.array([3.0, 1.0, 0.5])
    assert hypervolume(latency, cost, (4.0, 4.0)) == pytest.approx(1 * 1 + 2 * 3)
    assert hypervolume(latency[2:], cost[2:], (4.0, 4.0)) == 0
    for value, low, high in ((0.0, 0.0, 1.0), (1.0, 1.1, 2.0), (1.0, 0.5, float("inf"))):
        with pytest.raises(ValueError, match="not an estimate"):
            Estimate(value, low, high)
    assert Estimate.of_log(0.0, 0.01).log_sd == pytest.approx(0.01, rel=1e-3)


numbers = st.floats(0.1, 10)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12), st.tuples(numbers, numbers))
@settings(max_examples=60)
def test_an_improvement_is_the_difference_of_hypervolumes(
    points: list[tuple[float, float]], new: tuple[float, float]
) -> None:
    """What a point is said to add is what the whole is worth with it, less without."""
    latency, cost = map(np.array, zip(*points, strict=True))
    corner = reference_point(latency, cost)
    alone = hypervolume(latency, cost, corner)
    both = hypervolume(np.append(latency, new[0]), np.append(cost, new[1]), corner)
    gain = improvements(np.array([new[0]]), np.array([new[1]]), latency, cost, corner)
    assert gain[0] == pytest.approx(both - alone, abs=1e-9)
    rows = front_rows(latency, cost)
    assert np.all(np.diff(latency[rows]) > 0)
    assert np.all(np.diff(cost[rows]) < 0)
