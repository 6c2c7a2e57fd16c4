"""How commands end: exit codes, messages on stderr, documents on stdout."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

import pytest

from farm import errors
from farm.cli import options, output


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands set logging up for their process; here it is taken back."""
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers


def fail(error: BaseException) -> NoReturn:
    """Work that fails."""
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("no"), 2),
        (errors.UnavailableError("no"), 3),
        (errors.DeadlineError("no"), 3),
        (errors.PermanentError("no"), 1),
        (errors.BoardUnsafeError("no"), 4),
        (errors.InternalError("no"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 3),
        (ZeroDivisionError("no"), 1),
        (BrokenPipeError(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_ends_with_its_code(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every error leaves with its own exit code, says something on stderr alone, and shows no traceback."""
    monkeypatch.setattr(output, "stderr", output.Console(stderr=True, width=200))
    monkeypatch.setattr(output, "_drop_stdout", lambda: None)  # the test's own stdout is still needed
    with pytest.raises(SystemExit) as end:
        output.run(lambda: fail(error), debug=False)
    assert end.value.code == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert bool(err) is not isinstance(error, BrokenPipeError)


def test_an_error_is_not_markup(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in a message arrive as they are."""
    monkeypatch.setattr(output, "stderr", output.Console(stderr=True, width=200))
    with pytest.raises(SystemExit):
        output.run(lambda: fail(errors.UsageError("shape [1, 3] of [bold]x", "[/]")), debug=False)
    assert "shape [1, 3] of [bold]x\n  [/]" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_as_interrupted(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal ends the work; a second one does not disturb the cleaning up; handlers are put back."""
    before = signal.getsignal(number)
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            os.kill(os.getpid(), number)
            cleaned.append(True)

    with pytest.raises(SystemExit) as end:
        output.run(work, debug=False)
    assert end.value.code == 130
    assert cleaned
    assert signal.getsignal(number) is before


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed parses, and what JSON cannot say is refused rather than printed."""
    output.print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        output.print_json({"a": float("inf")})


@pytest.mark.parametrize("trials", [0, -1])
def test_a_budget_that_cannot_be_spent_is_refused(trials: int) -> None:
    """Zero and negative trials are wrong usage."""
    with pytest.raises(errors.UsageError, match=str(trials)):
        options.require_trials(trials)
