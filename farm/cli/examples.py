"""One example for the `--help` of every command, and option names of earlier versions.

The commands' own modules have the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# By a command's words: the line after `farm`.
EXAMPLES: Mapping[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Accepted and not shown.
FORMER: Mapping[str, Mapping[str, str]] = {
    "board add": {"type": "board-type"},
    "bundle build": {"output": "out"},
    "model compile": {"labels": "classes"},
    "sweep export": {"key": "operating-point"},
}


def complete(command: Any, words: tuple[str, ...] = ()) -> None:
    """Give a command, or all of a group, their examples and former option names."""
    for name, each in getattr(command, "commands", {}).items():
        complete(each, (*words, name))
    path = " ".join(words)
    if example := EXAMPLES.get(path):
        command.epilog = f"\b\nExample:\n  farm {example}"  # \b: left as it is
    if former := FORMER.get(path):
        command.context_settings = command.context_settings | {
            "token_normalize_func": lambda name: former.get(name, name)
        }
