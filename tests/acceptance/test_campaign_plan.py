"""`farm campaign run --dry-run`: what the howto does, what is covered after tuning, and what is refused."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

from farm.models import zoo
from tests.acceptance.conftest import Home, new_home, wait_until

ROOT = pathlib.Path(__file__).parents[2]
HOWTO = (ROOT / "docs" / "howto" / "plan-a-campaign.md").read_text(encoding="utf-8")
FLEET, CAMPAIGN = re.findall(r"```yaml\n(.*?)```", HOWTO, re.DOTALL)[:2]


@pytest.fixture(scope="module")
def rack() -> Iterator[Home]:
    """A home with the howto's fleet and campaign."""
    with new_home() as home:
        (home.path / "fleet.yaml").write_text(FLEET)
        (home.path / "campaign.yaml").write_text(CAMPAIGN)
        assert home.run("fleet", "apply", "fleet.yaml").code == 0
        yield home


@pytest.mark.core
def test_what_the_howto_shows(rack: Home) -> None:
    """A campaign over two types is planned without touching a board: workloads once, points where boards have them."""
    done = rack.run("campaign", "run", "--dry-run", "campaign.yaml", "--json")
    assert done.code == 0, done.err
    plan = done.json()
    assert [each["name"] for each in plan["models"]] == ["tiny-cnn", "mlp batch 1", "mlp batch 4"]
    nano, tx2 = plan["types"]
    assert [each["point"] for each in nano["operating_points"]] == ["default", "a57=1428MHz"]
    assert [each["point"] for each in tx2["operating_points"]] == ["default"]
    assert "has no 1428 MHz" in tx2["lacking"]["*=1428MHz"]
    assert nano["simulated"]
    assert (len(nano["boards"]["all"]), nano["boards"]["good"]) == (2, [])
    hashes = [each["hash"] for each in nano["workloads"]]
    assert len(set(hashes)) == len(hashes) <= nano["extracted_workloads"]
    assert plan["estimate"]["ends_at"] == "trials"
    assert plan["estimate"]["trials"] == 300 == sum(p["trials"] for t in plan["types"] for p in t["operating_points"])
    assert plan["estimate"]["seconds"] > 0
    wait_until(lambda: not rack.processes(), "every process of the plan to end", 10.0)


def test_the_table_names_types_and_points(rack: Home) -> None:
    """Without --json the same is a table and some sentences on stdout; what takes time is on stderr."""
    done = rack.run("campaign", "run", "--dry-run", "campaign.yaml")
    assert done.code == 0, done.err
    assert re.search(r"^jetson-nano +a57=1428MHz +\d+ +0 +0 +2 +0 +0 +\d+", done.out, re.MULTILINE)
    assert "jetson-tx2: not at *=1428MHz" in done.out
    assert "none is connected yet" in done.out
    assert "it ends when all trials are spent" in done.out
    assert "reading mlp batch 4" in done.err


@pytest.mark.core
def test_mistakes_are_told_at_once_with_their_lines(rack: Home) -> None:
    """Types, points, labels and models that cannot be come in one message with exit code 2, and nothing on stdout."""
    (rack.path / "wrong.yaml").write_text(
        "name: wrong\n"
        "models:\n"
        "  - gone.onnx\n"
        "  - {zoo: mlp, shape: {data: [1, 65]}}\n"
        "boards: {types: [jetson-nano]}\n"
        "operating_points:\n"
        "  - default\n"
        "  - {power_mode: MAXQ}\n"
        "budget: {trials: 10}\n"
    )
    done = rack.run("campaign", "run", "--dry-run", "wrong.yaml", "--json")
    assert (done.code, done.out) == (2, "")
    *lines, more = done.err.removeprefix("error: ").splitlines()
    assert more.strip() == "More: docs/howto/plan-a-campaign.md"
    assert [re.match(r"wrong\.yaml line (\d+):", line)[1] for line in lines] == ["3", "4", "8"]  # type: ignore[index]
    assert "no such file" in lines[0]
    assert "no power mode MAXQ; it has MAXN, 5W" in lines[2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ops: all", "ops: [conv9d]", "no model has the operator conv9d; they have conv2d"),
        ("timeout: 10s", "timeout: 100ms", "3 samples of 0.1 s take 0.3 s, which is not within the timeout of 0.1 s"),
    ],
)
def test_one_mistake(rack: Home, old: str, new: str, message: str) -> None:
    """A mistake in the howto's campaign ends the command with exit code 2 and says where it is."""
    assert old in CAMPAIGN
    (rack.path / "one.yaml").write_text(CAMPAIGN.replace(old, new))
    done = rack.run("campaign", "run", "--dry-run", "one.yaml")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert re.search(r"one\.yaml( line \d+)?: ", done.err)


def test_a_model_that_changed_is_noticed(rack: Home) -> None:
    """The plan that is kept knows each model's hash: planning again says which model is another one now."""
    (rack.path / "own.onnx").write_bytes(zoo.ZOO["mlp"].build())
    text = "name: own\nmodels: own.onnx\nboards: {types: jetson-nano}\nbudget: {per_workload: 8}\n"
    (rack.path / "own.yaml").write_text(text)
    first = rack.run("campaign", "run", "--dry-run", "own.yaml", "--json")
    (rack.path / "own.onnx").write_bytes(zoo.ZOO["mlp"].build(seed=1))
    second = rack.run("campaign", "run", "--dry-run", "own.yaml", "--json")
    assert "has changed" not in first.err
    assert "own has changed since the last plan" in second.err
    assert first.json()["models"][0]["sha256"] != second.json()["models"][0]["sha256"]
    assert first.json()["estimate"]["ends_at"] == "per_workload"


def test_what_was_tuned_is_covered(home: Home) -> None:
    """`farm tune` tells its result in a few lines; the plan then finds its records, candidates and costs of trials."""
    tuned = home.run("tune", "mlp", "--ops", "dense", "--trials", "6", FARM_BATCH="2", FARM_POPULATION="8")
    assert tuned.code == 0, tuned.err
    told = re.search(r"^campaign 1: (\d) good trials, faults: (?:none|candidate (\d));", tuned.out, re.MULTILINE)
    assert told, tuned.out
    assert int(told[1]) + int(told[2] or 0) == 6
    assert "farm record list" in tuned.out
    assert "`farm model compile mlp --board-type local --out mlp-local` makes a library" in tuned.out
    text = "name: more\nmodels: mlp\nboards: {types: local}\nbudget: {trials: 50}\nsearch: {ops: dense}\n"
    (home.path / "more.yaml").write_text(text)
    done = home.run("campaign", "run", "--dry-run", "more.yaml", "--json")
    assert done.code == 0, done.err
    (local,) = done.json()["types"]
    (point,) = local["operating_points"]
    assert point["recorded"] >= 1
    assert point["known_candidates"] == len(
        home.rows(
            "SELECT DISTINCT workload, candidate FROM trials WHERE fault_side IS NULL OR fault_side = 'candidate'"
        )
    )
    assert re.fullmatch(r"\d+ trials", local["cost"]["held_from"])
    assert point["idle"] == 1
