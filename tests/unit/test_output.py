"""How commands end: exit codes, messages on stderr, documents on stdout."""

from __future__ import annotations

import io
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from farm import errors
from farm.cli import campaign, campaign_options, options, output, services
from farm.cli.options import LATENCIES, read_duration_s
from farm.crew.health import Kind
from farm.processes import children
from farm.settings import Settings
from farm.store import Store
from tests.fleet_store import SSH, observe


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers


def fail(error: BaseException) -> NoReturn:
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
    assert "Errno" not in err
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


def test_examples_fit_what_is_asked_for() -> None:
    """No plausible inference takes minutes."""
    with pytest.raises(errors.UsageError) as caught:
        read_duration_s("--deadline", "soon", LATENCIES)
    assert "ms" in caught.value.hint
    assert "10m" not in caught.value.hint


def test_detaching_is_no_interruption(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while a campaign is watched says that it goes on, and nothing of trials that are kept."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    monkeypatch.setattr(campaign, "_follow", lambda *_, **__: fail(KeyboardInterrupt()))
    running: Any = types.SimpleNamespace(ensure=lambda: None)
    settings, screen = Settings(home=str(tmp_path)), campaign_options.CampaignScreen()
    with options.open_store(settings) as store, pytest.raises(SystemExit) as caught:
        campaign._carry_out(running, settings, store, "c", screen, detach=False, json=False, pauses=False)
    assert caught.value.code == 130
    said = capsys.readouterr().err
    assert "detached" in said
    assert "interrupted" not in said


def test_a_program_that_could_say_nothing_has_a_reason(tmp_path: pathlib.Path) -> None:
    """Where a child's log is empty, its exit code and a full disk are reported; the folder /proc has no room at all."""
    log = tmp_path / "agent.log"
    assert children.explain_end(log) == f"it said nothing; its log is {log}"
    assert children.explain_end(log, 1) == "exit code 1"
    log.write_text("one\ntwo\n")
    assert children.explain_end(log, -9) == "killed by signal 9; one | two"
    assert "the disk that holds /proc is full" in children.explain_end(pathlib.Path("/proc/agent.log"), 1)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_gets_no_broken_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences are broken between words; a file gets each in one line."""
    sentence = "jetson-nano: a trial holds a board for 0.56 s (assumed), its build takes 1.00 s (assumed) " * 3
    terminal, file = (io.StringIO() for _ in range(2))
    for stream in (terminal, file):
        console = output._Console(file=stream, force_terminal=stream is terminal, width=width, color_system=None)
        monkeypatch.setattr(output, "stdout", console)
        output.say(sentence.strip())
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines).split() == sentence.split()
    assert file.getvalue() == sentence.strip() + "\n"


def test_an_encoding_that_lacks_letters_gets_others() -> None:
    """With PYTHONIOENCODING=ascii a table with a dash is printed, with another sign in its place."""
    done = subprocess.run(
        [sys.executable, "-c", "from farm.cli.entry import main; main()", "board", "list", "--types"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"jetson-nano" in done.stdout
    assert b"?" in done.stdout


def test_waiting_for_boards_is_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`farm up --wait` says at once how many boards are ready, which it waits for, and how long it still does."""
    settings = Settings(home=str(tmp_path))
    with Store(settings.store_location) as store:
        for name in ("nano-01", "nano-02"):
            store.boards.register(name, "jetson-nano", SSH, {})
        observe(store, Kind.BACK)
        observe(store, Kind.PROBE_PASSED)
    with pytest.raises(errors.DeadlineError, match="1 of 2 boards are not ready"):
        services._wait_probed(settings, 0.3)
    assert "1 of 2 boards are ready; waiting for nano-02, for 0 s more at most" in capsys.readouterr().err
