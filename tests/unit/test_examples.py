"""Each command's help ends with an example that the command takes; former names of options are taken, not shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from farm.cli import examples, main


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The commands that do something, by their words."""
    nested = getattr(command, "commands", None)
    if nested is None or command.invoke_without_command:
        yield " ".join(words), command
    for name, each in (nested or {}).items():
        yield from walk(each, (*words, name))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """All of the farm's commands, as they are run."""
    whole = typer.main.get_command(main.make_app())
    examples.complete(whole)
    return dict(walk(whole))


def test_every_command_has_an_example_that_it_takes(commands: dict[str, Any]) -> None:
    """None is without, none is of a command that is gone, and each is understood by its command."""
    assert commands.keys() == examples.EXAMPLES.keys()
    for path, command in commands.items():
        example = examples.EXAMPLES[path]
        words = shlex.split(example)
        assert words[: len(path.split())] == path.split()
        context = command.make_context(path, words[len(path.split()) :])
        assert command.get_help(context).rstrip().endswith(f"Example:\n    farm {example}")


def test_former_names_of_options_are_taken_and_not_shown(commands: dict[str, Any]) -> None:
    """Scripts of earlier versions go on; help names the one that there is now."""
    needed = {"board add": ["x"], "bundle build": [], "model compile": ["m", "--out", "o"]}
    needed["sweep export"] = ["1", "--as", "sh"]
    assert needed.keys() == examples.FORMER.keys()
    for path, former in examples.FORMER.items():
        command = commands[path]
        for before, now in former.items():
            context = command.make_context(path, [*needed[path], f"--{before}", "word"])
            [parameter] = [each for each in command.params if f"--{now}" in each.opts]
            assert str(context.params[parameter.name]) == "word"
            assert f"--{before} " not in command.get_help(context)
