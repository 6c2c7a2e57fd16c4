"""A wrong command line is reported in the farm's own form: what is wrong, then what to do; exit code 2."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from farm import foreign
from farm.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bord"], ["error: there is no command 'bord'", "Did you mean board"]),
        (["board", "lst"], ["the noun 'board' has no command 'lst'", "Did you mean list?"]),
        (["board", "list", "--jsn"], ["there is no option --jsn", "Did you mean --json?"]),
        (["board", "list", "--quux"], ["there is no option --quux", "`farm board list --help` shows how."]),
        (["tune", "mlp", "--trials", "many"], ["--trials: it must be a whole number", "`farm tune --help`"]),
        (["campaign", "run"], ["which campaign?", "--from OLD"]),
        (["tune", "mlp", "--trials"], ["--trials needs a value"]),
        (["quickstart", "extra"], ["extra is too much"]),
    ],
)
def test_a_wrong_line_is_explained(
    words: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One voice, without the usage of a library in front."""
    monkeypatch.setattr("sys.argv", ["farm", *words])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    for text in said:
        assert text in shown.err
    assert "Usage:" not in shown.err


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("Input should be a valid integer, unable to parse string as an integer", "it must be a whole number"),
        ("Input should be greater than or equal to 1", "it must be at least 1"),
        ("List should have at least 1 item after validation, not 0", "it needs at least 1"),
        ("Value error, it names no CPUs", "it names no CPUs"),
        ("Input should be 'a' or 'b'", "it must be 'a' or 'b'"),
        ("something else", "something else"),
    ],
)
def test_what_a_library_says_of_a_value_is_said_plainly(problem: str, said: str) -> None:
    """Files and options speak alike."""
    assert foreign.say_plainly(problem) == said


def test_a_word_that_is_near_is_offered() -> None:
    """And nothing where none is."""
    assert foreign.suggest("nano-O1", ["nano-01", "tx2-01"]) == "Did you mean nano-01?"
    assert foreign.suggest("zzz", ["nano-01"]) == ""


def test_earlier_names_answer_with_the_new_ones() -> None:
    """Each is an error that names a command which there is now."""
    whole: Any = typer.main.get_command(main.make_app())
    for old, new in main.FORMER_COMMANDS.items():
        error = main.find_former([*old.split(), "--json"])
        assert error is not None
        assert f"`farm {old}` is `farm {new}` now" in error.message
        group = whole
        for word in new.split(" --")[0].split():
            group = group.commands[word]


def test_commands_and_options_are_few() -> None:
    """No more than a person can learn; `--json` and `--debug` are every command's."""

    def walk(command: Any) -> Iterator[Any]:
        children = getattr(command, "commands", None)
        if children is None or command.invoke_without_command:
            yield command
        for child in (children or {}).values():
            yield from walk(child)

    commands = list(walk(typer.main.get_command(main.make_app())))
    options = [
        each.opts
        for command in commands
        for each in command.params
        if each.param_type_name == "option" and not {"--json", "--debug", "--help"} & set(each.opts)
    ]
    caps = yaml.safe_load((pathlib.Path(__file__).parent / "caps.yaml").read_text(encoding="utf-8"))
    assert len(commands) <= caps["commands"]
    assert len(options) <= caps["options"]
