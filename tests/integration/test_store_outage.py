"""Engines on a PostgreSQL store that fails for a while: connections cut, server stopped, server or engine frozen."""

from __future__ import annotations

import pathlib
import signal
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from farm.campaign.engine.control import run_through_outages
from farm.campaign.engine.process import explain_end
from farm.errors import StoreFaultError, UnavailableError, UsageError
from farm.processes.machine import process_identity
from farm.store import Store
from farm.types.campaigns import FleetCampaign
from farm.types.states import CampaignState
from tests.integration.test_engine_process import wait_until
from tests.integration.test_two_coordinators import coordinator
from tests.postgresql import Cluster
from tests.unit.campaign_orders import make_order, submit

# Longer than a connection is tried for in place (`farm.store.postgresql`): the engine has to wait itself.
_DOWN_S = 4.0
_CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


@pytest.fixture
def url(cluster: Cluster) -> str:
    url = cluster.make(empty=False)
    with Store(url) as store:
        submit(store, make_order("c"))
    return url


@pytest.fixture
def engine(url: str, tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine's process that carries the campaign out and writes all the time."""
    with coordinator(url, tmp_path / "home") as process:
        wait_until(lambda: runs_in(url, process), "the campaign to run")
        yield process


def fetch(url: str) -> FleetCampaign:
    with Store(url) as store:
        return store.campaigns.require("c")


def runs_in(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the engine carries the campaign out now; fails where the campaign is left or the engine ended."""
    assert process.poll() is None
    campaign = fetch(url)
    assert campaign.state is not CampaignState.INTERRUPTED, campaign.reason
    return campaign.state is CampaignState.RUNNING and (campaign.engine or {}).get("pid") == process.pid


def cut(url: str) -> None:
    with psycopg.connect(url.rpartition("/")[0] + "/postgres", autocommit=True) as connection:
        connection.execute(_CUT, [url.rpartition("/")[2]])


def test_cut_connections_do_not_interrupt_a_campaign(url: str, engine: subprocess.Popen[bytes]) -> None:
    """The engine goes on with its campaign, however often all connections to the store are cut."""
    for _ in range(5):
        cut(url)
        wait_until(lambda: runs_in(url, engine), "the engine to go on")


def test_an_engine_outlives_a_stopped_server(cluster: Cluster, url: str, engine: subprocess.Popen[bytes]) -> None:
    """A server that crashes and comes back after seconds finds the same engine at the same campaign."""
    cluster.stop()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(_DOWN_S)
    finally:
        cluster.start()
    wait_until(lambda: runs_in(url, engine), "the engine to go on")


def test_an_engine_outlives_a_frozen_host(cluster: Cluster, url: str, engine: subprocess.Popen[bytes]) -> None:
    """Whether the server's host or the engine's own stands still, the campaign goes on with the same engine."""
    cluster.freeze(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        engine.wait(1.0)
    cluster.freeze(signal.SIGCONT)
    wait_until(lambda: runs_in(url, engine), "the engine to go on")
    engine.send_signal(signal.SIGSTOP)
    cut(url)  # the server ends the connections of a host that gives no answer
    engine.send_signal(signal.SIGCONT)
    wait_until(lambda: runs_in(url, engine), "the engine to go on")


def test_an_engine_takes_back_what_was_believed_left(url: str) -> None:
    """After an outage an engine resumes its campaign that others noted as killed, unless another engine has it."""
    me, other = process_identity(), process_identity() | {"host": "elsewhere"}
    with Store(url) as store, Store(url) as others:
        assert others.campaigns.take_back(other) == []
        assert store.campaigns.take(1, me)
        store.campaigns.note(1, CampaignState.RUNNING, "", me)
        assert others.campaigns.interrupt(lambda engine: engine == me) == ["c"]
        assert others.campaigns.take_back(other) == []
        assert store.campaigns.take_back(me) == ["c"]
        assert store.campaigns.take(1, me)
        store.campaigns.note(1, CampaignState.RUNNING, "", me)
        others.campaigns.interrupt(lambda engine: engine == me)
        others.campaigns.want("c", "run", "op")
        assert others.campaigns.take(1, other)
        assert store.campaigns.take_back(me) == []


def test_an_engine_that_a_fault_ended_is_followed_by_another(url: str) -> None:
    """Once patience is over the campaign is left to any engine that may; after an order to end it is not."""

    def fail() -> None:
        raise StoreFaultError("the server is gone")

    with Store(url) as store:
        with pytest.raises(StoreFaultError) as caught:
            run_through_outages(fail, store, process_identity(), lambda: False, patience_s=0)
        for reason, is_left in (
            (explain_end(caught.value), True),
            (explain_end(UnavailableError("the disk is full")), True),
            (explain_end(UsageError("it is no model")), False),
            ("its engine was ended by a signal", False),
        ):
            store.campaigns.note(1, CampaignState.INTERRUPTED, reason)
            assert (store.campaigns.fetch_left(lambda _: False) == ["c"]) is is_left


def test_a_run_begins_again_once_the_store_answers(url: str) -> None:
    """The campaign is submitted again to the engine that had it, as often as the store fails."""
    me, states = process_identity(), []
    with Store(url) as store:

        def run() -> None:
            states.append(store.campaigns.require("c").state)
            assert store.campaigns.take(1, me)
            store.campaigns.note(1, CampaignState.RUNNING, "", me)
            if len(states) < 3:
                raise StoreFaultError("the server is gone")

        run_through_outages(run, store, me, lambda: False)
    assert states == [CampaignState.SUBMITTED] * 3
