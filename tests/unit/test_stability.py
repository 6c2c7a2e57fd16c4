"""docs/commands.md and the code promise the same."""

from __future__ import annotations

import pathlib
import re

import pydantic

import farm
import farm.search
from farm import errors
from farm.types import campaigns, documents

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What commands print with --json, an entry of it where it is a list; tests/unit/test_web.py holds them to these models.
PRINTED: dict[str, type[pydantic.BaseModel]] = {
    "board list": documents.BoardInfo,
    "board show": documents.BoardInFull,
    "campaign list": campaigns.CampaignInfo,
    "campaign show": campaigns.CampaignInFull,
    "queue": documents.Queue,
    "record list": documents.RecordInfo,
    "record show": documents.WorkloadRecords,
    "sweep list": documents.Sweep,
    "sweep show": documents.SweepInFull,
}


def read_lists() -> dict[str, list[str]]:
    lines = re.findall(r"(?m)^- ([^:\n]+): (`.*)$", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"))
    return {name.strip("`"): re.findall(r"`([^`]+)`", text) for name, text in lines}


def test_the_code_keeps_to_the_list() -> None:
    """The names are those of `__all__`, each can be had from `farm`, and every error leaves by a listed exit code."""
    said = read_lists()
    assert said["farm"] == sorted(farm.__all__)
    assert said["farm.search"] == sorted(farm.search.__all__)
    codes = {str(each.exit_code) for each in vars(errors).values() if isinstance(each, type)}
    assert codes | {"0", "130"} == set(said["exit codes"])


def test_documents_have_the_keys_that_are_promised() -> None:
    """Of each command whose `--json` is promised, exactly the keys that the page lists."""
    said = {name: keys for name, keys in read_lists().items() if name.endswith(" --json")}
    assert said == {f"farm {words} --json": sorted(model.model_fields) for words, model in PRINTED.items()}
