"""The plan of a campaign file: boards, points and models, workloads, trials, time."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.clocks.controller import Controller
from device_agent.clocks.platform import Platform
from device_agent.protocol import Clocks, Description, DomainClocks
from farm.campaign.plan import (
    ASSUMED_BUILD_S,
    CampaignPlan,
    Known,
    merge_workloads,
    plan_campaign,
    require_unchanged,
    to_measure,
)
from farm.campaign.plan_boards import SYSTEM_BYTES, BoardsOfType, choose_boards
from farm.campaign.plan_document import find_plan, keep_plan, to_document
from farm.campaign.plan_estimate import NO_BOARDS, LaneEstimate, estimate
from farm.campaign.plan_models import Form, ModelVariant, WorkloadSurvey, read_models
from farm.campaign.spec import BudgetSpec, CampaignFile, CampaignSpec
from farm.errors import UsageError
from farm.inventory.board_types import BoardType, load_board_types, require_board_type
from farm.inventory.documents import Place
from farm.models.inputs import make_inputs, read_inputs
from farm.models.quantise import quantise
from farm.models.source import resolve_model
from farm.search.cores import find_clock_factor
from farm.settings import Settings
from farm.store.totals import TrialCosts
from farm.types.documents import BoardInfo
from farm.values import Workload
from farm.virtual.tree import VirtualTree
from tests.board_rows import make_row
from tests.unit.virtual_boards import board_types, make_board

CORES = 2
MAXN = {"power_mode": "MAXN"}
FAST = {"cpu_freq_hz": 1_428_000_000}


@pytest.fixture(scope="module")
def types() -> dict[str, BoardType]:
    """The farm's own board types, read once."""
    return load_board_types()


def campaign(**given: Any) -> CampaignSpec:
    least = {"name": "c", "models": ["mlp"], "boards": {"types": ["jetson-nano"]}, "budget": {"trials": 100}}
    return CampaignSpec.model_validate(least | given)


def row(name: str, board_type: str = "jetson-nano", **given: Any) -> BoardInfo:
    return make_row(name, board_type, **{"simulated": True} | given)


def describe(name: str, clocks: Clocks, board_type: str = "jetson-nano") -> dict[str, Any]:
    told = Description(
        name=name, board_type=board_type, agent_version="1", protocol_version=1, simulated=True,
        architecture=platform.machine(), cpu_model="", cores_online=(0, 1, 2, 3), cpu_freq_range_hz={},
        memory_bytes=4 << 30, engines=(), engine_versions={}, rails=(), thermal_zones=(), clocks=clocks,
    )  # fmt: skip
    return told.to_dict()


def read(spec: CampaignSpec) -> list[ModelVariant]:
    """The campaign's models."""
    models, faults = read_models(CampaignFile(pathlib.Path("campaign.yaml"), spec))
    assert not faults
    return models


def choose(
    spec: CampaignSpec, types: dict[str, BoardType], *rows: dict[str, Any]
) -> tuple[list[BoardsOfType], list[tuple[Place, str]]]:
    return choose_boards(spec, types, rows, read(spec), CORES)


# Boards


def test_boards_are_chosen_by_type_and_labels(types: dict[str, BoardType]) -> None:
    """A board needs the type and every label; its health and state say whether it counts as good, idle and usable."""
    spec = campaign(boards={"types": ["jetson-nano"], "labels": {"rack": "a"}})
    here = {"labels": {"rack": "a", "site": "lab"}}
    (found,), faults = choose(
        spec,
        types,
        row("n1", **here),
        row("n2", labels={"rack": "b"}),
        row("n3", **here, state="leased", state_reason="leased by bo"),
        row("n4", **here, health="quarantined"),
        row("n5", **here, health="maintenance"),
        row("t1", "jetson-tx2", **here),
    )
    assert not faults
    assert found.pool == ("n1", "n3", "n4", "n5")
    assert (found.good, found.idle, found.usable) == ({"n1", "n3"}, {"n1"}, {"n1", "n3", "n4"})


def test_real_boards_leave_simulated_ones_out(types: dict[str, BoardType]) -> None:
    """Figures of the two kinds never mix, so a type with real boards is planned for these alone, for its own target."""
    (real,), _ = choose(campaign(), types, row("v"), row("r", simulated=False))
    (simulated,), _ = choose(campaign(), types, row("v"))
    assert (real.pool, real.simulated, simulated.pool, simulated.simulated) == (("r",), False, ("v",), True)
    assert "1 simulated board of type jetson-nano left out (v): r is real" in real.left_out
    (asked,), _ = choose(
        campaign(boards={"types": ["jetson-nano"], "simulated": True}), types, row("v"), row("r", simulated=False)
    )
    assert (asked.pool, asked.simulated) == (("v",), True)
    assert real.target.config["mtriple"] == "aarch64-linux-gnu"
    assert simulated.target == real.target  # its own code, emulated


def test_weights_are_as_for_other_commands(types: dict[str, BoardType], tmp_path: pathlib.Path) -> None:
    """A campaign's `weights` choose its graph pipeline; a core that cannot and an 8-bit model are refused as keys."""
    (found,), _ = choose(campaign(weights="bf16"), types, row("n1"))
    assert found.board_type.pipeline == "graph/2-bf16"
    _, faults = choose(campaign(weights="fp16"), types, row("n1"))
    assert "cannot compute in 16 bits (weights fp16)" in faults[0][1]
    assert "--weights" not in faults[0][1]
    source, examples = resolve_model("mlp"), [make_inputs(read_inputs(resolve_model("mlp").load()), 0)]
    (tmp_path / "mlp.onnx").write_bytes(quantise(source, examples).onnx_bytes)
    eight = campaign(weights="bf16", models=[str(tmp_path / "mlp.onnx")])
    ((_, said),) = read_models(CampaignFile(tmp_path / "campaign.yaml", eight))[1]
    assert said == "mlp: mlp is quantised: its weights are in 8 bits. Leave weights away."


def test_this_machine_needs_no_registration(types: dict[str, BoardType]) -> None:
    """The type `local` is the machine that plans, registered or not; labels are only on boards that are registered."""
    (found,), faults = choose(campaign(boards={"types": ["local"]}), types)
    assert not faults
    assert (len(found.pool), len(found.idle), found.simulated) == (1, 1, False)
    _, faults = choose(campaign(boards={"types": ["local"], "labels": {"a": "b"}}), types)
    assert "no board of type 'local' is registered" in faults[0][1]


@pytest.mark.parametrize(
    ("boards", "message"),
    [
        ({"types": ["jetson-nona"]}, "unknown board type 'jetson-nona'. Did you mean jetson-nano?"),
        ({"types": ["jetson-tx2"]}, "no board of type 'jetson-tx2' is registered. Registered types: jetson-nano."),
        (
            {"types": ["jetson-nano"], "labels": {"rack": "z"}},
            "of 1 boards of type 'jetson-nano' none is labelled rack=z",
        ),
    ],
)
def test_types_without_boards(types: dict[str, BoardType], boards: dict[str, Any], message: str) -> None:
    """A type that does not exist, has no board, or none with the labels is refused at its place."""
    _, faults = choose(campaign(boards=boards), types, row("n1"))
    assert [place for place, _ in faults] == [("boards", "types", 0)]
    assert message in faults[0][1]


def test_points_are_used_where_a_board_has_them(types: dict[str, BoardType]) -> None:
    """A point that one type lacks is tuned on the others, and the reason is kept; keys name clusters, not `*`. One
    clock written for every cluster and by the cluster's name is one point. A type for which the campaign has no
    point at all is refused, since nothing would be tuned on it.
    """
    spec = campaign(boards={"types": ["jetson-nano", "jetson-tx2"]}, operating_points=["default", MAXN, FAST])
    (nano, tx2), faults = choose(spec, types, row("n1"), row("t1", "jetson-tx2"))
    assert not faults
    assert [each.key for each in nano.points] == ["default", "mode=MAXN", "a57=1428MHz"]
    assert [each.key for each in tx2.points] == ["default", "mode=MAXN"]
    assert "has no 1428 MHz; it has 345.6" in tx2.lacking["*=1428MHz"]
    (found,), _ = choose(campaign(operating_points=[FAST, {"cpu_freq_hz": {"a57": 1_428_000_000}}]), types, row("n1"))
    assert [each.key for each in found.points] == ["a57=1428MHz"]
    spec = campaign(boards={"types": ["jetson-nano", "jetson-tx2"]}, operating_points=[FAST])
    _, faults = choose(spec, types, row("n1"), row("t1", "jetson-tx2"))
    assert faults == [(("boards", "types", 1), "a jetson-tx2 has none of the operating points")]


def test_a_board_speaks_for_itself(types: dict[str, BoardType]) -> None:
    """What a board said of its clocks counts, not its type's file; others may have the point all the same."""
    clocks = Clocks(clusters=(DomainClocks("a57", available_hz=(102_000_000,), cpus=(0, 1, 2, 3)),))
    odd = row("odd", description=describe("odd", clocks))
    (found,), faults = choose(campaign(operating_points=[FAST]), types, row("n1"), odd)
    assert not faults
    assert found.points[0].boards == ("n1",)
    assert "has no 1428 MHz" in found.points[0].missing["odd"]
    _, faults = choose(campaign(operating_points=[FAST]), types, odd)
    assert faults[0][0] == ("operating_points", 0)


@pytest.mark.parametrize("first", ["default", "mode"])
@pytest.mark.parametrize("kind", ["jetson-nano", "jetson-tx2"])
def test_the_power_mode_that_is_set_is_the_default(types: dict[str, BoardType], kind: str, first: str) -> None:
    """A board in its default mode does `default` and that mode once; a moved limit makes two points of them."""
    board, _ = make_board(kind)
    clocks = Controller.read(Platform.discover(VirtualTree(board), board_types()[kind]))
    assert clocks.power_mode is not None
    other = next(name for name in clocks.power_modes if name != clocks.power_mode)
    points: list[Any] = ["default", {"power_mode": clocks.power_mode}, {"power_mode": other}]
    spec = campaign(
        boards={"types": [kind]}, operating_points=points if first == "default" else [points[1], points[0], points[2]]
    )
    (found,), faults = choose(spec, types, row("b1", kind, description=describe("b1", clocks, kind)))
    assert not faults
    assert [each.key for each in found.points] == ["default", f"mode={other}"]
    assert found.merged == (f"mode={clocks.power_mode} is the same as default on b1: done once",)
    moved = dataclasses.replace(clocks.clusters[0], max_hz=clocks.clusters[0].available_hz[0])
    clocks = dataclasses.replace(clocks, clusters=(moved, *clocks.clusters[1:]))
    (found,), _ = choose(spec, types, row("b1", kind, description=describe("b1", clocks, kind)))
    assert len(found.points) == 3
    assert not found.merged


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"power_mode": "MAXM"}, "this board has no power mode MAXM; it has MAXN, 5W"),
        ({"cpu_freq_hz": {"a75": 102_000_000}}, "this board has no CPU cluster a75; it has a57"),
        ({"cpu_freq_hz": 1}, "the CPU cluster a57 of this board has no 1e-06 MHz"),
        ({"gpu_freq_hz": 1_000_000}, "the GPU of this board has no 1 MHz"),
        ({"memory_freq_hz": 1_000_000}, "the memory of this board has no 1 MHz"),
        ({"cores": [0, 9]}, "this board has no CPU 9; it has 0-3"),
        ({"cores": [1, 2]}, "CPU 0 cannot be taken offline"),
    ],
)
def test_points_that_no_board_has(types: dict[str, BoardType], point: dict[str, Any], message: str) -> None:
    """A point that no board of any type has is refused, with what there is."""
    _, faults = choose(campaign(operating_points=["default", point]), types, row("n1"))
    assert [place for place, _ in faults] == [("operating_points", 1)]
    assert message in faults[0][1]


def test_models_that_no_board_can_hold(types: dict[str, BoardType]) -> None:
    """A model whose weights leave nothing of a board's memory is refused, or kept to types that have more."""
    spec = campaign(boards={"types": ["jetson-nano", "jetson-tx2"]})
    small = types["jetson-nano"].model_copy(update={"memory_bytes": SYSTEM_BYTES + 1000})
    (nano, tx2), faults = choose(spec, types | {"jetson-nano": small}, row("n1"), row("t1", "jetson-tx2"))
    assert faults == [(("boards", "types", 0), "a jetson-nano can hold none of the models")]
    assert "a jetson-nano has 512 MiB, of which 512 MiB are its system's" in nano.too_big["mlp"]
    assert not tx2.too_big
    _, faults = choose(campaign(), types | {"jetson-nano": small}, row("n1"))
    assert faults[0][0] == ("models", 0)
    assert "no board can hold mlp" in faults[0][1]


def test_boards_that_wait_for_an_operator_are_said(types: dict[str, BoardType]) -> None:
    """Where no board can be used before an operator acts, the plan says so and estimates nothing."""
    stopped = row("n1", health="unsafe", health_reason="clocks not restored")
    (found,), faults = choose(campaign(), types, stopped)
    assert not faults
    assert not found.usable
    assert any("before an operator acts: n1: unsafe: clocks not restored" in note for note in found.notes)


# Workloads


def workload(hash: str, kind: str = "dense", flop: float = 1.0, weight: int = 1) -> Workload:
    return Workload(hash, f"{kind} 1>1", flop, weight, (), "", {}, "graph/2")


def test_equal_workloads_are_one() -> None:
    """Weights of equal workloads add up over models, the models are named, and the most work comes first."""
    one, two = read(campaign(models=["mlp", "tiny-cnn"]))
    merged = merge_workloads(
        [
            (one, WorkloadSurvey((workload("a", weight=2), workload("b", flop=9.0)), "graph/2")),
            (two, WorkloadSurvey((workload("a", weight=3), workload("c", kind="conv2d", flop=2.0)), "graph/2")),
        ],
        (),
    )
    assert [(each.hash, each.weight, each.models) for each in merged] == [
        ("b", 1, ("mlp",)),
        ("a", 5, ("mlp", "tiny-cnn")),
        ("c", 1, ("tiny-cnn",)),
    ]
    chosen = merge_workloads(
        [(two, WorkloadSurvey((workload("a"), workload("c", kind="conv2d")), "graph/2"))], ("conv2d",)
    )
    assert [each.hash for each in chosen] == ["c"]


def test_predictions_are_made_for_the_clock_of_each_board_type() -> None:
    """A TX2's A57 has 2,035 MHz, a Nano's 1,479: equal functions are not predicted to take equally long."""
    (one,) = read(campaign(models=["mlp"]))
    survey = WorkloadSurvey((workload("a"),), "graph/2", {"a": 1.0})
    times = []
    pi = require_board_type("raspberry-pi-4")
    # An A73 at 1.8 GHz: its core type is the A72's, of 1.5 GHz.
    a73 = dataclasses.replace(pi.clusters[0], core="cortex-a73", freqs_hz=(1_800_000_000,))
    like = pi.model_copy(update={"clusters": (a73,)})
    for kind in (*map(require_board_type, ("jetson-nano", "jetson-tx2", "local")), like):
        factor = find_clock_factor({} if kind.target is None else kind.target.to_tvm(), kind)
        times.append(merge_workloads([(one, survey)], (), factor)[0].predicted_s)
    assert times == pytest.approx([1.0, 1479 / 2035.2, 1.0, 1500 / 1800])


def test_equal_targets_are_imported_once() -> None:
    """Two types whose targets say the same in another order share the workloads, and so the import."""
    one = Form.of({"kind": "llvm", "mattr": ["+neon"], "num-cores": 4}, 4, "graph/2")
    assert one == Form.of({"num-cores": 4, "mattr": ("+neon",), "kind": "llvm"}, 8, "graph/2")
    assert one.to_target() == {"kind": "llvm", "mattr": ["+neon"], "num-cores": 4}
    assert Form.of(None, 2, "graph/2") != Form.of(None, 4, "graph/2")


# Time


def lane(board_type: str, jobs: int, *boards: str, held_s: float = 1.0, host_core_s: float = 0.0) -> LaneEstimate:
    return LaneEstimate(board_type, jobs, frozenset(boards), held_s, host_core_s)


@pytest.mark.parametrize(
    ("budget", "limit", "trials"),
    [
        ({"trials": 100}, "trials", 100),
        ({"trials": 100, "per_workload": 4}, "per_workload", 40),
        ({"trials": 100, "board_hours": 0.01}, "board_hours", 24),
        ({"trials": 1000, "wall_clock": "150s"}, "wall_clock", 200),
        ({"board_hours": 1.13}, "board_hours", 2712),
        ({"per_workload": 1000, "wall_clock": "1h", "board_hours": 0.5, "trials": 10_000}, "board_hours", 1200),
    ],
)
def test_the_first_limit_counts(budget: dict[str, Any], limit: str, trials: int) -> None:
    """A budget ends at whichever of its limits is reached first: here two boards take a second per trial."""
    found = estimate([lane("a", 10, "x", "y")], BudgetSpec.model_validate(budget), CORES)
    assert (found.limit, found.trials) == (limit, (trials,))
    assert found.eta_s == pytest.approx((trials + sum(found.winners)) / 2)
    assert found.board_hours[0] == pytest.approx((trials + sum(found.winners)) / 3600)


def test_the_estimate_follows_host_boards_and_points() -> None:
    """Search and builds go on beside measuring, so the time is that of the slower of both. Boards of one type take all
    its points in turn; other types work at the same time. Types whose boards cannot be used get no trials; where
    there are no others, there is no estimate.
    """
    budget = BudgetSpec(trials=100)
    # Winners: four candidates eight times, on the one board.
    assert estimate([lane("a", 1, "x", host_core_s=1.0)], budget, CORES).eta_s == pytest.approx(100 + 32)
    assert estimate([lane("a", 1, "x", host_core_s=4.0)], budget, CORES).eta_s == pytest.approx(200 + 32)
    alone = dataclasses.replace(lane("local", 1, "x", host_core_s=4.0), alone=True)
    assert estimate([alone], budget, CORES).eta_s == pytest.approx(300 + 32)
    lanes = [lane("a", 5, "x"), lane("a", 5, "x"), lane("b", 5, "y")]
    found = estimate(lanes, BudgetSpec(trials=90), CORES)
    assert found.trials == (30, 30, 30)
    assert found.winners == (20, 20, 20)
    assert found.eta_s == pytest.approx(60 + 40)
    budget = BudgetSpec(trials=10)
    assert estimate([lane("a", 5), lane("b", 5, "y")], budget, CORES).trials == (0, 10)
    nothing = estimate([lane("a", 5)], budget, CORES)
    assert (nothing.eta_s, nothing.limit, nothing.trials) == (None, NO_BOARDS, (0,))


@pytest.mark.parametrize("limit", [300, 3600])
def test_a_plan_counts_checks_and_models_and_keeps_the_wall_clock(limit: int) -> None:
    """What follows the trials is in the estimate, and trials are planned so that all of it ends within the limit."""
    after = dataclasses.replace(lane("a", 10, "x", "y"), check_s=2.0, finals_s=30.0)
    found = estimate([after], BudgetSpec.model_validate({"wall_clock": f"{limit}s"}), CORES)
    assert found.limit == "wall_clock"
    assert found.finals_s == 30.0
    assert found.eta_s == pytest.approx(found.boards_s + found.winners_s + 30.0)
    assert found.winners_s == pytest.approx(found.winners[0] / 2 + 10 * 2.0)
    assert found.boards_s > limit / 3
    assert found.eta_s <= limit


@pytest.mark.parametrize(("jobs", "trials"), [(27, 10), (10, 10), (10, 64), (10, 640), (3, 96), (1, 5000)])
def test_winners_take_a_share_of_the_budget(jobs: int, trials: int) -> None:
    """Measuring winners is part of what is promised: half as much as the search, or four measurements of a workload,
    and never more than all candidates in all rounds.
    """
    [winners] = estimate([lane("a", jobs, "x")], BudgetSpec(trials=trials), CORES).winners
    assert winners <= max(trials / 2, 4 * min(jobs, trials))
    assert winners <= 16 * 4 * jobs
    assert winners >= 2 * min(jobs, trials)


@given(
    jobs=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 5)), min_size=1, max_size=6),
    trials=st.integers(1, 100_000),
    per_workload=st.none() | st.integers(1, 1000),
)
def test_no_trial_is_lost_in_dividing(jobs: list[tuple[int, int]], trials: int, per_workload: int | None) -> None:
    """The parts add up to the whole, no lane without a board gets any, and equal lanes differ by one at most."""
    lanes = [lane(f"t{i}", n, *(f"b{i}-{j}" for j in range(boards))) for i, (n, boards) in enumerate(jobs)]
    found = estimate(lanes, BudgetSpec(trials=trials, per_workload=per_workload), CORES)
    open_jobs = sum(each.jobs for each in lanes if each.boards)
    whole = min(trials, per_workload * open_jobs) if per_workload else trials
    assert sum(found.trials) == (whole if open_jobs else 0)
    for each, n in zip(lanes, found.trials, strict=True):
        assert n >= 0
        assert each.boards or n == 0
        alike = [m for other, m in zip(lanes, found.trials, strict=True) if other.jobs == each.jobs and other.boards]
        assert not each.boards or max(alike) - min(alike) <= 1


# The whole


def make(types: dict[str, BoardType], costs: TrialCosts | None = None) -> CampaignPlan:
    """A plan for one model with the workloads `a` and `b` at two points of two nanos."""
    spec = campaign(operating_points=["default", MAXN], measure={"repeat": 3, "min_repeat": "100ms"})
    models = read(spec)
    boards, _ = choose(spec, types, row("n1"), row("n2", state="offline"))
    known = Known(
        costs or TrialCosts(),
        {("a", "default"): 30, ("b", "default"): 12, ("a", "mode=MAXN"): 5, ("z", "default"): 99},
        frozenset({("a", "default"), ("z", "default")}),
    )
    survey = WorkloadSurvey((workload("a"), workload("b")), "graph/2")
    surveyed = [(each, [(models[0], survey)]) for each in boards]
    return plan_campaign(spec, to_measure(spec.measure, Settings()), models, surveyed, {"jetson-nano": known}, CORES)


def test_a_plan_says_what_is_covered(types: dict[str, BoardType]) -> None:
    """Records and known candidates count for the plan's own workloads, point by point."""
    plan = make(types)
    rows = [[each[key] for key in ("recorded", "known_candidates", "trials", "idle")] for each in plan.types[0].points]
    assert rows == [[1, 42, 50, 1], [0, 5, 50, 1]]
    assert plan.tasks == 4
    assert [each["seconds"] for each in plan.types[0].points] == [pytest.approx(50 * plan.types[0].held_s / 2)] * 2


def test_costs_come_from_the_store_or_are_said_to_be_assumed(types: dict[str, BoardType]) -> None:
    """Trials of the type say what one costs; without any, a default stands in and is called so."""
    (assumed,) = to_document(make(types))["types"]
    assert assumed["cost"]["held_s"] == pytest.approx(0.8)
    assert assumed["cost"]["build_s"] == ASSUMED_BUILD_S
    assert (assumed["cost"]["held_from"], assumed["cost"]["build_from"]) == ("assumed", "assumed")
    (measured,) = to_document(make(types, TrialCosts(64, 2.5, 0.25)))["types"]
    assert (measured["cost"]["held_s"], measured["cost"]["build_s"]) == (2.5, 0.25)
    assert measured["cost"]["held_from"] == "64 trials"
    json.dumps(to_document(make(types)), allow_nan=False)


# What is kept


def test_a_model_that_changed_is_refused(types: dict[str, BoardType], tmp_path: pathlib.Path) -> None:
    """The plan that is kept knows every model's hash, and another one is refused by name."""
    plan = make(types)
    assert find_plan(tmp_path, "c") is None
    path = keep_plan(tmp_path, to_document(plan))
    assert [each.name for each in path.parent.iterdir()] == ["c.json"]
    kept = find_plan(tmp_path, "c")
    assert kept is not None
    require_unchanged(kept, plan.models)
    (model,) = plan.models
    changed = dataclasses.replace(model, source=dataclasses.replace(model.source, sha256="f" * 64))
    with pytest.raises(UsageError, match=r"mlp \(zoo:mlp\) was [0-9a-f]{12} and is ffffffffffff"):
        require_unchanged(kept, [changed])


def test_a_file_that_is_no_plan_is_said(tmp_path: pathlib.Path) -> None:
    """What lies in a plan's place and is none is named, not guessed at."""
    (tmp_path / "plans").mkdir()
    for text in ("", "[]", '{"models": 1}', '{"models": [1]}'):
        (tmp_path / "plans" / "c.json").write_text(text)
        with pytest.raises(UsageError, match=r"c\.json is no plan"):
            find_plan(tmp_path, "c")
