"""What a kernel's source has a GPU do, and how long a virtual board's takes for it."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from device_agent.protocol.processors import WARP, BlockWork, count_cycles, count_resident, find_processor
from device_agent.virtual import gpu_source, gpu_time
from device_agent.virtual.gpu_source import Counts

SOURCE = """// farm: scale registers=20 shared_bytes=512
extern "C" __global__ void __launch_bounds__(128) scale(float* __restrict__ a, float* __restrict__ b) {
  __shared__ alignas(64) float s[128];
  alignas(64) float l[4];
  s[((int)threadIdx.x)] = a[((((int)blockIdx.x) * 128) + ((int)threadIdx.x))];
  __syncthreads();
  for (int k = 0; k < 10; ++k) {
    l[(k & 3)] = (l[(k & 3)] + (s[(((((int)threadIdx.x) * STRIDE) + k) & 127)] * 0x1.8p+0f/*1.5*/));
  }
  if (((int)threadIdx.x) < 32) {
    b[(((int)blockIdx.x) + (((int)threadIdx.x) * PITCH))] = l[0];
  }
}
"""
FACTS = {"arch": "sm_53", "processors": 1, "memory_bytes_per_s": 25.6e9, "stretch": 1.0}


def count(stride: int = 1, pitch: int = 1, source: str = SOURCE) -> Counts:
    return gpu_source.count(
        source.replace("STRIDE", str(stride)).replace("PITCH", str(pitch)), "scale", (8, 1, 1), (128, 1, 1)
    )


def launch(**fields: object) -> gpu_time.Launch:
    source = SOURCE.replace("STRIDE", "1").replace("PITCH", "1")
    made = gpu_time.Launch(source, "scale", (64, 1, 1), (128, 1, 1), 0, (1 << 20, 1 << 20))
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_what_a_block_does_is_counted_by_warps_and_sectors() -> None:
    """Four warps read 128 floats in 16 sectors; ten rounds of one FMA each; one warp writes 4 sectors."""
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


# A product of matrices as families write it: tiles in shared memory, results of a thread in its registers.
PRODUCT = """
extern "C" __global__ void __launch_bounds__(THREADS) product(float* __restrict__ a, float* __restrict__ b, float* __restrict__ c) {
  __shared__ float s[STAGED];
  float l[HELD];
  for (int k = 0; k < STEPS; ++k) {
    __syncthreads();
    s[((int)threadIdx.x)] = a[(((((int)blockIdx.x) * THREADS) + (k * THREADS)) + ((int)threadIdx.x))];
    __syncthreads();
    for (int j = 0; j < HELD; ++j) {
      for (int i = 0; i < INNER; ++i) {
        l[j] = (l[j] + (s[(i & (THREADS - 1))] * b[((k * INNER) + i)]));
      }
    }
  }
  for (int j = 0; j < HELD; ++j) {
    c[((((((int)blockIdx.x) * HELD) + j) * THREADS) + ((int)threadIdx.x))] = l[j];
  }
}
"""  # noqa: E501
BOARDS = st.sampled_from(("sm_53", "sm_62", "sm_72", "sm_87"))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    BOARDS, st.integers(1, 8), st.sampled_from((32, 64, 128, 256)), *[st.integers(1, 12)] * 3, st.integers(1, 400)
)
def test_no_kernel_beats_its_multiply_adds_or_the_memory(
    arch: str, processors: int, threads: int, held: int, steps: int, inner: int, blocks: int
) -> None:
    """With any tiles: all FMAs on all lanes, and everything that it reads and writes once."""
    source = PRODUCT
    words = {"THREADS": threads, "STAGED": threads, "HELD": held, "STEPS": steps, "INNER": inner}
    for word, value in words.items():
        source = source.replace(word, str(value))
    sizes = (4 * threads * (blocks + steps), 4 * steps * inner, 4 * threads * held * blocks)
    made = gpu_time.Launch(source, "product", (blocks, 1, 1), (threads, 1, 1), 0, sizes)
    facts = FACTS | {"arch": arch, "processors": processors}
    (kernel,) = gpu_time.sum_up([made], facts, 1)
    products = blocks * threads * held * steps * inner
    assert kernel.cycles >= products / (find_processor(arch).lanes * processors)
    assert kernel.moved_bytes >= 4 * threads * held * blocks
    for hz, share in ((9e8, 1.0), (7e7, 0.3)):
        seconds, computing, moving = gpu_time.compute_seconds([kernel], facts, hz, share)
        assert seconds >= products / (find_processor(arch).lanes * processors * hz)
        assert seconds >= kernel.moved_bytes / (25.6e9 * share)
        assert max(computing, moving) <= 1


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


def test_what_is_read_once_stays_in_registers() -> None:
    """Of a tile of 4 x 8 results eight values and four are read a step, not 64; loops over them cost no instruction."""
    source = """
extern "C" __global__ void __launch_bounds__(32) tile(float* __restrict__ a, float* __restrict__ b) {
  __shared__ float s[256];
  float l[32];
  for (int k = 0; k < 100; ++k) {
    __syncthreads();
    s[((int)threadIdx.x)] = a[((k * 32) + ((int)threadIdx.x))];
    __syncthreads();
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 8; ++j) {
        int cse = ((i * 8) + j);
        l[cse] = (l[cse] + (s[i] * s[(j + 128)]));
      }
    }
  }
}
"""
    found = gpu_source.count(source, "tile", (1, 1, 1), (32, 1, 1))
    assert found.arithmetic == 100 * 32
    assert found.shared == 100 * (1 + 4 + 8)
    # Rounds, barriers, the load and its store, and what is read of the tile.
    assert found.issued == found.arithmetic + 100 * (1 + 2 + 2 + 12)
