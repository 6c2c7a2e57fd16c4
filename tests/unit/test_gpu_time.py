"""How clocks and repeated launches make up the time of a virtual board's GPU."""

from __future__ import annotations

import pytest

from farm.virtual import gpu_time

FACTS = {"arch": "sm_53", "processors": 1, "memory_bytes_per_s": 25.6e9, "stretch": 1.0}


def test_clocks_stretch_what_hangs_on_them() -> None:
    """Work of processors goes with the GPU's clock, traffic with the memory's."""
    computing, moving = gpu_time.Kernel(1e6, 1e3), gpu_time.Kernel(1e3, 1e8)

    def seconds(kernel: gpu_time.Kernel, gpu_hz: float, memory: float) -> float:
        return gpu_time.compute_seconds([kernel], FACTS, gpu_hz, memory)[0]

    assert seconds(computing, 4e8, 1.0) == pytest.approx(2 * seconds(computing, 8e8, 1.0), rel=0.01)
    assert seconds(computing, 4e8, 0.5) == pytest.approx(seconds(computing, 4e8, 1.0))
    assert seconds(moving, 4e8, 0.5) == pytest.approx(2 * seconds(moving, 4e8, 1.0), rel=0.01)
    assert seconds(moving, 8e8, 1.0) == pytest.approx(seconds(moving, 4e8, 1.0))


def test_a_kernel_that_needs_both_takes_longer_than_each() -> None:
    """Compute and memory time overlap in part: equal ones take 2^(1 / 2.5) as long as one."""
    both, one = gpu_time.Kernel(1e6, 0.0), gpu_time.Kernel(1e6, 1e6 / 8e8 * gpu_time.REACHED * 25.6e9)
    alone_s, together_s = (gpu_time.compute_seconds([kernel], FACTS, 8e8, 1.0)[0] for kernel in (both, one))
    assert together_s == pytest.approx(2**0.4 * alone_s, rel=0.01)


def test_equal_launches_are_one_kernel() -> None:
    """By how often one call makes them."""
    first, second = gpu_time.Kernel(10.0, 5.0, 1, "a"), gpu_time.Kernel(20.0, 5.0, 1, "a")
    kernels = gpu_time.sum_up([first, second, first, first, second, first], 2)
    assert [(kernel.cycles, kernel.times) for kernel in kernels] == [(10.0, 2), (20.0, 1)]
