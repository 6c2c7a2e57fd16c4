"""A gate for CI: the same code passes, slower code fails, and what was written can be read by a CI system."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import xml.etree.ElementTree
from collections.abc import Iterator

import pytest

from farm.artifacts import make
from farm.artifacts.compile import UNTUNED_PIPELINE
from farm.artifacts.given_model import open_model
from farm.inventory.board_types import require_board_type
from farm.settings import Settings
from farm.store import Store
from tests.acceptance.conftest import Home, new_home

TYPE = "jetson-nano"
GATE = ("gate", "mlp", "--boards", TYPE, "--baseline", "baseline.json")


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A home with a virtual board, a baseline of a model, and the same model as TVM compiles it by itself."""

    home: Home
    untuned: pathlib.Path


def parse(path: pathlib.Path) -> xml.etree.ElementTree.Element:
    return xml.etree.ElementTree.parse(path).getroot()  # noqa: S314 - our own file


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    """The baseline is made by the command; the untuned artifact by the farm's own compiler."""
    with new_home() as home:
        assert home.call("board", "add", "sim", "--virtual", TYPE).code == 0
        assert home.run("up").code == 0
        made = home.run(*GATE, "--write-baseline", "--json")
        assert made.code == 0, made.err
        settings = Settings(home=home.environment["FARM_HOME"])
        kind = require_board_type(TYPE).model_copy(update={"pipeline": UNTUNED_PIPELINE})
        with Store(settings.store_location) as store:
            order = make.CompileOrder(open_model("mlp"), kind, simulated=True)
            make.make_artifact(order, home.path / "untuned", settings, store)
        yield Guarded(home, home.path / "untuned")
        home.run("down", "--force")


def test_the_same_code_passes(guarded: Guarded) -> None:
    """Compiled anew it is as fast as its baseline; page, JUnit and --json agree, also with limits that are absolute."""
    home = guarded.home
    conditions = ("--fail-if", "latency > 10 %", "--fail-if", "size > 1%", "--fail-if", "latency > 60 s")
    done = home.run(*GATE, *conditions, "--junit", "gate.xml", "--summary", "gate.md", "--json")
    assert done.code == 0, done.err
    document = done.json()
    [part] = document["boards"]
    assert document["verdict"] == "pass"
    assert part["simulated"]
    assert part["verified"]["matches"]
    assert [each["verdict"] for each in part["conditions"]] == ["pass"] * 3
    assert part["conditions"][0]["low"] <= part["conditions"][0]["value"] <= part["conditions"][0]["high"] <= 1.1
    assert part["conditions"][1]["value"] == 1.0
    assert part["candidate"]["latency_s"]["median"] <= part["candidate"]["latency_s"]["p99"]
    suites = parse(home.path / "gate.xml")
    assert [suite.get("failures") for suite in suites] == ["0"]
    assert len(suites.findall(".//testcase")) == 4
    assert "farm gate: passed" in (home.path / "gate.md").read_text()
    assert "Simulated" in (home.path / "gate.md").read_text()


def test_slower_code_fails(guarded: Guarded) -> None:
    """Unscheduled code fails with exit code 1, an interval beyond the limit, and a failed case."""
    home = guarded.home
    words = ("gate", str(guarded.untuned), *GATE[2:], "--fail-if", "latency > 10 %", "--junit", "slow.xml", "--json")
    done = home.run(*words)
    assert done.code == 1, done.err
    [part] = done.json()["boards"]
    [found] = part["conditions"]
    assert found["verdict"] == "fail"
    assert found["low"] > 1.1
    assert "latency > 10 % holds on sim" in done.err
    [failure] = parse(home.path / "slow.xml").findall(".//failure")
    assert failure.get("message", "").startswith("+")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--fail-if", "latency >> 5 %"), "is no condition"),
        (("--fail-if", "latency > 5 mJ"), "is not given in 'mJ'"),
        (("--fail-if", "speed > 5 %"), "nothing is known of 'speed'"),
        ((), "say what must not be"),
        (("--fail-if", "latency > 5 %", "--operating-point", "mode=MAXN"), "says nothing of mlp"),
        (("--fail-if", "latency > 5 %", "--baseline", "none.json"), "there is no baseline"),
    ],
)
def test_what_cannot_be_decided_is_refused(guarded: Guarded, words: tuple[str, ...], complaint: str) -> None:
    """Before a board is asked for: exit code 2 with what would do."""
    done = guarded.home.call(*GATE, *words)
    assert done.code == 2
    assert complaint in done.err.replace("\n", " ")


def test_a_baseline_leads_nowhere_else(guarded: Guarded) -> None:
    """A file that names an artifact outside its folder, or another one than it was made with, is refused."""
    home = guarded.home
    document = json.loads((home.path / "baseline.json").read_text())
    (home.path / "deep").mkdir(exist_ok=True)
    document["entries"][0]["artifact"] = "../untuned"
    (home.path / "deep" / "out.json").write_text(json.dumps(document))
    out = home.call(*GATE[:4], "--baseline", "deep/out.json", "--fail-if", "latency > 5 %")
    assert (out.code, "leads out of" in out.err.replace("\n", " ")) == (2, True)
    document["entries"][0]["artifact"] = "untuned"
    (home.path / "other.json").write_text(json.dumps(document))
    other = home.call(*GATE[:4], "--baseline", "other.json", "--fail-if", "latency > 5 %")
    assert (other.code, "is not the artifact" in other.err.replace("\n", " ")) == (1, True)


def test_who_has_no_board_is_told_so(guarded: Guarded) -> None:
    """Not measured is not worse: exit code 3."""
    home = guarded.home
    assert home.call("board", "hold", "sim").code == 0
    words = ("gate", str(guarded.untuned), *GATE[2:], "--fail-if", "latency > 5 %", "--wait", "1s")
    assert home.call(*words).code == 3
    assert home.call("board", "release", "sim").code == 0
