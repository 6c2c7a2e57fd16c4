"""Read people's YAML files into pydantic models, with errors that name the file and the key.

It does not know what the models mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import pydantic
import yaml

from farm import errors, foreign
from farm.errors import FarmError, UsageError

Document = TypeVar("Document", bound="StrictModel")
# Mappings that merge each other grow exponentially.
_MOST_KEYS = 10_000
# Mistakes per error; one wrong variable of a large group would otherwise fill the screen.
_MOST_FAULTS = 20
# A path in the file: keys and positions from the outermost on.
Place = tuple[int | str, ...]


def require_inventory_folder() -> pathlib.Path:
    """The folder that holds `board_types/` and the example fleets.

    A wheel carries the data beside this module (see `tool.hatch` in pyproject.toml); a checkout has it at the top.
    Raises UnavailableError if neither exists: the installation is broken.
    """
    here = pathlib.Path(__file__).resolve().parent
    candidates = (here / "data", here.parents[1] / "inventory")
    for folder in candidates:
        if (folder / "board_types").is_dir():
            return folder
    raise errors.UnavailableError(
        f"the inventory's data is missing; looked in {' and '.join(map(str, candidates))}",
        "install tvm-farm again, or run from a complete checkout",
    )


class StrictModel(pydantic.BaseModel):
    """The base of everything read from YAML: frozen, and unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, populate_by_name=True, validate_default=True)


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when it is loaded
    """Safe YAML that refuses duplicate keys, of which plain YAML silently takes the last, and YAML 1.1 numbers that
    people read otherwise: `010` is 8 there, `22:01` is 1321.

    Uses libyaml if available: in Python, all board types cost every command 0.1 s.
    """

    def flatten_mapping(self, node: Any) -> None:
        """Merge what `<<` names, after a look at the mapping's own keys."""
        if getattr(node, "is_flat", False):
            return
        node.is_flat, seen = True, set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag.endswith(":merge") else self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                _refuse(key_node, f"the key {key!r} is given twice")
            seen.add(key)
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:
            _refuse(node, f"it merges more than {_MOST_KEYS:,} keys")

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Parse a number of base 10 (or of explicit base: `0x`, `0b`)."""
        kind = node.tag.rpartition(":")[2]
        made: int | float = getattr(self, f"construct_yaml_{kind}")(node)
        digits = node.value.lstrip("+-").replace("_", "")
        is_octal = kind == "int" and len(digits) > 1 and digits.isdecimal() and digits.startswith("0")
        if is_octal or ":" in digits:
            said = f"{node.value} is a number of base {8 if is_octal else 60} in YAML ({made})"
            _refuse(node, f"{said}; write a decimal number without a leading zero or colon, or quote a text")
        return made


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def read_document(path: pathlib.Path, model: type[Document]) -> Document:
    """Read one YAML file as `model`. Raises UsageError listing all errors at once."""
    return parse_document(read_text(path), model, path)


def read_text(path: pathlib.Path) -> str:
    """A file's text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error


def parse_document(text: str, model: type[Document], path: pathlib.Path) -> Document:
    """As `read_document`, for the text of `path`."""
    try:
        # The loader is a SafeLoader, which the rule cannot see.
        value = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{path}{line} is not good YAML: {error.problem}") from error
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not good YAML: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(
            f"{path} must hold keys and values, not {'nothing' if value is None else type(value).__name__}"
        )
    return check_document(value, model, path)


def check_document(value: Any, model: type[Document], called: pathlib.Path | str) -> Document:
    """Check a value as read from YAML; `called` begins every line of the error. Raises UsageError."""
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        lines = [f"{called}: {_describe(detail, model)}" for detail in error.errors()]
        raise UsageError("\n".join(lines)) from error


def _describe(detail: Any, model: type[StrictModel]) -> str:
    where = ".".join(map(str, detail["loc"]))
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        key = str(detail["loc"][-1])
        known = _known_keys(model, detail["loc"][:-1])
        near = difflib.get_close_matches(key, known, n=1)
        return f"unknown key {where}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
    if detail["type"] == "missing":
        return f"the key {where} is missing"
    message = foreign.say_plainly(detail["msg"])
    hint = foreign.suggest(detail["input"], re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", ""))))
    message = f"{message} (it is {detail['input']!r})" if where else message
    return ": ".join(part for part in (where, message) if part) + (f"; {hint[0].lower()}{hint[1:]}" if hint else "")


def _known_keys(model: type[StrictModel], steps: Sequence[int | str]) -> list[str]:
    """Keys of the model at a path. Steps that are not fields (list positions) are skipped."""
    keys = _find_keys(model)
    for step in steps:
        keys = _find_keys(keys.get(str(step))) or keys
    return list(keys)


def _find_keys(annotation: Any) -> Mapping[str, Any]:
    """Keys of the model or dataclass inside an annotation such as `Target | None` or `tuple[Cluster, ...]`, with their
    annotations.
    """
    if dataclasses.is_dataclass(annotation):
        return get_type_hints(annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    return next(filter(None, map(_find_keys, getattr(annotation, "__args__", ()))), {})


def read_located(path: pathlib.Path, model: type[Document]) -> Document:
    """Read one YAML file as `model`. Raises UsageError naming line and key of every error."""
    try:
        return read_document(path, model)
    except UsageError as error:
        cause = error.__cause__
        if not isinstance(cause, pydantic.ValidationError):
            raise
        # One line per mistake, in the cause's order, each without its line number.
        texts = [line.removeprefix(f"{path}: ") for line in error.message.splitlines()]
        places: list[Place] = [tuple(detail["loc"]) for detail in cause.errors()]
        if len(texts) != len(places):
            raise
        raise to_error(path, list(zip(places, texts, strict=True))) from cause
    except ValueError as error:
        # PyYAML passes on Python's errors about invalid dates, or numbers with thousands of digits.
        raise UsageError(f"{path} is not good YAML: {error}") from error
    except RecursionError:
        raise UsageError(f"{path} nests too deep") from None


def to_error(path: pathlib.Path, faults: Sequence[tuple[Place, str]]) -> UsageError:
    """All mistakes as one error, in the order of their lines."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # It was readable a moment ago: a pipe, or being written. Report the mistakes without lines.
        root = None
    found = sorted((_find_line(root, place), text) for place, text in faults)
    lines = list(dict.fromkeys(f"{path} line {line}: {text}" if line else f"{path}: {text}" for line, text in found))
    if len(lines) > _MOST_FAULTS:
        lines[_MOST_FAULTS:] = [f"{path}: {len(lines) - _MOST_FAULTS} more mistakes"]
    return UsageError("\n".join(lines))


def to_text(error: FarmError) -> str:
    """An error as one line, for `to_error`: what happened, and what to do. Options of commands are keys here."""
    told = " ".join((f"{error.message}. {error.hint}" if error.hint else error.message).split())
    return re.sub(r"--(shape|batch|weights)\b", r"\1", told)


def _find_line(node: yaml.Node | None, place: Place) -> int:
    """The line, from 1, of the innermost existing key of `place`; 0 if the file is gone."""
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
