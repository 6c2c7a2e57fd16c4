"""JSON Schemas of the files that people write: current, and of one mind with the models that check the files."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jsonschema
import pytest
import typer.testing
import yaml

from farm.cli.init import KINDS, make_schema
from farm.cli.main import make_app

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "inventory" / "schemas"
CAMPAIGN = {"name": "c", "models": "tiny-cnn", "boards": {"types": "jetson-nano"}, "budget": {"trials": 1}}


def find_faults(kind: str, document: Any) -> list[str]:
    schema = json.loads(make_schema(kind))
    jsonschema.Draft202012Validator.check_schema(schema)
    return [each.message for each in jsonschema.Draft202012Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("kind", KINDS)
def test_those_of_the_inventory_are_current(kind: str) -> None:
    """What is checked in is what the command prints; `make generated` writes it again."""
    assert (FOLDER / f"{kind}.schema.json").read_text(encoding="utf-8") == make_schema(kind)


@pytest.mark.parametrize("path", sorted((ROOT / "inventory").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_name_their_schema_and_keep_it(path: pathlib.Path) -> None:
    """Editors find it by the first line, and have nothing to object to."""
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    schema = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert schema.parent == FOLDER
    assert find_faults(schema.name.partition(".")[0], yaml.safe_load(rest)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"models": ["resnet18", {"path": "a.onnx", "batch": [1, 4], "shape": {"x": [1, 3, 8, 8]}}]},
        {"operating_points": ["default", {"power_mode": "MAXN"}, {"cpu_freq_hz": 1428000000, "cores": "0-3"}]},
        {"operating_points": {"cpu_freq_hz": {"a57": 1428000000}, "cores": [0, 1]}},
        {"budget": {"wall_clock": "6h"}, "measure": {"min_repeat": "100ms"}, "search": {"ops": "all"}},
    ],
)
def test_short_forms_are_in_it(change: dict[str, Any]) -> None:
    """One item in place of a list, texts in place of mappings, spans of time with units: as the farm takes them."""
    assert find_faults("campaign", CAMPAIGN | change) == []


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        ("campaign", CAMPAIGN | {"budjet": {}}),
        ("campaign", CAMPAIGN | {"budget": {}}),
        ("campaign", CAMPAIGN | {"measure": {"timeout": 10}}),
        ("campaign", CAMPAIGN | {"search": {"tuner": "luck"}}),
        ("campaign", {"name": "c"}),
        ("fleet", {"hosts": {"a": {"adress": "192.0.2.1"}}}),
        ("fleet", {"groups": {"g": {"vars": {"transport": "smoke"}}}}),
    ],
)
def test_what_the_farm_refuses_is_marked(kind: str, document: dict[str, Any]) -> None:
    """Keys that there are not, words that are unknown, and what is missing."""
    assert find_faults(kind, document)


def test_the_command_prints_it() -> None:
    """To stdout; an unknown kind is refused, naming those that there are."""
    runner = typer.testing.CliRunner()
    assert runner.invoke(make_app("init"), ["init", "--schema", "fleet"]).stdout == make_schema("fleet")
    refused = runner.invoke(make_app("init"), ["init", "--schema", "sweep"])
    assert (refused.exit_code, "campaign, fleet" in refused.stderr) == (2, True)
