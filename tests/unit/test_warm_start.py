"""Foreign trials: which are looked at, and whether a model that they teach can rank what it was not taught."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from farm.search.tuners.cost_model import SampleGroup
from farm.search.tuners.decisions import ForeignTrial, Traits, derive_traits
from farm.search.tuners.warm_start import WarmStart, choose, cross_validate, spearman
from farm.values import Workload

ROWS, COLUMNS = 3, 12


def make_group(count: int, seed: int, noise: bool = False) -> SampleGroup:
    rng = np.random.default_rng(seed)
    matrices = [rng.uniform(size=(ROWS, COLUMNS)).astype("float32") for _ in range(count)]
    latencies = [1e-3 * float(1 + 4 * m[:, 2].mean() + 2 * m[:, 5].mean()) for m in matrices]
    if noise:
        latencies = list(rng.uniform(1e-3, 1e-2, size=count))
    return SampleGroup(matrices, latencies)


def make_trials(hash_: str, latencies: list[float]) -> list[ForeignTrial]:
    workload = Workload(hash_, "matmul", 1.0, 1, (), "", {}, "graph/2")
    return [ForeignTrial(workload, "nano", "p", Traits(), f"{i}", "", s) for i, s in enumerate(latencies)]


def test_rank_correlation_knows_order_and_ties() -> None:
    """1 for the same order, -1 for the opposite, 0 where one side says nothing; ties share a rank."""
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0
    assert spearman([1], [1]) == 0
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894, abs=1e-3)


def test_what_teaches_is_believed() -> None:
    """What two groups teach ranks the third; where latencies are chance, nothing does. One task's trials are split;
    below eight there is no telling. For people: how many teach, how many not, and why.
    """
    together = cross_validate([make_group(40, seed) for seed in range(3)], "reg", 0)
    chance = cross_validate([make_group(40, seed, noise=True) for seed in range(3)], "reg", 0)
    assert together is not None
    assert chance is not None
    assert together > 0.5
    assert abs(chance) < 0.35
    alone = cross_validate([make_group(80, 1)], "reg", 0)
    assert alone is not None
    assert alone > 0.35
    assert cross_validate([make_group(7, 1)], "reg", 0) is None
    assert cross_validate([], "reg", 0) is None
    assert (
        str(WarmStart(40, 2, 0.6, 8, "because"))
        == "the search begins with 40 trials of other tasks, 2 are left out: because"
    )


def test_each_task_has_its_share_of_what_is_looked_at() -> None:
    """The best of each, others spread over all latencies; what a small task leaves goes to the large one."""
    large = make_trials("a", [float(i) for i in range(1, 101)])
    small = make_trials("b", [5.0, 7.0])
    chosen = choose([*large, *small], 12)
    assert len(chosen) == 12
    assert [t.median_s for t in chosen if t.workload.hash == "b"] == [5.0, 7.0]
    assert [t.median_s for t in chosen if t.workload.hash == "a"] == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    assert choose(large, 1000) == large
    assert choose([], 10) == []


def test_traits_are_numbers_and_not_names() -> None:
    """Nano and TX2 have the same core and differ in clock and core count alone; what is unknown is zero."""
    nano = derive_traits({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}, cpu_freq_hz=1.479e9)
    tx2 = derive_traits({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}, cpu_freq_hz=2.035e9)
    assert dataclasses.replace(tx2, cpu_freq_hz=nano.cpu_freq_hz) == nano
    assert nano.vector_bits == 128
    assert nano.l2_bytes == 2 << 20
    wide = derive_traits({"mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 2})
    assert (wide.vector_bits, wide.l2_bytes) == (512, 1 << 20)
    assert derive_traits({"mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"}).vector_bits == 256
    assert derive_traits({"mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2"}).vector_bits == 128
    assert len(Traits().to_vector()) == len(dataclasses.fields(Traits))
    assert set(Traits().to_vector()) == {0.0}
