"""Accuracy: labelled data that fits or is refused in a sentence, and scores that agree with published values."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from farm.artifacts import given_model
from farm.errors import UsageError
from farm.evaluation import datasets, scores

LABELS = ["tabby cat", "espresso"]
BOX: dict[str, object] = {"image_id": 3, "category_id": 9, "bbox": [1, 2, 3, 4]}


def put_image(path: pathlib.Path) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (200, 20, 20)).save(path)
    return path


def read(folder: pathlib.Path, task: str = "classify", limit: int = 0) -> list[tuple[str, object]]:
    found = datasets.read_dataset(folder, task, LABELS, len(LABELS), limit)
    return [(each.path.name, each.truth) for each in found]


def test_folders_are_classes_by_name_or_number(tmp_path: pathlib.Path) -> None:
    """A folder's name is a class's, in any spelling; a limit spreads over the classes."""
    for name in ("Tabby_Cat/a.png", "Tabby_Cat/b.png", "1/c.png", "1/d.png"):
        put_image(tmp_path / name)
    assert read(tmp_path) == [("c.png", 1), ("d.png", 1), ("a.png", 0), ("b.png", 0)]
    assert read(tmp_path, limit=2) == [("c.png", 1), ("a.png", 0)]


@pytest.mark.parametrize("text", ["file,label\na.png,espresso\n", "\ufefffile;label\na.png;espresso", "a.png\t1"])
def test_a_table_gives_labels(tmp_path: pathlib.Path, text: str) -> None:
    """A CSV beside the images names file and label, as spreadsheets write it; macOS's hidden files are no data."""
    put_image(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text(text)
    (tmp_path / "._labels.csv").write_bytes(b"\0\5\x16\7")
    assert read(tmp_path) == [("a.png", 1)]
    (tmp_path / "._a.png").write_bytes(b"\0\5\x16\7")
    assert [name for name, _ in read(tmp_path, "error")] == ["a.png"]
    shape = given_model.InputSpec("x", (1, 3, 4, 4), "float32")
    task = {"kind": "classifier", "input": "x", "layout": "NCHW", "size": [4, 4], "resize": 4, "dtype": "float32"}
    found = given_model.read_calibration(str(tmp_path), [shape], 1, {**task, "mean": [0] * 3, "std": [1] * 3})
    assert len(found) == 1


def test_coco_gives_boxes(tmp_path: pathlib.Path) -> None:
    """Categories are found by name, boxes become corners, and crowds stay crowds."""
    put_image(tmp_path / "images" / "a.png")
    write_coco(tmp_path, [BOX, {**BOX, "iscrowd": 1}])
    assert read(tmp_path, "detect") == [("a.png", [(1, 1.0, 2.0, 4.0, 6.0, False), (1, 1.0, 2.0, 4.0, 6.0, True)])]


def write_coco(folder: pathlib.Path, annotations: list[dict[str, object]]) -> None:
    images = [{"id": 3, "file_name": "a.png"}]
    document = {"images": images, "categories": [{"id": 9, "name": "espresso"}], "annotations": annotations}
    (folder / "coco.json").write_text(json.dumps(document))


BAD: dict[str, tuple[str, Callable[[pathlib.Path], object], str]] = {
    "none": ("classify", lambda folder: folder.rmdir(), "is no folder"),
    "empty": ("classify", lambda folder: None, "holds no data"),
    "pictures": ("classify", lambda folder: put_image(folder / "a.png"), "holds 1 images without labels"),
    "label": ("classify", lambda folder: put_image(folder / "dog" / "a.png"), "'dog' is none of the model's 2 classes"),
    "number": ("classify", lambda folder: put_image(folder / "2" / "a.png"), "'2' is none of the model's 2 classes"),
    "file": ("classify", lambda folder: (folder / "x.csv").write_text("a.png,espresso"), "which is not in"),
    "outside": ("classify", lambda folder: (folder / "x.csv").write_text("/etc/passwd,espresso"), "which is not in"),
    "cell": ("classify", lambda folder: (folder / "x.csv").write_text("\na.png"), "line 2: 'a.png' has no label"),
    "long": ("classify", lambda folder: (folder / "x.csv").write_text(f"{'a' * 5000},1"), "which is not in"),
    "digits": ("classify", lambda folder: (folder / "x.csv").write_text("x.csv," + "9" * 6000), "is none of"),
    "nan": ("detect", lambda folder: write_coco(folder, [BOX | {"bbox": [0, 0, 1, float("nan")]}]), "has the box"),
    "infinite": ("detect", lambda folder: write_coco(folder, [BOX | {"image_id": float("inf")}]), "cannot convert"),
    "deep": ("detect", lambda folder: (folder / "x.json").write_text("[" * 200_000), "recursion"),
    "image": ("error", lambda folder: (folder / "a.png").write_bytes(b"no"), "a.png is not an image"),
    "unlabelled": ("detect", lambda folder: write_coco(folder, []), "has no annotations"),
    "coco": ("detect", lambda folder: (folder / "x.json").write_text("[]"), "is not a COCO JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_data_is_refused(tmp_path: pathlib.Path, case: str) -> None:
    """Every fault of the data is one sentence that names it."""
    task, spoil, said = BAD[case]
    folder = tmp_path / "data"
    folder.mkdir()
    spoil(folder)
    with pytest.raises(UsageError) as caught:
        read(folder, task)
    assert said in caught.value.message


def test_a_name_of_two_classes_is_no_label(tmp_path: pathlib.Path) -> None:
    """As ImageNet's two cranes: the class's number is asked for, and taken."""
    put_image(tmp_path / "crane" / "a.png")
    with pytest.raises(UsageError, match=r"'crane' names the classes \[0, 2\]"):
        datasets.read_dataset(tmp_path, "classify", ["crane", "sky", "Crane"], 3, 0)
    (tmp_path / "crane").rename(tmp_path / "2")
    assert datasets.read_dataset(tmp_path, "classify", ["crane", "sky", "Crane"], 3, 0)[0].truth == 2


def test_a_task_must_be_the_models() -> None:
    """A classifier is not scored as a detector; outputs of any model are compared."""
    assert datasets.choose_task(None, {"kind": "classifier"}) == "classify"
    assert datasets.choose_task("error", {"kind": "classifier"}) == "error"
    for wanted in ("detect", "segment"):
        with pytest.raises(UsageError):
            datasets.choose_task(wanted, {"kind": "classifier"})


def test_intervals_are_the_published_ones() -> None:
    """Wilson's for 15 of 148 is 0.0624 to 0.1605 (Newcombe 1998, Statistics in Medicine 17, table I, method 3)."""
    assert scores.find_wilson(15, 148) == pytest.approx((15 / 148, 0.0624, 0.1605), abs=1e-4)
    value, low, high = scores.find_paired_change([True] * 90 + [False] * 10, [True] * 100)
    assert (value, low < value < high < 0) == (-0.1, True)
    assert scores.find_paired_change([True] * 5, [True] * 5)[0] == 0


def test_a_rank_counts_better_classes() -> None:
    """Of equal scores the first counts as better; what is not finite is last."""
    assert [scores.find_rank(np.array([[1.0, 3.0, 3.0]]), truth) for truth in range(3)] == [2, 0, 1]
    assert scores.find_rank(np.array([np.nan, 1.0]), 0) == 2


def test_precision_of_boxes() -> None:
    """Right boxes score 1, an overlap of 0.61 counts at three of ten thresholds, a wrong class scores 0."""
    truth, box = [[(0, 0.0, 0.0, 10.0, 10.0, False)]], (0.0, 0.0, 10.0, 10.0, 0.9)
    found = {"right": (0, *box), "near": (0, 0.0, 0.0, 6.1, 10.0, 0.9), "wrong": (1, *box)}
    got = {name: scores.Precision(truth, [[box]]).find() for name, box in found.items()}
    assert got == {"right": pytest.approx((1, 1)), "near": pytest.approx((1, 0.3)), "wrong": (0, 0)}
    crowd, inside = [[*truth[0], (0, 20.0, 0.0, 90.0, 90.0, True)]], (0, 30.0, 30.0, 40.0, 40.0, 0.95)
    assert scores.Precision(crowd, [[inside, found["right"]]]).find() == pytest.approx((1, 1))
    two = scores.Precision([*truth, *truth], [[found["right"]], []])
    assert two.find([0, 0]) == pytest.approx((1, 1))
    assert two.draw(20)[:, 0].std() > 0
