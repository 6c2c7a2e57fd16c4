"""A campaign from beside its engine: what operators want of it, when watching ends, and what a terminal shows."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from device_agent.protocol import Outcome, Status
from farm.campaign.engine import control
from farm.campaign.engine.state import ENGINE
from farm.cli import campaign_options
from farm.errors import DeadlineError, FarmError, UnavailableError, UsageError
from farm.processes.machine import process_identity
from farm.report import campaign_rows
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign
from farm.types.states import CampaignState
from farm.values import Trial
from tests.unit.campaign_documents import make_document
from tests.unit.campaign_orders import make_order, submit

GONE = {"host": process_identity()["host"], "pid": 2**22 + 1, "created": 1.0}


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as store:
        submit(store, make_order("c"))
        yield store


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> Settings:
    """The settings of the store's home."""
    return Settings(home=str(tmp_path))


def test_one_engine_at_a_time(tmp_path: pathlib.Path) -> None:
    """The lock is one process's, its file says that it takes orders, and both go with it."""
    assert (ENGINE.is_held(tmp_path), ENGINE.find(tmp_path)) == (False, None)
    with ENGINE.hold(tmp_path):
        assert (ENGINE.is_held(tmp_path), ENGINE.find(tmp_path)) == (True, None)
        ENGINE.publish(tmp_path)
        assert ENGINE.find(tmp_path) == process_identity()
        with pytest.raises(UnavailableError, match="runs already"), ENGINE.hold(tmp_path):
            pass
        ENGINE.withdraw(tmp_path)
        assert ENGINE.find(tmp_path) is None
    assert not ENGINE.is_held(tmp_path)
    errors: list[type[FarmError]] = [FarmError]
    for each in errors:
        errors += each.__subclasses__()
    assert ENGINE.refused not in {each.exit_code for each in errors}


def test_what_an_engine_has_to_look_at(store: Store) -> None:
    """A campaign needs an engine unless it is over, interrupted, or rests as an operator wants it to."""
    campaign = store.campaigns.require("c")
    needing = {
        (str(state), wanted)
        for state in CampaignState
        for wanted in ("run", "pause", "cancel")
        if control.needs_engine(campaign.model_copy(update={"state": state, "wanted": wanted}))
    }
    active = {"submitted", "running", "connecting", "waiting", "verifying", "paused"}
    assert needing == {
        (state, wanted)
        for state in active
        for wanted in ("run", "pause", "cancel")
        if (state, wanted) not in {("paused", "pause"), ("submitted", "pause")}
    }


def test_without_an_engine_operators_are_heard_at_once(store: Store, settings: Settings) -> None:
    """Pausing, resuming and cancelling need no engine where none runs, and none can begin with it meanwhile."""
    assert control.pause(settings, store, "c", "op").state is CampaignState.PAUSED
    assert control.resume(store, "c", "op").state is CampaignState.SUBMITTED
    assert control.cancel(settings, store, "c", "op").state is CampaignState.CANCELLED
    for change in (control.pause, control.cancel):
        with pytest.raises(UsageError, match="is over"):
            change(settings, store, "c", "op")
    assert not ENGINE.is_held(settings.home_path)


def test_what_a_killed_engine_left_can_be_resumed(store: Store) -> None:
    """A campaign whose engine is gone is interrupted for the next reader, with every trial that was written counted,
    and resumed from there.
    """
    store.campaigns.note(1, CampaignState.RUNNING, "", GONE)
    store.campaigns.save_progress(1, {"counted": 1, "tasks": [], "history": [[1, {}]]})
    for number, latency_s in enumerate((0.003, 0.002, 0.004)):
        outcome = Outcome(Status.OK, latency_s=(latency_s,), board="n-1")
        store.trials.add(Trial(1, "w1", f"c{number}", "default", 1, outcome, "[]", held_s=2.0))
    assert control.close_abandoned(store) == ["c"]
    shown = store.campaigns.require("c").progress or {}
    assert (shown["counted"], shown["board_s"], shown["history"]) == (3, 6.0, [[1, {}]])
    assert [(task["counted"], task["best_s"]) for task in shown["tasks"]] == [(3, 0.002), (0, None)]
    campaign = store.campaigns.require("c")
    assert (campaign.state, campaign.engine) == (CampaignState.INTERRUPTED, None)
    assert "killed while it was running" in campaign.reason
    assert control.resume(store, "c", "op").state is CampaignState.SUBMITTED
    store.campaigns.note(1, CampaignState.RUNNING, "", process_identity())
    assert control.close_abandoned(store) == []


def test_an_engine_of_a_host_that_was_renamed_is_noticed(store: Store, tmp_path: pathlib.Path) -> None:
    """Another host's campaign is left alone while the engine's lock is held, and counts as left when it is not."""
    store.campaigns.note(1, CampaignState.RUNNING, "", process_identity() | {"host": "as-it-was-called"})
    with ENGINE.hold(tmp_path):
        assert control.close_abandoned(store) == []
    assert control.close_abandoned(store) == ["c"]
    assert store.campaigns.require("c").state is CampaignState.INTERRUPTED


def test_whoever_holds_the_engines_lock_owns_what_runs(store: Store) -> None:
    """The engine leaves its own campaigns alone, and takes over what another left, on any host."""
    me = process_identity()
    store.campaigns.note(1, CampaignState.RUNNING, "", me)
    assert control.close_abandoned(store, me) == []
    for other in ({"host": "elsewhere"}, {"created": 1.0}):
        store.campaigns.note(1, CampaignState.RUNNING, "", me | other)
        assert control.close_abandoned(store, me) == ["c"]


def test_a_paused_campaign_whose_engine_left_in_order_can_be_resumed(store: Store) -> None:
    """An engine that ends leaves paused campaigns paused, without an engine."""
    store.campaigns.want("c", "pause", "op")
    store.campaigns.note(1, CampaignState.PAUSED, "paused by op", {})
    assert control.close_abandoned(store) == []
    assert control.resume(store, "c", "op").state is CampaignState.SUBMITTED


def test_a_budget_is_changed_limit_by_limit(store: Store) -> None:
    """Limits that are not named stay, None takes one away, and one at least must be left above zero."""
    assert control.change_budget(store, "c", {"wall_clock_s": 60.0}, "op") == Budget(trials=100, wall_clock_s=60.0)
    assert control.change_budget(store, "c", {"trials": None}, "op") == Budget(wall_clock_s=60.0)
    with pytest.raises(UsageError, match="a budget needs a limit"):
        control.change_budget(store, "c", {"wall_clock_s": None}, "op")
    with pytest.raises(UsageError, match="allows nothing"):
        control.change_budget(store, "c", {"trials": 0}, "op")
    assert store.campaigns.require("c").budget.wall_clock_s == 60.0


def test_a_budget_cannot_be_changed_once_the_search_is_over(store: Store) -> None:
    """While winners are measured no limit has any effect, and a campaign that goes on has to be another one."""
    store.campaigns.note(1, CampaignState.VERIFYING, "its 100 trials are made", process_identity())
    with pytest.raises(UsageError, match=r"the search of campaign c is over \(its 100 trials are made\)") as caught:
        control.change_budget(store, "c", {"trials": 400}, "op")
    assert "farm campaign run --from c" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (["trials=8000", "wall_clock=8h"], {"trials": 8000, "wall_clock_s": 28800.0}),
        (["board_hours=1.5", "per_workload=none"], {"board_s": 5400.0, "per_workload": None}),
        (["trials=0"], "trials"),
        (["board_hours=-2"], "board_hours"),
        (["wall_clock=soon"], "'soon'"),
        (["trials"], "'trials' is no limit"),
        (["days=2"], "a budget has no days"),
    ],
)
def test_limits_as_they_are_typed(given: list[str], changes: Any) -> None:
    """They name a limit's new value or `none`; what cannot be is refused by its name."""
    if isinstance(changes, dict):
        assert campaign_options.read_limits(given) == changes
    else:
        with pytest.raises(UsageError) as caught:
            campaign_options.read_limits(given)
        assert changes in str(caught.value)


# Watching


def test_watching_ends_with_the_campaign(store: Store, settings: Settings) -> None:
    """A watch reports every look, and ends with one that is over, paused on demand, or left by its engine."""
    seen: list[FleetCampaign] = []
    store.campaigns.note(1, CampaignState.RUNNING, "", process_identity())
    with ENGINE.hold(settings.home_path):
        with pytest.raises(DeadlineError, match=r"campaign c was still running after 0\.3 s"):
            control.wait_settled(settings, store, "c", 0.3)
        store.campaigns.note(1, CampaignState.FINISHED, "100 trials are spent")
        assert control.wait_settled(settings, store, "c", on_progress=seen.append) == seen[0]


def test_watching_notices_a_killed_engine(store: Store, settings: Settings) -> None:
    """Where the engine is gone, a watcher notes the campaign as interrupted, rather than waiting for ever."""
    store.campaigns.note(1, CampaignState.RUNNING, "", GONE)
    assert control.wait_settled(settings, store, "c", 5.0).state is CampaignState.INTERRUPTED


@pytest.mark.parametrize(
    ("state", "exit_code", "said"),
    [
        (CampaignState.FINISHED, None, ""),
        (CampaignState.FAILED, 1, "campaign c is failed: why"),
        (CampaignState.CANCELLED, 1, "campaign c is cancelled: why"),
        (CampaignState.PAUSED, 3, "`farm campaign resume c` goes on"),
        (CampaignState.INTERRUPTED, 3, "`farm campaign resume c` goes on"),
    ],
)
def test_how_an_end_is_told(store: Store, state: CampaignState, exit_code: int | None, said: str) -> None:
    """A finished campaign is no error; one that can be resumed has another exit code than one that cannot."""
    error = control.find_error(store.campaigns.require("c").model_copy(update={"state": state, "reason": "why"}))
    assert (error and error.exit_code) == exit_code
    assert error is None or said in str(error)


def test_a_campaign_none_of_whose_trials_was_good_failed(store: Store) -> None:
    """It is finished, but the command that waited for it has not got what it asked for."""
    campaign = store.campaigns.require("c").model_copy(update={"state": CampaignState.FINISHED})
    tasks: list[dict[str, Any]] = [{"best_s": None}, {"best_s": None}]
    failed = control.find_error(campaign.model_copy(update={"progress": {"counted": 9, "tasks": tasks}}))
    assert failed.exit_code == 1
    tasks[1]["best_s"] = 0.001
    assert control.find_error(campaign.model_copy(update={"progress": {"counted": 9, "tasks": tasks}})) is None
    assert control.find_error(campaign.model_copy(update={"progress": {"counted": 0, "tasks": []}})) is None


def test_a_campaign_without_a_trial_failed(store: Store) -> None:
    """Records that were known before are no result of a campaign that measured nothing."""
    campaign = store.campaigns.require("c").model_copy(update={"state": CampaignState.FINISHED, "reason": "time is up"})
    progress = {"counted": 0, "faults": {"board_faults": 0}, "tasks": [{"best_s": 0.001}]}
    error = control.find_error(campaign.model_copy(update={"progress": progress}))
    assert (error.exit_code, error.message) == (1, "no trial was made by campaign c: time is up")


# What is shown


def render(width: int | None, height: int | None, **given: Any) -> list[str]:
    """What a console of this size shows of a campaign in the middle of its budget."""
    document = make_document()
    values = {
        "state": "running",
        "reason": "",
        "budget": Budget(**document["budget"]),
        "progress": document["progress"],
    } | given
    file = io.StringIO()
    console = Console(file=file, width=width or 200, height=height, color_system=None)
    console.print(campaign_rows.draw("vision-q4", **values, height=height, width=width))
    return file.getvalue().rstrip("\n").split("\n")


def test_tasks_are_grouped_by_type_and_point() -> None:
    """Every board type at every point has a line of its own with sums, above its tasks, the weightiest first."""
    text = "\n".join(render(None, None))
    for title in ("jetson-nano @ default", "jetson-nano @ a57=1428MHz", "jetson-tx2 @ default"):
        assert title in text
    group = text[text.index("jetson-tx2 @ default") :].split("\n")[1:18]
    weighted = [float(line.split()[-1 if not line.endswith("stopping") else -3].replace(",", "")) for line in group]
    assert weighted == sorted(weighted, reverse=True)
    assert "trials 900/900 | time 3:20:00/6:00:00 | board time 4:00:00" in text
    assert "faults: candidate 70, board 9, sample 11" in text
    assert "boards: nano-1 measuring, tx2-1 idle" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (60, 20), (200, 60), (80, 12)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    """No line is wider than the terminal, and the whole is no higher: what does not fit is summed up by group."""
    lines = render(width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height


def test_what_is_shown_once_cuts_nothing() -> None:
    """Without a height to keep to, names, clocks and models are whole at 80 columns; no column is empty."""
    progress = make_document()["progress"]
    progress = progress | {"tasks": [task | {"ended": ""} for task in progress["tasks"]]}
    text = "\n".join(render(80, None, progress=progress))
    assert "…" not in text
    assert "State" not in text


def test_a_campaign_is_shown_before_its_first_progress(store: Store) -> None:
    """A campaign that its engine has not begun with shows its state and why. What the store gives is what is drawn: no
    engine has to have begun.
    """
    assert render(80, 24, state="submitted", reason="waits for an engine", progress=None) == [
        "vision-q4 is submitted: waits for an engine"
    ]
    campaign: FleetCampaign = store.campaigns.require("c")
    drawn = campaign_rows.draw(campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress)
    assert "c is submitted" in str(drawn)


def test_a_line_without_a_terminal() -> None:
    """A pipe gets one line with state, budget, faults and times, also before there is any progress."""
    progress = {"counted": 812, "faults": {"board_faults": 1}, "wall_clock_s": 4000.0, "eta_s": 7777.0, "board_s": 0.0}
    line = campaign_rows.summary_line("v", "waiting", "no board", Budget(trials=4000), progress)
    assert line == (
        "v is waiting: no board | trials 812/4,000 | board time 0:00 | faults: board 1 | elapsed 1:06:40 | ETA 2:09:37"
    )
    assert campaign_rows.summary_line("v", "submitted", "", Budget(), {}).startswith("v is submitted | trials 0 |")
