"""The search of a whole campaign: what each tuner proposes, that it can be taken up again, and what warm starts do."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm_ffi

from farm.errors import UsageError
from farm.search import tvm_env, workloads
from farm.search.families import rule
from farm.search.tuners import schedule_space, strategies
from farm.search.tuners.campaign_search import CampaignSearch
from farm.search.tuners.cost_model import Features, measure_vectors
from farm.search.tuners.decisions import Candidate, ForeignTrial, SearchTask, derive_traits
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.values import Workload

tvm = tvm_env.load()

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
NANO = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "mattr": ["+neon"], "num-cores": 4}
SAMPLING = ("random", "ga", "xgb", "droplet")
_WEIGHTS = np.random.default_rng(0).standard_normal(164)
Latency = Callable[[Candidate], float | None]


@functools.cache
def make_product(
    rows: int, columns: int, depth: int, target_name: str = "x86", pipeline: str = "graph/2-nchw"
) -> Workload:
    """A matrix product, the cheapest workload that has many schedules; in `graph/2-nchw` no family plans it."""
    from tvm import te

    left = te.placeholder((rows, depth), name="left")
    right = te.placeholder((depth, columns), name="right")
    axis = te.reduce_axis((0, depth), name="axis")
    product = te.compute((rows, columns), lambda i, j: te.sum(left[i, axis] * right[axis, j], axis=axis), name="out")
    module = tvm.IRModule({"main": te.create_prim_func([left, right, product])})
    config = {"x86": X86, "nano": NANO}[target_name]
    return Workload(
        hash=workloads.workload_hash(module, config, pipeline),
        name=f"matmul {rows}x{depth}>{columns}",
        flop=2.0 * rows * columns * depth,
        weight=1,
        arguments=(((rows, depth), "float32"), ((depth, columns), "float32"), ((rows, columns), "float32")),
        module_json=tvm.ir.save_json(module),
        target=config,
        pipeline=pipeline,
    )


# Rows, columns, depth.
SIZES, OTHER_SIZES, TINY = (64, 96, 64), (128, 64, 96), (1, 2, 2)


def make_task(
    sizes: tuple[int, int, int] = SIZES,
    target_name: str = "x86",
    point: str = "default",
    pipeline: str = "graph/2-nchw",
) -> SearchTask:
    workload = make_product(*sizes, target_name, pipeline)
    return SearchTask(workload, target_name, point, derive_traits(workload.target, cpu_freq_hz=1.5e9))


def make_search(tuner: str = "xgb", loss: str | None = None, seed: int = 7) -> CampaignSearch:
    return CampaignSearch(tuner, loss, seed, population=24, generations=2, threads=1)


def latency_s(candidate: Candidate) -> float | None:
    """A latency that the tiles decide, with a little that only the hash decides; one in sixteen fails."""
    if int(candidate.hash[-1], 16) == 0:
        return None
    *_, instructions_decisions = json.loads(candidate.trace_json)[0]
    tiles = [decision for _, decision in instructions_decisions if isinstance(decision, list)]
    (*_, rows), (*_, columns), (_, depth) = tiles
    away = abs(math.log2(rows / 4)) + abs(math.log2(columns / 16)) + abs(math.log2(depth / 8))
    return 1e-4 * (1 + away + int(candidate.hash[:4], 16) / 2**20)


@functools.cache
def open_space(workload_hash: str) -> ScheduleSpace:
    every = [
        make_product(*sizes, name, pipeline)
        for sizes in (SIZES, OTHER_SIZES)
        for name, pipeline in (("x86", "graph/2-nchw"), ("nano", "graph/2-nchw"), ("x86", "graph/2"))
    ]
    return ScheduleSpace(next(workload for workload in every if workload.hash == workload_hash))


def find_features(candidate: Candidate) -> Features:
    """MetaSchedule's features of each of its stores."""
    space = open_space(candidate.workload)
    genome = space.read(candidate.trace_json)
    assert genome is not None
    [found] = space.evaluate([(genome, 0)])
    assert found is not None
    return found.features


def latency_by_features(candidate: Candidate) -> float | None:
    """A latency that what the code does decides, the same for all sizes and targets."""
    return 1e-3 * math.exp(0.02 * float(find_features(candidate).sum(axis=0)[: len(_WEIGHTS)] @ _WEIGHTS))


def advance(
    search: CampaignSearch, key: str, rounds: int, count: int = 8, latency: Latency = latency_s
) -> list[tuple[Candidate, float | None]]:
    """Propose and measure some rounds; returns what was measured."""
    measured = []
    for _ in range(rounds):
        candidates, _ = search.propose(key, count)
        results = [(candidate, latency(candidate)) for candidate in candidates]
        search.observe(key, [(candidate.hash, measured_s) for candidate, measured_s in results])
        measured += results
    return measured


def to_known(measured: list[tuple[Candidate, float | None]]) -> list[tuple[str, str, float | None]]:
    return [(candidate.hash, candidate.trace_json, latency) for candidate, latency in measured]


@pytest.mark.parametrize(("tuner", "pipeline"), [*((each, "graph/2-nchw") for each in SAMPLING), ("xgb", "graph/2")])
def test_a_search_that_is_taken_up_goes_on_as_it_would_have(tuner: str, pipeline: str) -> None:
    """The same seed and results give the same candidates, whether in one search or in a second that recalls them."""
    task, latency = make_task(pipeline=pipeline), latency_s if pipeline == "graph/2-nchw" else latency_by_features
    first = make_search(tuner)
    first.open("t", task)
    measured = advance(first, "t", 4, latency=latency)
    assert len({candidate.hash for candidate, _ in measured}) == len(measured) == 32
    expected = [candidate.hash for candidate, _ in advance(first, "t", 2, latency=latency)]

    second = make_search(tuner)
    second.open("t", task)
    second.recall("t", to_known(measured))
    assert [candidate.hash for candidate, _ in advance(second, "t", 2, latency=latency)] == expected


@pytest.mark.parametrize("tuner", ["random", "xgb"])
def test_a_search_in_anothers_place_knows_what_is_under_way(tuner: str) -> None:
    """It does not propose what the other proposed, and learns from it when it is measured, as the other would have."""
    first, second = make_search(tuner), make_search(tuner)
    for search in (first, second):
        search.open("k", make_task())
    under_way, _ = first.propose("k", 6)
    second.hold("k", [(each.hash, each.trace_json) for each in under_way])
    results = [(each.hash, latency_s(each)) for each in under_way]
    for search in (first, second):
        search.observe("k", results)
    expected, got = first.propose("k", 6)[0], second.propose("k", 6)[0]
    assert {each.hash for each in got}.isdisjoint(each.hash for each in under_way)
    assert [each.hash for each in got] == [each.hash for each in expected]


def test_another_seed_gives_other_candidates() -> None:
    """Seeds matter."""

    def propose(seed: int) -> set[str]:
        search = make_search(seed=seed)
        search.open("t", make_task())
        return {candidate.hash for candidate in search.propose("t", 8)[0]}

    assert propose(1) == propose(1)
    assert propose(1) != propose(2)


@pytest.mark.parametrize(
    ("tuner", "loss"), [("ga", None), ("xgb", "reg"), ("xgb", "rank"), ("xgb", "rank-binary"), ("droplet", None)]
)
def test_searching_beats_chance(tuner: str, loss: str | None) -> None:
    """After 64 trials the mean of the ten best is below that of as many random ones."""

    def best(tuner: str, loss: str | None) -> float:
        search = make_search(tuner, loss)
        search.open("t", make_task())
        latencies = sorted(latency for _, latency in advance(search, "t", 8) if latency is not None)
        return sum(latencies[:10])

    assert best(tuner, loss) < 0.9 * best("random", None)


def find_vectors(candidate: Candidate) -> float:
    """How long the vectors of its product are, log2 and a little, by its features."""
    return measure_vectors(find_features(candidate))


def test_the_features_tell_how_long_vectors_are() -> None:
    """What is measured of a candidate's features is a vectorised loop of its code, and zero where there is none."""
    search = make_search("random")
    search.open("t", make_task())
    candidates, _ = search.propose("t", 24)
    lengths = set()
    for candidate in candidates:
        script = tvm.ir.load_json(candidate.module_json).script()
        loops = {int(length) for length in re.findall(r"T\.vectorized\((\d+)\)", script)}
        length = round(2 ** find_vectors(candidate)) - 1
        assert length in {0, *loops}
        lengths.add(length)
    assert 0 in lengths
    assert len(lengths) > 3


@pytest.mark.parametrize("tuner", ["ga", "xgb", "droplet"])
def test_long_vectors_are_tried_first(tuner: str) -> None:
    """Before anything was measured, candidates have longer vectors than those by chance."""

    def mean(tuner: str) -> float:
        search = make_search(tuner)
        search.open("t", make_task())
        candidates, _ = search.propose("t", 8)
        return sum(map(find_vectors, candidates)) / len(candidates)

    assert mean(tuner) > 1.5 * mean("random")


def test_a_candidate_is_what_its_trace_leads_to() -> None:
    """A proposed candidate's module is the one that its trace replays to."""
    search = make_search()
    search.open("t", make_task())
    for candidate in search.propose("t", 4)[0]:
        replayed = tvm.ir.load_json(search.replay("t", candidate.trace_json))
        assert tvm_ffi.structural_equal(replayed, tvm.ir.load_json(candidate.module_json))


@pytest.mark.parametrize("tuner", [*SAMPLING, "grid"])
def test_a_small_space_is_used_up(tuner: str) -> None:
    """A tiny product has few schedules: all are proposed, once, and then the search says that there are no more."""
    search = make_search(tuner)
    search.open("t", make_task(TINY))
    found: list[str] = []
    for _ in range(40):
        candidates, exhausted = search.propose("t", 8)
        found += [candidate.hash for candidate in candidates]
        search.observe("t", [(candidate.hash, 1e-4) for candidate in candidates])
        if exhausted:
            break
    assert exhausted
    assert found
    assert len(found) == len(set(found))
    assert search.propose("t", 8) == ([], True)


def test_what_was_forgotten_is_not_proposed_again_and_teaches_nothing() -> None:
    """A candidate that no board could measure leaves no trace in the search but that it was there."""
    search = make_search("random")
    search.open("t", make_task())
    first = search.propose("t", 4)[0]
    for candidate in first:
        search.forget("t", candidate.hash)
    search.observe("t", [(first[0].hash, 1e-3)])
    assert not {c.hash for c in first} & {c.hash for c in search.propose("t", 8)[0]}


def test_names_that_are_not_known_and_grids_too_large_are_refused() -> None:
    """Tuners and losses are looked up at once, and the error lists them. A product of this size has millions of
    schedules: no candidates, and a remark that says what to do instead.
    """
    with pytest.raises(UsageError, match="random, ga, xgb"):
        make_search("annealing")
    with pytest.raises(UsageError, match="rank-binary"):
        make_search("xgb", "hinge")
    search = make_search("grid")
    search.open("t", make_task())
    assert search.propose("t", 8) == ([], True)
    [remark] = search.remarks("t")
    assert "another tuner" in remark
    assert search.remarks("t") == []


def make_foreign(sizes: tuple[int, int, int] = SIZES, target_name: str = "nano", rounds: int = 6) -> list[ForeignTrial]:
    task = make_task(sizes, target_name)
    search = make_search("random", seed=3)
    search.open("f", task)
    return [
        ForeignTrial(task.workload, task.board_type, task.point, task.traits, c.hash, c.trace_json, latency)
        for c, latency in advance(search, "f", rounds, latency=latency_by_features)
        if latency is not None
    ]


def test_trials_of_another_board_type_help() -> None:
    """They are validated and used, their best schedules come first: the first 16 trials are much faster."""
    foreign = make_foreign() + make_foreign(OTHER_SIZES)
    warm = make_search()
    warm.open("t", make_task())
    report = warm.warm_start("t", foreign)
    assert report.used > 0
    assert report.rank_correlation is not None
    assert report.rank_correlation > 0.35
    assert report.first > 0
    assert "rank correlation" in str(report)
    cold = make_search()
    cold.open("t", make_task())

    def mean(search: CampaignSearch) -> float:
        measured = advance(search, "t", 2, latency=latency_by_features)
        return sum(latency for _, latency in measured if latency is not None) / len(measured)

    assert mean(warm) < 0.6 * mean(cold)


def test_trials_that_say_nothing_are_left_out() -> None:
    """Latencies that have nothing to do with the schedules are noticed: no model is taught, and it is said why."""
    trials = make_foreign(rounds=4) + make_foreign(OTHER_SIZES, rounds=4)
    scrambled = [
        ForeignTrial(
            t.workload, t.board_type, t.point, t.traits, t.candidate, t.trace_json,
            1e-3 * (1 + int(hashlib.sha256(t.candidate.encode()).hexdigest()[:4], 16) / 65536),
        )
        for t in trials
    ]  # fmt: skip
    search = make_search()
    search.open("t", make_task())
    report = search.warm_start("t", scrambled)
    assert report.used == 0
    assert report.left_out == len(scrambled)
    assert "hardly better than chance" in report.reason


def test_the_prediction_comes_before_what_did_well_elsewhere() -> None:
    """Where a family plans, the first trial is what the workload is compiled to without any; then others' best."""
    cold, warm, task = make_search(), make_search(), make_task(pipeline="graph/2")
    for search in (cold, warm):
        search.open("t", task)
    planned, *others = cold.propose("t", 32)[0]
    measured = [(each, latency_by_features(each) or 0.0) for each in others]
    foreign = [
        ForeignTrial(task.workload, "another board type", "default", task.traits, each.hash, each.trace_json, latency)
        for each, latency in measured
    ]
    best, _ = min(measured, key=lambda item: item[1])
    assert warm.warm_start("t", foreign).first > 0
    first, second, *_ = warm.propose("t", 4)[0]
    assert first.hash == planned.hash
    assert second.trace_json == best.trace_json


def test_what_others_show_corrects_the_prediction_but_for_the_first_trial() -> None:
    """Another function's trials change which plans come second and later; trials on other boards do not."""

    def propose(other_board: str | None) -> list[str]:
        search, task = make_search(), make_task(pipeline="graph/2")
        if other_board:
            other = make_task(OTHER_SIZES, pipeline="graph/2")
            search.open("other", dataclasses.replace(other, board_type=other_board))
            advance(search, "other", 2, latency=latency_by_features)
        search.open("t", task)
        return [each.hash for each in search.propose("t", 8)[0]]

    alone, elsewhere, taught = propose(None), propose("nano"), propose("x86")
    assert elsewhere == alone
    assert taught != alone
    assert taught[0] == alone[0]


def test_the_end_of_the_plans_that_trials_correct_is_not_that_of_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many of the best predicted are put in order by trials; the others are proposed after them."""
    monkeypatch.setattr(schedule_space, "_MOST_CORRECTED", 8)
    monkeypatch.setattr(strategies, "SMALL_SPACE", 0)  # no list is gone through in the end
    search = make_search()
    search.open("t", make_task(pipeline="graph/2"))
    assert len(advance(search, "t", 5, latency=latency_by_features)) == 40


def test_schedules_of_metaschedules_own_are_followed_where_they_are_best() -> None:
    """A plan's family does not keep them out: what was recorded of them before has neighbours tried."""
    stock, search = make_search("random"), make_search()
    stock.open("t", make_task())
    search.open("t", make_task(pipeline="graph/2"))
    search.recall("t", [(each.hash, each.trace_json, 1e-9) for each, _ in advance(stock, "t", 1)])
    found = [each for each, _ in advance(search, "t", 3, latency=latency_by_features)]
    assert {rule.is_marked(each.trace_json) for each in found} == {True, False}


def test_traces_that_fit_nothing_are_left_out() -> None:
    """Damaged records of other tasks, and no records at all, stop nothing."""
    [trial, *_] = make_foreign(rounds=1)
    damaged = [
        ForeignTrial(trial.workload, "nano", "default", trial.traits, f"{i:016x}", text, 1e-3)
        for i, text in enumerate(["", "[]", "{}", '[[[["Fuse", [], [], []]], []], null, {}, []]'])
    ]
    search = make_search()
    search.open("t", make_task())
    assert search.warm_start("t", damaged).used == 0
    assert search.warm_start("t", []).used == 0
    search.recall("t", [("0" * 16, "", 1e-3)])
    assert len(search.propose("t", 4)[0]) == 4


def test_tasks_of_one_campaign_teach_each_other() -> None:
    """A second operating point of the same workload begins with a model, not with chance."""
    search = make_search()
    search.open("a", make_task())
    search.open("b", make_task(point="cpu=918"))
    advance(search, "a", 9)
    second = sorted(latency for _, latency in advance(search, "b", 1) if latency is not None)
    alone = make_search()
    alone.open("b", make_task(point="cpu=918"))
    first = sorted(latency for _, latency in advance(alone, "b", 1) if latency is not None)
    assert sum(second[:4]) < sum(first[:4])
