"""Read YAML files that people write, with the line of every mistake. What a file may hold is its model's business."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pydantic
import yaml

from farm.errors import FarmError, UsageError
from farm.inventory import documents
from farm.inventory.documents import Document

# Mistakes told at once; one wrong variable of a large group would otherwise fill the screen.
_MOST_FAULTS = 20

# What leads to a place in the file: keys and positions from the outermost on.
Place = tuple[int | str, ...]


def read_located(path: pathlib.Path, model: type[Document]) -> Document:
    """Read one YAML file as `model`. Raises UsageError naming the line and key of everything that is wrong."""
    try:
        return documents.read_document(path, model)
    except UsageError as error:
        cause = error.__cause__
        if not isinstance(cause, pydantic.ValidationError):
            raise
        # One line per mistake, in the order of the cause's; only the number of its line in the file is not in it.
        texts = [line.removeprefix(f"{path}: ") for line in error.message.splitlines()]
        places: list[Place] = [tuple(detail["loc"]) for detail in cause.errors()]
        if len(texts) != len(places):
            raise
        raise to_error(path, list(zip(places, texts, strict=True))) from cause
    except ValueError as error:
        # PyYAML lets through what Python says of a day that does not exist, or of a number with thousands of digits.
        raise UsageError(f"{path} is not good YAML: {error}") from error
    except RecursionError:
        raise UsageError(f"{path} nests too deep") from None


def to_error(path: pathlib.Path, faults: Sequence[tuple[Place, str]]) -> UsageError:
    """All mistakes as one error, in the order of their lines."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # Read well a moment ago: a pipe, or somebody is writing. The mistakes are worth telling all the same.
        root = None
    found = sorted((_find_line(root, place), text) for place, text in faults)
    lines = list(dict.fromkeys(f"{path} line {line}: {text}" if line else f"{path}: {text}" for line, text in found))
    if len(lines) > _MOST_FAULTS:
        lines[_MOST_FAULTS:] = [f"{path}: {len(lines) - _MOST_FAULTS} more mistakes"]
    return UsageError("\n".join(lines))


def to_text(error: FarmError) -> str:
    """An error as one line, for `to_error`: what happened, and what to do."""
    return " ".join((f"{error.message}. {error.hint}" if error.hint else error.message).split())


def _find_line(node: yaml.Node | None, place: Place) -> int:
    """The line, from 1, of the innermost key of `place` that the file has; 0 where there is no file any more."""
    if node is None:
        return 0
    line = node.start_mark.line
    for step in place:
        if isinstance(node, yaml.MappingNode):
            entries = [(key, value) for key, value in node.value if key.value == str(step)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            entries = [(node.value[step], node.value[step])]
        else:
            break
        if not entries:
            break
        key, node = entries[0]
        line = key.start_mark.line
    return int(line) + 1
