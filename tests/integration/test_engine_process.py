"""The process of the engine: one per home, found by its lock, ended by work's end, by a signal, or killed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from farm.campaign.engine import control
from farm.campaign.engine.process import serve
from farm.campaign.engine.state import ENGINE, read_last_words
from farm.errors import UnavailableError
from farm.processes.machine import process_identity
from farm.settings import Settings
from farm.store import Store
from farm.types.states import CampaignState
from tests.integration.conftest import wait_until
from tests.ports import find_free_port
from tests.unit.campaign_orders import make_order, submit

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> Settings:
    return Settings(home=str(tmp_path))


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store(settings.home_path / "farm.db") as store:
        submit(store, make_order("c"))
        yield store


@pytest.fixture
def engine(settings: Settings, store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """An engine's process that has begun with the campaign; see `engine_stand_in`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.engine_stand_in"],
        env=os.environ | {"FARM_HOME": settings.home},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        wait_until(lambda: store.campaigns.require("c").state is CampaignState.RUNNING, "the campaign to run")
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def handlers() -> Iterator[None]:
    """An engine in this process takes signals over; afterwards they are as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_engine_told_to_end_leaves_campaigns_to_be_resumed(
    engine: subprocess.Popen[bytes], store: Store, settings: Settings
) -> None:
    """SIGTERM ends it in order: what is under way is interrupted, what is paused stays paused, the lock is free."""
    submit(store, make_order("d"))
    wait_until(lambda: store.campaigns.require("d").state is CampaignState.RUNNING, "the second campaign to run")
    assert control.pause(settings, store, "d", "op").state is CampaignState.PAUSED
    assert ENGINE.stop(settings.home_path)
    assert engine.wait(10) == 0
    campaign = store.campaigns.require("c")
    assert (campaign.state, campaign.reason) == (CampaignState.INTERRUPTED, "its engine was ended by a signal")
    assert store.campaigns.require("d").state is CampaignState.PAUSED
    assert (ENGINE.is_held(settings.home_path), ENGINE.find(settings.home_path)) == (False, None)
    assert not ENGINE.stop(settings.home_path)
    assert {control.resume(store, name, "op").state for name in "cd"} == {CampaignState.SUBMITTED}


def test_a_killed_engine_is_noticed(engine: subprocess.Popen[bytes], store: Store, settings: Settings) -> None:
    """After SIGKILL the lock is free at once, and the next look marks the campaign as interrupted."""
    assert control.close_abandoned(store) == []
    engine.send_signal(signal.SIGKILL)
    engine.wait(10)
    assert ENGINE.find(settings.home_path) is None
    assert control.close_abandoned(store) == ["c"]
    assert store.campaigns.require("c").state is CampaignState.INTERRUPTED


def test_an_engine_ends_when_nothing_is_left(engine: subprocess.Popen[bytes], store: Store, settings: Settings) -> None:
    """An operator's wishes are heard while it runs, a second engine is refused, and the last campaign ends it."""
    control.ensure_engine(settings)
    assert ENGINE.find(settings.home_path)["pid"] == engine.pid
    second = subprocess.run(
        [sys.executable, "-m", "farm.campaign.engine"],
        env=os.environ | {"FARM_HOME": settings.home},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == ENGINE.refused
    assert "runs already" in second.stderr
    assert control.cancel(settings, store, "c", "op").state is CampaignState.CANCELLED
    assert engine.wait(10) == 0


def test_an_engine_without_work_starts_nothing(settings: Settings) -> None:
    """The real process that finds nothing to do ends by itself, and its caller does not wait longer."""
    with Store(settings.home_path / "farm.db"):
        pass
    began = time.monotonic()
    control.ensure_engine(settings)
    assert time.monotonic() - began < ENGINE.start_timeout_s / 2
    wait_until(lambda: not ENGINE.is_held(settings.home_path), "the engine to end")
    log = (settings.home_path / "logs" / "farm.log").read_text()
    assert "services" not in log


def test_an_engine_that_is_started_ahead_waits_for_its_campaign(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready before anything is submitted, takes what is, and ends by itself where nothing comes."""
    monkeypatch.setenv("FARM_TRACKER_PORT", str(find_free_port()))
    monkeypatch.setenv("FARM_METRICS_PORT", "0")
    with Store(settings.home_path / "farm.db") as store:
        with control.EnginePrestart(settings) as engine:
            engine.begin()
            wait_until(lambda: ENGINE.find(settings.home_path) is not None, "the engine")
            submit(store, make_order("c"))
            engine.ensure()
            wait_until(lambda: store.campaigns.require("c").engine, "the campaign to be taken up")
            control.cancel(settings, store, "c", "op")
        assert engine.process.wait(60) == 0
        with control.EnginePrestart(settings) as engine:
            engine.begin()
            wait_until(lambda: ENGINE.find(settings.home_path) is not None, "another engine")
        assert engine.process.wait(60) == 0


@pytest.mark.usefixtures("handlers")
def test_what_is_ordered_of_an_ending_engine_is_not_lost(settings: Settings, store: Store) -> None:
    """A campaign that is submitted after the last look of the loop, and before the file goes, is begun all the same."""
    begun = []

    def run(given: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None]) -> None:
        for campaign in store.campaigns.fetch(over=False):
            begun.append(campaign.name)
            store.campaigns.note(campaign.id, CampaignState.FINISHED, "")
        if begun == ["c"]:
            submit(store, make_order("late"))

    with ENGINE.hold(settings.home_path):
        serve(settings, store, run)
        assert ENGINE.find(settings.home_path) is None
    assert begun == ["c", "late"]


@pytest.mark.usefixtures("handlers")
def test_what_an_engine_that_fails_has_not_begun_is_told(settings: Settings, store: Store) -> None:
    """A broken farm interrupts also campaigns that its engine never came to: they say why, rather than wait."""

    def run(given: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None]) -> None:
        raise UnavailableError("the disk is full")

    with pytest.raises(UnavailableError):
        serve(settings, store, run)
    campaign = store.campaigns.require("c")
    assert (campaign.state, campaign.reason) == (CampaignState.INTERRUPTED, "its engine ended: the disk is full")


@pytest.mark.usefixtures("handlers")
def test_an_engine_that_a_full_disk_ended_was_not_killed(settings: Settings, store: Store) -> None:
    """It cannot note in the store why it ends, but it leaves the reason in space that it took when it began."""

    def run(given: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None]) -> None:
        store.campaigns.note(1, CampaignState.RUNNING, "", process_identity())
        engine = store.session.engine
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA query_only=ON"))
        raise UnavailableError("the disk is full")

    home = settings.home_path
    with Store(store.location) as full, ENGINE.hold(home), pytest.raises(UnavailableError):
        serve(settings, full, run)
    assert store.campaigns.require("c").state is CampaignState.RUNNING
    store.campaigns.interrupt(lambda _: True, lambda engine: read_last_words(home, engine))
    assert store.campaigns.require("c").reason == "its engine ended: the disk is full"
    assert read_last_words(home, process_identity() | {"pid": 1}) == ""
    with ENGINE.hold(home):
        assert read_last_words(home, process_identity()) == ""


@pytest.mark.usefixtures("handlers")
def test_an_engine_interrupts_what_it_did_not_begin(settings: Settings, store: Store) -> None:
    """A campaign that says it runs on a host that is unknown by now can be resumed once an engine has begun."""
    store.campaigns.note(1, CampaignState.RUNNING, "", process_identity() | {"host": "as-it-was-called"})
    with ENGINE.hold(settings.home_path):
        serve(settings, store, lambda *_: pytest.fail("nothing is left to carry out"))
    assert store.campaigns.require("c").state is CampaignState.INTERRUPTED


@pytest.mark.usefixtures("handlers")
def test_a_campaign_that_an_engine_cannot_begin_does_not_keep_it_busy(settings: Settings, store: Store) -> None:
    """An engine whose loop gives up at once over and over ends, and says so where it had the campaign."""
    runs = []

    def run(given: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None]) -> None:
        runs.append(1)
        store.campaigns.note(1, CampaignState.RUNNING, "", process_identity())

    serve(settings, store, run)
    campaign = store.campaigns.require("c")
    assert (len(runs), campaign.state) == (5, CampaignState.INTERRUPTED)
    assert "could not begin with it" in campaign.reason
