"""docs/stability.md and the code promise the same."""

from __future__ import annotations

import pathlib
import re

import farm
import farm.search
from farm import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_code_keeps_to_the_list() -> None:
    """The names are those of `__all__`, each can be had from `farm`, and every error leaves by a listed exit code."""
    lines = re.findall(r"(?m)^- ([^:\n]+): (`.*)$", (ROOT / "docs" / "stability.md").read_text(encoding="utf-8"))
    said = {name.strip("`"): re.findall(r"`([^`]+)`", text) for name, text in lines}
    assert said["farm"] == sorted(farm.__all__)
    assert said["farm.search"] == sorted(farm.search.__all__)
    codes = {str(each.exit_code) for each in vars(errors).values() if isinstance(each, type)}
    assert codes | {"0", "130"} == set(said["exit codes"])
