"""What a core can do, worked out from the times of kernels."""

from __future__ import annotations

import itertools

import pytest

from farm.errors import PermanentError
from farm.inventory.core_figures import find_differing, list_values
from farm.inventory.core_types import find_core_type
from farm.services.core_probe import find_caches, settle, work_out

KIB = 1 << 10
A57 = find_core_type("cortex-a57", "aarch64")


@pytest.mark.parametrize(
    ("cycles", "caches"),
    [
        # Zen 3 beside other work: a virtual machine's two cores, the second cache shared with its code.
        ({8: 6.1, 16: 6.1, 32: 6.3, 48: 14.3, 64: 14.3, 256: 16.5, 384: 21.8, 512: 23.2, 768: 41, 4096: 57}, (32, 512)),
        ({8: 4, 16: 4, 32: 4, 48: 9, 64: 12, 4096: 13}, (32, None)),
        ({8: 4, 16: 4}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_caches_end_where_loads_take_longer(cycles: dict[int, float], caches: tuple[int | None, int | None]) -> None:
    """The first at once, the second half way to what lies beyond it; an end that nobody saw is none."""
    found = find_caches({size * KIB: taken for size, taken in cycles.items()})
    assert found == tuple(size and size * KIB for size in caches)


def test_least_times_count_once_three_agree() -> None:
    """A disturbed round changes nothing; what never agrees is unknown when the time is over."""
    steady, wild = iter([9.0, 5.0, 5.1, 50.0, 5.05]), itertools.count(1.0, 10.0)
    clock = itertools.count()

    def run(asked: tuple[str, int]) -> float:
        return next(steady if asked[0] == "steady" else wild)

    found = settle(run, [("steady", 0), ("wild", 0)], lambda: float(next(clock)))
    assert found == {("steady", 0): (5.0, 5.1), ("wild", 0): None}


def test_a_slow_kernel_leaves_others_their_time() -> None:
    """One that takes seconds a turn has half of the minute, and one that takes tenths, and agrees late, the other."""
    now, turns = 0.0, {"slow": 0, "quick": 0}

    def run(asked: tuple[str, int]) -> float:
        nonlocal now
        now += {"slow": 7.0, "quick": 0.1}[asked[0]]
        turns[asked[0]] += 1
        return 100.0 / turns[asked[0]] if asked[0] == "slow" or turns["quick"] < 24 else 1.0

    found = settle(run, [("slow", 0), ("quick", 0)], lambda: now)
    assert (found["slow", 0], found["quick", 0]) == (None, (1.0, 1.0))


def test_figures_come_from_cycles() -> None:
    """Of a core at 2 GHz: what a cycle does; what was not told, or cannot be, is left out, and no clock is an error."""
    assert A57 is not None
    agreed = {
        ("clock", 0): (1e-6, 1.01e-6),
        ("latency", 0): (4e-6, 4e-6),
        ("products", 0): (0.5e-6, 0.5e-6),
        ("reads", A57.l1_bytes // 2): (1e-12, 1e-12),
        ("regions", 0): None,
    }
    counts = dict.fromkeys(agreed, 2000.0)
    figures = work_out(A57, agreed, counts, 4)
    assert figures.clock_hz == pytest.approx(2e9)
    assert {name: each.value for name, each in figures.found.items()} == pytest.approx(
        {"fma_latency": 4.0, "fma_pipes": 2.0}
    )
    assert {"load_pipes", "region_s", "l1_bytes"} <= set(figures.unknown)
    assert find_differing(list_values(figures.to_dict()), A57.list_figures()) == {"fma_pipes": 2.0}
    with pytest.raises(PermanentError, match="does not hold still"):
        work_out(A57, agreed | {("clock", 0): None}, counts, 4)
