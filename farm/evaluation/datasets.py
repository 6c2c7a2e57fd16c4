"""Read labelled data: images in a folder per class, a CSV (file,label), COCO JSON, or .npz with expected outputs."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.artifacts.given_model import refusing
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import reading
from farm.errors import UsageError

CLASSIFY, DETECT, ERROR = "classify", "detect", "error"
TASKS = (CLASSIFY, DETECT, ERROR)
_KINDS = {"classifier": CLASSIFY, "detector": DETECT}
_ARRAYS = ".npz"
# COCO's largest list of boxes has 448 MB.
_MOST_BYTES = 1 << 29
_HINTS = {
    CLASSIFY: "Put images into a folder per class, or beside a CSV with the columns file and label.",
    DETECT: "Put images beside one COCO JSON file with images, annotations and categories.",
    ERROR: "Put images or .npz files with inputs into it.",
}


@dataclasses.dataclass(frozen=True)
class Example:
    """A file and its truth: a class's number, or objects as (class, left, top, right, bottom, is a crowd) in pixels."""

    path: Path
    truth: Any = None


def choose_task(wanted: str | None, task: Mapping[str, Any]) -> str:
    """Return what is scored: `wanted`, else what the model's `task` suggests. Raises UsageError."""
    own = _KINDS.get(str(task["kind"]), ERROR)
    if wanted is None or wanted in (own, ERROR):
        return wanted or own
    if wanted not in TASKS:
        raise UsageError(f"--task {wanted!r} is unknown", f"Known: {', '.join(TASKS)}.")
    raise UsageError(f"--task {wanted}: the model is no {next(kind for kind in _KINDS if _KINDS[kind] == wanted)}")


def read_dataset(folder: Path, task: str, labels: Sequence[str], classes: int, limit: int) -> list[Example]:
    """Return up to `limit` examples (0: all), spread over the data. Raises UsageError.

    `labels` are the names of the model's `classes`, or empty.
    """
    if not folder.is_dir():
        raise UsageError(f"--data {str(folder)!r} is no folder", "Give a folder of images with labels.")
    with refusing(_HINTS[task]):
        if task == DETECT:
            found = _read_coco(folder, labels, classes)
        elif task == ERROR:
            found = [Example(each) for each in list_files(folder, (*tasks.SUFFIXES, _ARRAYS))]
        else:
            tables = list_files(folder, (".csv",))
            found = _read_csv(tables[0], labels, classes) if tables else _read_folders(folder, labels, classes)
        if not found:
            pictures = len(list_files(folder, tasks.SUFFIXES))
            said = f"{pictures} images without labels" if pictures else "no data"
            raise UsageError(f"{folder} holds {said}", _HINTS[task])
        if 0 < limit < len(found):
            found = [found[index * len(found) // limit] for index in range(limit)]
        for path in (each.path for each in found if each.path.suffix.lower() != _ARRAYS):
            tasks.read_image(path, 3)
    return found


def list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the files of a folder with one of the suffixes, by name; not hidden ones, such as macOS's `._a.jpg`."""
    found = (each for each in folder.iterdir() if each.suffix.lower() in suffixes and each.is_file())
    return sorted(each for each in found if not each.name.startswith("."))


def _read_folders(folder: Path, labels: Sequence[str], classes: int) -> list[Example]:
    # macOS's archives have a second tree of resources.
    folders = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "__MACOSX")))
    known = _index(labels)
    # Without matching names, folders in order are the classes, as torchvision's ImageFolder has it.
    is_ordered = len(folders) == classes and not any(_plain(each.name) in known for each in folders)
    return [
        Example(path, order if is_ordered else _find_class(each.name, known, classes, each))
        for order, each in enumerate(folders)
        for path in list_files(each, tasks.SUFFIXES)
    ]


def _read_csv(path: Path, labels: Sequence[str], classes: int) -> list[Example]:
    with reading(path, "a CSV in UTF-8", _MOST_BYTES) as file:
        lines = file.read().decode("utf-8-sig").splitlines()
        mark = max(",;\t", key=(lines or [""])[0].count)
        rows = [(number, row) for number, row in enumerate(csv.reader(lines, delimiter=mark), 1) if row]
    if rows and [each.strip().lower() for each in rows[0][1][:2]] == ["file", "label"]:
        rows = rows[1:]
    known, found = _index(labels), []
    for number, row in rows:
        line = f"{path}, line {number}"
        if len(row) < 2:
            raise UsageError(f"{line}: {row[0][:80]!r} has no label", "Each line is FILE,LABEL.")
        found.append(Example(_require_file(path, row[0].strip(), line), _find_class(row[1], known, classes, line)))
    return found


def _read_coco(folder: Path, labels: Sequence[str], classes: int) -> list[Example]:
    files = list_files(folder, (".json",))
    if len(files) != 1:
        raise UsageError(f"{folder} holds {len(files)} JSON files, not one", _HINTS[DETECT])
    [path] = files
    with reading(path, "a COCO JSON", _MOST_BYTES) as file:
        document = json.load(file)
        named, categories = _name(document["images"], "file_name"), _name(document["categories"], "name")
        boxes: dict[int, list[tuple[int, list[float]]]] = {image: [] for image in named}
        for at, each in enumerate(document["annotations"], 1):
            x, y, width, height = map(float, each["bbox"])
            corners = [x, y, x + width, y + height]
            if not all(map(math.isfinite, corners)) or min(width, height) < 0:
                raise ValueError(f"annotation {at} has the box {each['bbox']}")
            crowd = bool(each.get("iscrowd"))
            boxes[int(each["image_id"])].append((int(each["category_id"]), [*corners, crowd]))
    if not any(boxes.values()):
        raise UsageError(f"{path} has no annotations", _HINTS[DETECT])
    known, used = _index(labels), {category for each in boxes.values() for category, _ in each}
    if unknown := used - categories.keys():
        raise UsageError(f"{path} has annotations of category {min(unknown)}, which it does not name", _HINTS[DETECT])
    # Without names, categories in order are the classes.
    numbers = {category: order for order, category in enumerate(sorted(categories))}
    if known or len(categories) != classes:
        numbers = {each: _find_class(categories[each], known, classes, path) for each in used}
    return [
        Example(_require_file(path, name, path), [(numbers[category], *box) for category, box in boxes[image]])
        for image, name in sorted(named.items())
    ]


def _name(rows: Any, field: str) -> dict[int, str]:
    """Return a field by id. Raises ValueError for an id that is there twice."""
    found = {int(each["id"]): str(each[field]) for each in rows}
    if len(found) != len(rows):
        raise ValueError(f"two rows with a {field} have one id")
    return found


def _require_file(listed: Path, name: str, where: Any) -> Path:
    for folder in (listed.parent, listed.parent / "images"):
        # A name may be too long for the system, or hold what it forbids.
        with contextlib.suppress(OSError, ValueError):
            path = folder / name
            if path.is_file() and path.resolve().is_relative_to(listed.parent.resolve()):
                return path
    raise UsageError(f"{where} names {name[:80]!r}, which is not in {listed.parent}")


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _index(labels: Sequence[str]) -> dict[str, list[int]]:
    found = dict[str, list[int]]()
    for index, each in enumerate(labels):
        found.setdefault(_plain(each), []).append(index)
    return found


def _find_class(text: str, known: Mapping[str, Sequence[int]], classes: int, where: Any) -> int:
    """Return the class that a name or number means. Raises UsageError, also for a name of several classes."""
    text = text.strip()
    if named := known.get(_plain(text)):
        if len(named) > 1:
            raise UsageError(f"{where}: {text[:80]!r} names the classes {named}", "Give the class's number.")
        return named[0]
    # Python converts no numbers of more than 4,300 digits.
    if text.isdecimal() and len(text) < 10 and int(text) < classes:
        return int(text)
    hint = "--classes FILE names the classes, one a line." if not known else f"For example: {next(iter(known))}."
    raise UsageError(f"{where}: {text[:80]!r} is none of the model's {classes} classes", hint)
