"""Each command's help ends with an example that the command takes, as it takes what a workflow of CI runs; former names
of options are taken, not shown.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from farm.cli import main
from farm.gate import read_conditions

WORKFLOW = pathlib.Path(__file__).parents[2] / "deploy" / "ci" / "gate.yml"


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    nested = getattr(command, "commands", None)
    if nested is None or command.invoke_without_command:
        yield " ".join(words), command
    for name, each in (nested or {}).items():
        yield from walk(each, (*words, name))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """All of the farm's commands, as they are run."""
    whole = typer.main.get_command(main.make_app())
    main.complete(whole)
    return dict(walk(whole))


def test_every_command_has_an_example_that_it_takes(commands: dict[str, Any]) -> None:
    """None is without, none is of a command that is gone, and each is understood by its command."""
    assert commands.keys() == main.EXAMPLES.keys()
    for path, command in commands.items():
        example = main.EXAMPLES[path]
        words = shlex.split(example)
        assert words[: len(path.split())] == path.split()
        context = command.make_context(path, words[len(path.split()) :])
        assert command.get_help(context).rstrip().endswith(f"Example:\n    farm {example}")


def test_the_workflow_for_ci_runs_what_the_gate_takes(commands: dict[str, Any]) -> None:
    """Its command line is the command's, its conditions can be read, and what it watches and keeps is named there."""
    document = yaml.safe_load(WORKFLOW.read_text())
    triggers = document[True]  # YAML's `on`
    [job] = document["jobs"].values()
    [line] = [step["run"] for step in job["steps"] if "run" in step]
    farm, name, *words = shlex.split(line)
    assert (farm, name) == ("farm", "gate")
    given = commands["gate"].make_context("gate", words).params
    assert len(read_conditions(given["fail_if"])) == 2
    assert (given["boards"], str(given["summary"])) == ("jetson-nano", "$GITHUB_STEP_SUMMARY")
    watched = triggers["pull_request"]["paths"]
    assert watched == [given["model"], str(given["baseline"]), f"{given['baseline'].stem}.artifacts/**"]
    [kept] = [step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept == str(given["junit"])


def test_former_names_of_options_are_taken_and_not_shown(commands: dict[str, Any]) -> None:
    """Scripts of earlier versions go on; help names the one that there is now."""
    needed = {"board add": ["x"], "model compile": ["m", "--out", "o"]}
    needed["sweep export"] = ["1", "--as", "sh"]
    assert needed.keys() == main.FORMER.keys()
    for path, former in main.FORMER.items():
        command = commands[path]
        for before, now in former.items():
            context = command.make_context(path, [*needed[path], f"--{before}", "word"])
            [parameter] = [each for each in command.params if f"--{now}" in each.opts]
            assert str(context.params[parameter.name]) == "word"
            assert f"--{before} " not in command.get_help(context)
