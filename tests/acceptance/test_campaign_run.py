"""`farm campaign run` and what goes with it, typed as a user does: a campaign from file to report on virtual boards."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Home, new_home, wait_until

FLEET = """\
vars: { transport: virtual }
groups:
  nanos: { vars: { type: jetson-nano }, hosts: { nano: { count: 2 } } }
"""
CAMPAIGN = """\
name: small
models: mlp
boards: { types: jetson-nano }
budget: { trials: 6 }
search: { tuner: random, ops: dense }
measure: { repeat: 2, min_repeat: 5ms, verify_top: 1 }
"""


@pytest.fixture(scope="module")
def rack() -> Iterator[Home]:
    """A home with two virtual boards and a campaign's file, where `small` has been run to its end."""
    with new_home() as home:
        (home.path / "fleet.yaml").write_text(FLEET)
        (home.path / "small.yaml").write_text(CAMPAIGN)
        assert home.run("fleet", "apply", "fleet.yaml").code == 0
        done = home.run("campaign", "run", "small.yaml", "--json", timeout_s=300.0, FARM_BATCH="2")
        assert done.code == 0, done.err
        (home.path / "small.json").write_text(done.out)
        yield home


@pytest.mark.core
def test_a_campaign_runs_to_its_end(rack: Home) -> None:
    """Every trial of the budget is counted once, every task has a record or a reason, and the engine ends by itself."""
    shown = rack.run("campaign", "show", "small", "--json")
    document = shown.json()
    assert (document["state"], document["progress"]["counted"]) == ("finished", 6)
    assert rack.rows("SELECT count(*) FROM trials WHERE counted IS NOT NULL") == [(6,)]
    assert any(each["median_s"] for each in document["winners"])
    assert sum(each["trials"] for each in document["boards"]) == rack.count_trials()
    [listed] = rack.run("campaign", "list", "--json").json()
    assert (listed["name"], listed["state"], listed["types"][0]["simulated"]) == ("small", "finished", True)
    wait_until(lambda: not rack.processes(), "the engine and its services to end")


@pytest.mark.core
def test_its_report(rack: Home) -> None:
    """The report has a page, JSON and pictures, also from another folder and after the engine has gone."""
    done = rack.run("campaign", "show", "small", "--out", "report", "--json")
    assert done.code == 0, done.err
    for kind, mark in (("page", '<p class="simulated">'), ("markdown", "> **Simulated.**")):
        page = pathlib.Path(rack.path / done.json()["report"][kind]).read_text()
        assert mark in page
        assert "6 trials counted" in page
    assert (rack.path / "report" / "boards.png").stat().st_size > 10_000


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "small.yaml"), "there is a campaign small already, which is finished"),
        (("resume", "small"), "campaign 'small' is over (finished"),
        (("pause", "smal"), "there is no campaign 'smal'"),
        (("budget", "small", "trails=9"), "a budget has no trails"),
        (("budget", "small", "trials=0"), "trials: it must be at least 1"),
        (("run", "--from", "small", "--name", "small"), "there is a campaign small already"),
    ],
)
def test_what_is_refused(rack: Home, words: tuple[str, ...], message: str) -> None:
    """Wrong names, names used twice, campaigns that are over, budgets of nothing: exit code 2, nothing on stdout."""
    done = rack.call("campaign", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_plain_script_may_plan(rack: Home) -> None:
    """A program without a guard for being imported plans a campaign: it is not run once more behind its back."""
    script = rack.path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import farm\n"
        "campaign = farm.Campaign(name='py', models='mlp', boards='jetson-nano', budget=9, search={'ops': 'dense'})\n"
        "print(campaign.plan()['estimate']['trials'], [each.name for each in farm.campaigns()])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=rack.path,
        env=rack.environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "9 ['small']\n"


def test_ctrl_c_pauses_or_only_detaches(rack: Home) -> None:
    """Ctrl-C pauses a campaign that a command runs, within 5 s; of `resume` on a running one it ends the display."""
    running = rack.start("campaign", "run", "--from", "small", "--name", "second", "--trials", "400", FARM_BATCH="2")
    running.wait_for("second is running")
    watching = rack.start("campaign", "resume", "second")
    watching.wait_for("second is ")
    watching.send(signal.SIGINT)
    watched = watching.wait()
    assert watched.code == 130
    assert "detached; `farm campaign resume second` shows the campaign again" in watched.err
    assert running.process.poll() is None
    running.send(signal.SIGINT, group=True)
    ended = running.wait(30.0)
    assert ended.code == 130
    assert "campaign second is paused; `farm campaign resume second` goes on" in ended.err
    assert rack.rows("SELECT state FROM campaigns ORDER BY id DESC LIMIT 1") == [("paused",)]
    done = rack.run("campaign", "cancel", "second")
    assert (done.code, done.out) == (0, "campaign second is cancelled\n")
    wait_until(lambda: not rack.processes(), "the engine and its services to end")


def test_packages_are_part_of_the_order(rack: Home) -> None:
    """A command that is killed forgets nothing: `resume` makes the campaign's packages, once.

    The machine that searches and builds is a board like others, by a file, too: leased, measured on, given back.
    """
    text = CAMPAIGN.replace("small", "packed").replace("trials: 6", "trials: 3").replace("jetson-nano", "local")
    (rack.path / "packed.yaml").write_text(text)
    running = rack.start("campaign", "run", "packed.yaml", "--compile", "packages")
    running.wait_for("packed is running")
    running.send(signal.SIGKILL)
    running.wait()
    done = rack.run("campaign", "resume", "packed", "--json", timeout_s=300.0)
    assert done.code == 0, done.err
    assert done.json()["progress"]["counted"] == 3
    (made,) = done.json()["artifacts"]
    assert pathlib.Path(made["package"]).parent == rack.path / "packages"
    assert pathlib.Path(made["package"]).is_file()
    (final,) = done.json()["progress"]["verdict"]["finals"]
    assert final["taken"] in final["variants"]
    again = rack.call("campaign", "resume", "packed")
    assert (again.code, "is over (finished" in again.err) == (2, True)
    wait_until(lambda: not rack.processes(), "the engine to be gone", 20.0)
    [board] = [row for row in rack.run("board", "list", "--json").json() if row["board_type"] == "local"]
    assert (board["health"], board["lease"]) == ("good", None)


def test_what_no_record_rests_on_can_be_deleted(rack: Home) -> None:
    """Records and their trials of a finished campaign stay, and nothing is deleted without `--yes`."""
    words = ("store", "prune", "--campaign", "small")
    records = rack.call("record", "list", "--simulated", "--json").json()
    shown = rack.call(*words, "--json").json()
    assert [(each["name"], each["trials"]) for each in shown["campaigns"]] == [("small", shown["trials"])]
    assert (shown["trials"] > 0, shown["deleted"]) == (True, 0)
    assert "--yes deletes them" in rack.call(*words).err
    before = rack.count_trials()
    done = rack.call(*words, "--yes", "--shrink", "--json")
    assert done.code == 0, done.err
    assert (done.json()["deleted"], done.json()["free_bytes"]) == (shown["trials"], 0)
    assert rack.count_trials() == before - shown["trials"]
    assert rack.call("record", "list", "--simulated", "--json").json() == records
    rack_of = {row["candidate"] for row in records}
    assert rack_of <= {candidate for (candidate,) in rack.rows("SELECT candidate FROM trials")}
