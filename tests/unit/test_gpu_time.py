"""What a kernel's source has a GPU do, and how long a virtual board's takes for it."""

from __future__ import annotations

import dataclasses

import pytest

from device_agent.protocol.processors import BlockWork, count_cycles, count_resident, find_processor
from device_agent.virtual import gpu_source, gpu_time
from device_agent.virtual.gpu_source import Counts

SOURCE = """// farm: scale registers=20 shared_bytes=512
extern "C" __global__ void __launch_bounds__(128) scale(float* __restrict__ a, float* __restrict__ b) {
  __shared__ alignas(64) float s[128];
  alignas(64) float l[4];
  s[((int)threadIdx.x)] = a[((((int)blockIdx.x) * 128) + ((int)threadIdx.x))];
  __syncthreads();
  for (int k = 0; k < 10; ++k) {
    l[(k & 3)] = (l[(k & 3)] + (s[((((int)threadIdx.x) * STRIDE) & 127)] * 0x1.8p+0f/*1.5*/));
  }
  if (((int)threadIdx.x) < 32) {
    b[(((int)blockIdx.x) + (((int)threadIdx.x) * PITCH))] = l[0];
  }
}
"""
FACTS = {"arch": "sm_53", "processors": 1, "memory_bytes_per_s": 25.6e9, "stretch": 1.0}


def count(stride: int = 1, pitch: int = 1, source: str = SOURCE) -> Counts:
    """The counts of a block of the kernel, its strides put in."""
    return gpu_source.count(
        source.replace("STRIDE", str(stride)).replace("PITCH", str(pitch)), "scale", (8, 1, 1), (128, 1, 1)
    )


def launch(**fields: object) -> gpu_time.Launch:
    """A start of it."""
    source = SOURCE.replace("STRIDE", "1").replace("PITCH", "1")
    made = gpu_time.Launch(source, "scale", (64, 1, 1), (128, 1, 1), 0, (1 << 20, 1 << 20))
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_what_a_block_does_is_counted_by_warps_and_sectors() -> None:
    """Four warps read 128 floats in 16 sectors; ten rounds of one multiply-add each; one warp writes 4 sectors."""
    found = count()
    assert found.sectors == {0: 16, 1: 5}  # what it writes begins in the middle of a sector
    assert found.arithmetic == 4 * 10
    assert found.shared == 4 + 4 * 10
    assert (found.barriers, found.waits, found.held) == (1, 2, 4)
    assert gpu_source.read_usages(SOURCE) == {"scale": (20, 512)}


@pytest.mark.parametrize(("stride", "turns"), [(1, 1), (2, 2), (4, 4), (32, 4), (0, 1)])
def test_conflicts_of_shared_memory_cost_turns(stride: int, turns: int) -> None:
    """As many as there are words in one bank; threads that read the same word share it."""
    assert count(stride).shared == 4 + 10 * 4 * turns


def test_scattered_writes_move_a_sector_each() -> None:
    """Eight floats of a sector are wasted."""
    assert count(pitch=64).sectors[1] == 32


def test_vectors_are_read_as_wide_as_they_are() -> None:
    """Four floats a thread are four times as many sectors, asked for by one instruction."""
    wide = SOURCE.replace(
        "s[((int)threadIdx.x)] = a[((((int)blockIdx.x) * 128) + ((int)threadIdx.x))]",
        "*(float4*)(s + (((int)threadIdx.x) * 4)) = *(float4*)(a + (((int)threadIdx.x) * 4))",
    )
    found = count(source=wide)
    assert found.sectors[0] == 64
    assert found.shared == 4 * 4 + 40
    assert found.issued == count().issued


def test_a_kernel_that_is_not_there_counts_nothing() -> None:
    """And is taken for something that takes a little."""
    assert gpu_source.count(SOURCE, "other", (1, 1, 1), (32, 1, 1)) == Counts()
    (kernel,) = gpu_time.sum_up([launch(kernel="other")], FACTS, 1)
    assert kernel.cycles > 0


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


def test_what_the_cache_holds_moves_once() -> None:
    """An argument that each block reads again comes from memory again only as far as it is larger than the cache."""
    counts = Counts(sectors={0: 1000.0})
    assert gpu_time.count_bytes(counts, 10, (32_000,), 256 << 10) == 32_000
    assert gpu_time.count_bytes(counts, 10, (1 << 20,), 256 << 10) == 10 * 32_000
    assert gpu_time.count_bytes(Counts(sectors={0: 1e6}), 10, (1 << 20,), 256 << 10) > 20 << 20


def test_equal_launches_are_one_line() -> None:
    """By how often one call makes them."""
    first, second = launch(), launch(grid=(128, 1, 1))
    kernels = gpu_time.sum_up([first, second, first, first, second, first], FACTS, 2)
    assert [kernel.times for kernel in kernels] == [2, 1]
    assert kernels[1].cycles > 1.5 * kernels[0].cycles
