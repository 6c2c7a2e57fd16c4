"""A wrong command line is reported in the farm's own form: what is wrong, then what to do; exit code 2."""

from __future__ import annotations

import pytest

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
        (["campaign", "run"], ["FILE is missing", "`farm campaign run --help`"]),
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
