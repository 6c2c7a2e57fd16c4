"""What a shell completes: answered from a table of the commands and from the store as it is, without loading either.

A shell waits for this at every tab, and the commands take a second to load. `make generated` writes the table
(deploy/release/completion.py); the scripts that ask are in `farm/cli/completion.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm import settings

TABLE = Path(__file__).with_name("completing.json")
# The shell's script sets it to the shell's name.
VARIABLE = "_FARM_COMPLETE"
# The longest wait for a store that others write.
_BUSY_TIMEOUT_S = 0.1
_MODEL_FILES = (".onnx", ".pt2", ".tflite")
# Kinds of names that the store has: the tables they are in.
_STORED = {"boards": "boards", "campaigns": "fleet_campaigns"}


def answer(shell: str, typed: Sequence[str]) -> str:
    """Return completions of the last word after `farm`, a line each, in `shell`'s form."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = []
    for word, said in find(table, typed or [""]):
        if shell == "zsh":
            # Its `_describe` ends the word at the first bare colon.
            word = word.replace(":", "\\:")
        lines.append({"zsh": f"{word}:{said}", "fish": f"{word}\t{said}"}.get(shell, word) if said else word)
    return "\n".join(lines)


def find(table: Mapping[str, Any], typed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return completions of the last word, each with its meaning."""
    *before, last = _join(typed)
    node, place, wanted = table["commands"], 0, ""
    for word in before:
        option = _find_option(node, word)
        if wanted:
            wanted = ""
        elif option is not None:
            wanted = "" if "=" in word else option.get("takes", "")
        elif word in node.get("commands", ()):
            node, place = node["commands"][word], 0
        elif not word.startswith("-"):
            place += 1
    name, equals, value = last.partition("=")
    if not wanted and equals and (option := _find_option(node, name)) is not None:
        for word in _list_values(table, option.get("takes", ""), value):
            yield f"{name}={word}", ""
    elif wanted:
        yield from ((word, "") for word in _list_values(table, wanted, last))
    elif last.startswith("-"):
        for option in node.get("options", ()):
            yield from ((each, option["help"]) for each in option["names"] if each.startswith(last))
    elif "commands" in node:
        yield from ((word, each["help"]) for word, each in node["commands"].items() if word.startswith(last))
    elif arguments := node.get("arguments", ()):
        kind = arguments[min(place, len(arguments) - 1)]
        yield from ((word, "") for word in _list_values(table, kind, last))


def _join(typed: Sequence[str]) -> list[str]:
    """Join words as the command gets them: bash splits `--board=nano` and passes only the part behind `=`."""
    words: list[str] = []
    for word in typed:
        if word == "=" and words:
            continue
        words.append(word)
    return words if typed[-1:] != ["="] else [*words, ""]


def _find_option(node: Mapping[str, Any], word: str) -> dict[str, Any] | None:
    name = word.partition("=")[0]
    return next((option for option in node.get("options", ()) if name in option["names"]), None)


def _list_values(table: Mapping[str, Any], kind: str, incomplete: str) -> list[str]:
    """Return values of a kind: names from the store, the table or a folder, or `one|of|these`."""
    if kind in _STORED:
        return _read_names(_STORED[kind], incomplete)
    found = table["names"].get(kind) or (kind.split("|") if "|" in kind else [])
    if kind == "models":
        found = [*found, *_list_models(incomplete)]
    return [word for word in found if word.startswith(incomplete)]


def _list_models(incomplete: str) -> list[str]:
    """Return model files under the typed path; the shell completes folders."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    with contextlib.suppress(OSError):
        return sorted(folder + name for name in os.listdir(folder or ".") if name.endswith(_MODEL_FILES))
    return []


def _read_names(table: str, incomplete: str) -> list[str]:
    # Past the store, which would make or migrate one; a database on another host is not asked.
    with contextlib.suppress(Exception):
        location = settings.load().store_location
        if isinstance(location, Path) and location.is_file():
            uri = f"{location.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, _BUSY_TIMEOUT_S, uri=True)) as connection:
                rows = connection.execute(f"SELECT name FROM {table} ORDER BY name")  # noqa: S608 - one of ours
                return [name for (name,) in rows if str(name).startswith(incomplete)]
    return []
