"""From a campaign file to an order in the store: every default filled in, everything impossible refused."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest

import farm
from farm.campaign.plan import CampaignPlan, Known, plan_campaign, to_measure
from farm.campaign.plan_boards import choose_boards
from farm.campaign.plan_document import keep_plan
from farm.campaign.plan_models import WorkloadSurvey, read_models
from farm.campaign.spec import CampaignFile, CampaignSpec, check_campaign
from farm.campaign.submit import clone, list_workloads, make_order, submit
from farm.errors import UsageError
from farm.inventory.board_types import load_board_types
from farm.settings import Settings
from farm.store import Store
from farm.store.totals import TrialCosts
from farm.types.campaigns import Budget, Order
from farm.values import Virtual, Workload
from tests.board_rows import make_row
from tests.unit import campaign_orders

TARGET = {"kind": "llvm", "num-cores": 4}


def spec(**given: Any) -> CampaignSpec:
    """A campaign for nanos; what is not given is the least that there must be."""
    least = {"name": "c", "models": ["mlp"], "boards": {"types": ["jetson-nano"]}, "budget": {"trials": 100}}
    return CampaignSpec.model_validate(least | given)


def workload(hash: str, kind: str = "dense", weight: int = 1) -> Workload:
    return Workload(hash, f"{kind} 1>1", 1e6, weight, (((4, 4), "float32"),), f"module of {hash}", TARGET, "graph/2")


def gather(given: CampaignSpec) -> CampaignPlan:
    """What planning finds: `a` and `b` in the first model, `b` and a third in every other one."""
    models, _ = read_models(CampaignFile(pathlib.Path("c.yaml"), given))
    rows = [make_row("n1", simulated=True), make_row("t1", "jetson-tx2", simulated=True)]
    types, faults = choose_boards(given, load_board_types(), rows, models, 2)
    assert not faults
    surveys = [
        (
            model,
            WorkloadSurvey(
                (workload("b", weight=3), workload("a" if model is models[0] else "c", "conv2d")), "graph/2"
            ),
        )
        for model in models
    ]
    surveyed = [(each, surveys) for each in types]
    known = {each.board_type.name: Known(TrialCosts(), {}, frozenset()) for each in types}
    return plan_campaign(given, to_measure(given.measure, Settings()), models, surveyed, known, 2)


def test_an_exact_campaign_orders_the_exact_pipeline() -> None:
    """What `search.exact` leaves out is left out when models are read, and when they are compiled afterwards."""
    [kind] = make_order(gather(spec()), Settings(), "ana@desk").types
    given = spec(search={"exact": True})
    order = make_order(gather(given), Settings(), "ana@desk")
    assert (kind.pipeline, order.types[0].pipeline) == ("graph/2", "graph/2-exact")
    given = spec(search={"exact": True}, device="gpu")
    assert make_order(gather(given), Settings(), "ana@desk").types[0].pipeline == "gpu/2-exact"
    assert order.search.exact


def test_an_order_says_everything() -> None:
    """What a file leaves out is settled when it is submitted: settings, the target's dict, budgets in seconds."""
    given = spec(
        boards={"types": ["jetson-nano", "jetson-tx2"]},
        operating_points=["default", {"cpu_freq_hz": 1_428_000_000}],
        budget={"wall_clock": "2h", "board_hours": 1.5},
        measure={"min_repeat": "50ms"},
        priority=2,
    )
    order = make_order(gather(given), Settings(measure_repeat=5, seed=9), "ana@desk")
    assert order.budget == Budget(wall_clock_s=7200.0, board_s=5400.0)
    assert (order.measure.repeat, order.measure.min_repeat_s, order.measure.verify_top) == (5, 0.05, 3)
    assert (order.search.tuner, order.search.seed, order.priority, order.owner) == ("xgb", 9, 2, "ana@desk")
    nano, tx2 = order.types
    assert [list(each.points) for each in order.types] == [["default", "a57=1428MHz"], ["default"]]
    assert (nano.target, nano.simulated, nano.pipeline) == (TARGET, True, nano.pipeline)
    assert Order.model_validate_json(order.model_dump_json()) == order
    assert tx2.workloads == nano.workloads


def test_an_order_knows_how_often_each_model_calls_a_workload() -> None:
    """A workload that models share has one weight for all of them and a number of calls for each."""
    given = spec(models=["mlp", "tiny-cnn"])
    [kind] = make_order(gather(given), Settings(), "a").types
    [shared] = [each for each in kind.workloads if each.hash == "b"]
    assert (shared.weight, shared.models, shared.calls) == (6, ("mlp", "tiny-cnn"), (3, 3))


def test_functions_go_along_once_for_each_type() -> None:
    """The store gets every chosen workload with its function, its board type and its weight over all models."""
    given = spec(boards={"types": ["jetson-nano", "jetson-tx2"]}, search={"ops": "dense"})
    rows = list_workloads(gather(given))
    assert [(each.hash, each.board_type, each.weight) for each in rows] == [
        ("b", "jetson-nano", 3),
        ("b", "jetson-tx2", 3),
    ]
    assert rows[0].module_json == "module of b"
    assert rows[0].arguments == (((4, 4), "float32"),)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Any:
    with Store(tmp_path / "farm.db") as store:
        store.boards.register("n1", "jetson-nano", Virtual(), {})
        yield store


def refuse(store: Store, tmp_path: pathlib.Path, **given: Any) -> str:
    document = {"name": "c", "models": "mlp", "boards": {"types": "jetson-nano"}, "budget": {"trials": 9}} | given
    with pytest.raises(UsageError) as caught:
        submit(
            check_campaign(document, "campaign c"), store, Settings(home=str(tmp_path)), "a", "run", lambda text: None
        )
    return str(caught.value)


def test_a_budget_for_no_trial_is_refused(store: Store, tmp_path: pathlib.Path) -> None:
    """A limit that ends before one trial is named before anything starts, and nothing is submitted."""
    said = refuse(store, tmp_path, budget={"board_hours": 1e-6})
    assert "the budget pays for no trial: board_hours is too small" in said
    assert store.campaigns.fetch() == []


def test_a_name_is_used_once(store: Store, tmp_path: pathlib.Path) -> None:
    """A second campaign of a name is refused before anything is planned, and what can be done instead is said."""
    number = campaign_orders.submit(store, campaign_orders.make_order("c"))
    assert "there is a campaign c already, which is submitted\n  `farm campaign resume c`" in refuse(store, tmp_path)
    store.campaigns.note(number, "finished", "")
    assert "`farm campaign run --from c --name NEW`" in refuse(store, tmp_path)


def test_a_model_that_changed_since_the_plan_is_refused(store: Store, tmp_path: pathlib.Path) -> None:
    """Where a plan of this name is kept, its models must be the same bytes."""
    keep_plan(tmp_path, {"name": "c", "models": [{"name": "mlp", "sha256": "f" * 64}]})
    text = refuse(store, tmp_path)
    assert "models have changed since the campaign c was planned: mlp (zoo:mlp) was ffffffffffff and is" in text
    assert not store.campaigns.fetch()


def test_a_clone_is_the_same_but_for_its_name(store: Store) -> None:
    """A clone orders what its original ordered, with the budget that this has now and what was changed."""
    campaign_orders.submit(store, campaign_orders.make_order("c"))
    store.campaigns.change_budget("c", Budget(trials=50, per_workload=8), "op")
    clone(store, "c", "d", {"per_workload": None}, "bo@desk", "campaign clone c d")
    first, second = store.campaigns.fetch()
    assert (second.name, second.owner, second.state) == ("d", "bo@desk", "submitted")
    assert second.budget == Budget(trials=50)
    changed = {"name": "d", "owner": "bo@desk", "budget": Budget(trials=50)}
    assert second.order == first.order.model_copy(update=changed)
    assert store.workloads.fetch(second.id) == store.workloads.fetch(first.id)
    with pytest.raises(UsageError, match="there is a campaign d already"):
        clone(store, "c", "d", {}, "bo@desk", "")


# From Python


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "campaign c: budget.trials: it must be at least 1"),
        ({"budget": {}}, "campaign c: budget: a budget needs a limit"),
        ({"budget": {"trails": 5}}, "unknown key budget.trails; did you mean trials?"),
        ({"models": ["mlp", "mlp"]}, "two models are called mlp"),
        ({"models": "resnet81"}, "no zoo model is called 'resnet81'"),
        ({"search": {"tuner": "best"}}, "search.tuner: it must be"),
        ({"priority": 99}, "priority: it must be at most 10"),
        ({"name": "No Spaces"}, "name: it must be up to 63 letters"),
    ],
)
def test_python_refuses_what_a_file_refuses(given: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """`farm.Campaign` is checked by the same rules as a file, when it is made."""
    values: dict[str, Any] = {"name": "c", "models": "mlp", "boards": "jetson-nano", "budget": 10}
    with pytest.raises(UsageError, match="campaign ") as caught:
        farm.Campaign(**(values | given), home=tmp_path)
    assert message in str(caught.value)


def test_python_finds_what_was_submitted(tmp_path: pathlib.Path) -> None:
    """Campaigns of a home are found by name and all together, with their state and budget, which can be changed."""
    with Store(tmp_path / "farm.db") as store:
        campaign_orders.submit(store, campaign_orders.make_order("c"))
    [campaign] = farm.campaigns(home=tmp_path)
    assert (campaign.name, campaign.state, campaign.progress, campaign.records()) == ("c", "submitted", None, [])
    assert campaign.change_budget(wall_clock="90s", trials=None) == Budget(wall_clock_s=90.0)
    with pytest.raises(UsageError, match="a budget needs a limit"):
        campaign.change_budget(wall_clock=None)
    with pytest.raises(UsageError, match="a budget has no hours"):
        campaign.change_budget(hours=3)
    assert campaign.pause() == "paused"
    assert farm.Campaign.named("c", home=tmp_path).cancel() == "cancelled"
    with pytest.raises(UsageError, match="there is no campaign 'x'"):
        farm.Campaign.named("x", home=tmp_path)


def test_the_package_is_light() -> None:
    """Importing `farm` loads nothing of campaigns: every command and the agent's tests do it."""
    script = "import sys, farm; print({'numpy', 'sqlalchemy', 'pydantic', 'farm.campaign'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "set()"
