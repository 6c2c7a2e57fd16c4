"""Predictions for GPUs: what is resident, and bounds that no plan is predicted to beat."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st

from device_agent.protocol import find_processor
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.search import gpus, tvm_env
from farm.search.families import gpu_cost
from farm.search.families.gpu_cost import Blocks

BOARDS = st.sampled_from(("jetson-nano", "jetson-tx2", "jetson-xavier-nx", "jetson-orin-nano-8gb"))


def gpu_of(board_type: str) -> gpus.TargetGpu:
    plan = code.plan_gpu(load_board_types()[board_type])
    return gpus.gpu_of(gpus.to_config(board_type, plan, tvm_env.host_target(1), simulated=True))


def test_registers_and_shared_memory_limit_what_is_resident() -> None:
    """By the rules of the architecture, and one block always is."""
    unit = find_processor("sm_53")
    assert gpu_cost.count_resident(unit, 128, 32, 0) == 16  # threads and registers alike
    assert gpu_cost.count_resident(unit, 128, 128, 0) == 4
    assert gpu_cost.count_resident(unit, 128, 32, 48 << 10) == 1
    assert gpu_cost.count_resident(unit, 32, 16, 0) == 32


def test_few_warps_do_not_hide_what_many_do() -> None:
    """The same work in blocks of which only one fits takes longer."""
    gpu = gpu_of("jetson-nano")
    many = Blocks(64, 128, multiplied=500, others=500, held=1, waits=4, moved_bytes=1e3, far_bytes=1e3)
    one = dataclasses.replace(many, shared_bytes=48 << 10)
    fast, slow = (gpu_cost.predict(work, gpu) for work in (many, one))
    assert fast is not None
    assert slow is not None
    assert slow.seconds > 2 * fast.seconds


@hypothesis.given(BOARDS, st.integers(1, 1024), *[st.floats(0, 1e7)] * 5, st.integers(1, 64), st.integers(1, 10**5))
def test_blocks_take_what_their_instructions_take(
    board_type: str,
    threads: int,
    multiplied: float,
    turns: float,
    moved: float,
    waits: float,
    barriers: float,
    held: int,
    blocks: int,
) -> None:
    """No occupancy has a processor issue more than it has lanes for, or memory give more than it can."""
    gpu = gpu_of(board_type)
    work = Blocks(blocks, threads, multiplied, 0, held, waits, moved, moved, 0, turns, barriers)
    found = gpu_cost.predict(work, gpu)
    if found is not None:
        seconds = found.seconds * (1 + 1e-9)
        assert seconds >= blocks * threads * multiplied / (gpu.unit.lanes * gpu.processors * gpu.freq_hz)
        assert seconds >= blocks * turns / (gpu.processors * gpu.freq_hz)
        assert seconds >= moved / gpu.memory_bytes_per_s
