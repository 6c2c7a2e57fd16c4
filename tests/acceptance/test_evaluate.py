"""Accuracy on data, as a user types it: in two precisions, as a report, as a kept result, and as a gate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from tests.acceptance.conftest import Home, new_home

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A home with twelve images in folders named by two of the model's ten classes."""
    with new_home() as home:
        random = np.random.default_rng(0)
        for index in range(12):
            folder = home.path / "data" / str(index % 2)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (16, 16, 3), "uint8")).save(folder / f"{index}.png")
        yield home


def test_precisions_are_scored_side_by_side(home: Home) -> None:
    """Rows have scores with intervals, changes on the same examples, latency and size; the report has all."""
    words = ("model", "evaluate", "tiny-cnn", "--data", "data", "--weights", "float32,int8,fp16", "--out", "out")
    done = home.run(*words, "--wait", "5m", "--json")
    assert done.code == 0, done.err
    document = done.json()
    reference, exact, rounded, *missing = document["rows"]
    assert [each["precision"] for each in document["rows"]][:3] == ["reference", "float32", "int8"]
    assert exact["scores"] == reference["scores"]
    assert exact["change"]["top1"][0] == 0
    low, high = rounded["intervals"]["top5"]
    assert 0 <= low <= rounded["scores"]["top5"] <= high <= 1
    assert rounded["latency_s"]["median"] > 0
    assert all(each["reason"] for each in missing)
    assert document["calibration"] == "data"
    assert {each["label"] for each in document["examples"]} == {"class 0", "class 1"}
    assert {each.name for each in (home.path / "out").iterdir()} == {
        *("accuracy.png", "evaluate.html", "evaluate.json", "evaluate.md")
    }
    [kept] = home.run("result", "list", "--json").json()
    assert (kept["kind"], kept["model"]) == ("evaluate", "tiny-cnn")


def test_a_gate_bounds_the_loss(home: Home) -> None:
    """The same code changes no example; as few of them decide a loose bound and no tight one."""
    words = ("gate", "tiny-cnn", "--boards", "local", "--baseline", "baseline.json")
    assert home.run(*words, "--write-baseline").code == 0
    bounds = ("--fail-if", "top1 < -90 %", "--fail-if", "top1 < -0.5 %", "--fail-if", "top5 < 100 %", "--json")
    done = home.run(*words, "--data", "data", *bounds)
    loose, tight, absolute = done.json()["boards"][0]["conditions"]
    assert (loose["verdict"], tight["verdict"], absolute["verdict"]) == ("pass", "undecided", "fail")
    assert (loose["value"], done.code) == (0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "tiny-cnn", "--data", "none"), "is no folder"),
        (("evaluate", "tiny-cnn", "--data", "data", "--weights", "int4"), "there is no 'int4'"),
        (("evaluate", "tiny-cnn", "--data", "data", "--classes", "names.txt"), "--classes has 2 names"),
        (("evaluate", "tiny-cnn", "--data", "data", "--task", "detect"), "the model is no detector"),
        (("quantize", "mlp", "--calibration", "data", "--out", "x.onnx"), "no image that the model takes"),
        (("zoo", "--fetch", "alexnet"), "no trained model is called 'alexnet'"),
    ],
)
def test_what_does_not_fit_is_refused(home: Home, words: tuple[str, ...], said: str) -> None:
    """One sentence, exit code 2, and nothing is written."""
    (home.path / "names.txt").write_text("a\nb\n")
    before = sorted(home.path.rglob("*.onnx"))
    done = home.call("model", *words)
    assert (done.code, said in done.err) == (2, True), done.err
    assert sorted(home.path.rglob("*.onnx")) == before
