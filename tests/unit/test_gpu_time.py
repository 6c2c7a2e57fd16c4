"""How clocks, occupancy and repeated launches make up the time of a virtual board's GPU."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from device_agent.protocol.processors import WARP, BlockWork, count_cycles, count_resident, find_processor
from device_agent.virtual import gpu_time

FACTS = {"arch": "sm_53", "processors": 1, "memory_bytes_per_s": 25.6e9, "stretch": 1.0}
BOARDS = st.sampled_from(("sm_53", "sm_62", "sm_72", "sm_87"))


def test_registers_and_shared_memory_limit_what_is_resident() -> None:
    """By the rules of the architecture, and one block always is."""
    unit = find_processor("sm_53")
    assert count_resident(unit, 128, 32, 0) == 16  # threads and registers alike
    assert count_resident(unit, 128, 128, 0) == 4
    assert count_resident(unit, 128, 32, 48 << 10) == 1
    assert count_resident(unit, 32, 16, 0) == 32


def test_few_warps_do_not_hide_what_many_do() -> None:
    """The same work in blocks of which only one fits takes longer."""
    work = BlockWork(128, issued=4000, shared_turns=100, sectors=100, waits=4, barrier_cycles=120, held=1)
    unit = find_processor("sm_53")
    many, one = (count_cycles(work, unit, 64, resident, 1) for resident in (16, 1))
    assert one > 2 * many


def test_clocks_stretch_what_hangs_on_them() -> None:
    """Work of processors goes with the GPU's clock, traffic with the memory's."""
    computing, moving = gpu_time.Kernel(1e6, 1e3), gpu_time.Kernel(1e3, 1e8)

    def seconds(kernel: gpu_time.Kernel, gpu_hz: float, memory: float) -> float:
        return gpu_time.compute_seconds([kernel], FACTS, gpu_hz, memory)[0]

    assert seconds(computing, 4e8, 1.0) == pytest.approx(2 * seconds(computing, 8e8, 1.0), rel=0.01)
    assert seconds(computing, 4e8, 0.5) == seconds(computing, 4e8, 1.0)
    assert seconds(moving, 4e8, 0.5) == pytest.approx(2 * seconds(moving, 4e8, 1.0), rel=0.01)
    assert seconds(moving, 8e8, 1.0) == seconds(moving, 4e8, 1.0)


def test_equal_launches_are_one_kernel() -> None:
    """By how often one call makes them."""
    first, second = gpu_time.Kernel(10.0, 5.0, 1, "a"), gpu_time.Kernel(20.0, 5.0, 1, "a")
    kernels = gpu_time.sum_up([first, second, first, first, second, first], 2)
    assert [(kernel.cycles, kernel.times) for kernel in kernels] == [(10.0, 2), (20.0, 1)]


@hypothesis.given(
    BOARDS, st.integers(1, 1024), *[st.floats(0, 1e7)] * 5, st.integers(1, 64), st.integers(1, 10**5), st.integers(1, 8)
)
def test_blocks_take_what_their_instructions_take(
    arch: str,
    threads: int,
    issued: float,
    turns: float,
    sectors: float,
    waits: float,
    barriers: float,
    held: int,
    blocks: int,
    processors: int,
) -> None:
    """No occupancy has a processor issue more than it has lanes for."""
    unit = find_processor(arch)
    work = BlockWork(threads, issued, turns, sectors, waits, barriers, held)
    resident = count_resident(unit, threads, 32, 0)
    cycles = count_cycles(work, unit, blocks, resident, processors) * (1 + 1e-9)
    assert cycles >= blocks * issued * WARP / (unit.lanes * processors)
    assert cycles >= math.ceil(blocks / processors) * turns
