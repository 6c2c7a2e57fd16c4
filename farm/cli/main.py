"""Assemble the command line from its nouns; `entry.py`, the console script, runs `main`."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from farm import foreign
from farm.cli import output
from farm.errors import UsageError
from farm.processes import listening
from farm.version import __version__

# A shell that completes a line sets it, as typer's scripts say.
_COMPLETING = "_FARM_COMPLETE"
# One example for the `--help` of every command, by the command's words: the line after `farm`.
EXAMPLES: Mapping[str, str] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
# Option names of earlier versions: accepted and not shown.
FORMER: Mapping[str, Mapping[str, str]] = {
    "board add": {"type": "board-type"},
    "model compile": {"labels": "classes"},
    "sweep export": {"key": "operating-point"},
}
_QUOTED = re.compile(r"'([^']*)'")
# Commands of earlier versions, and what does the same.
FORMER_COMMANDS: Mapping[str, str] = json.loads(Path(__file__).with_name("former.json").read_text(encoding="utf-8"))


def leave(error: Any) -> None:
    """Say what typer found, on stderr, and leave with exit code 2. `error` is of a class that typer keeps to itself."""
    if isinstance(error, UsageError):
        output.run(lambda: _raise(error), debug=False)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        raise SystemExit(2)
    output.run(lambda: _raise(translate(error)), debug=False)


def _raise(error: UsageError) -> None:
    raise error


def translate(error: Any) -> UsageError:
    """A usage error of typer's as one of ours."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "farm"
    help_hint = f"`{command} --help` shows how."
    message = str(error.format_message())
    if found := re.match(r"No such command '([^']*)'\.?(.*)", message):
        near = _QUOTED.findall(found[2])
        where = "" if command == "farm" else f" {command.removeprefix('farm ')!r} has"
        said = f"there is no command {found[1]!r}" if not where else f"the noun{where} no command {found[1]!r}"
        return UsageError(said, _mean(near) or help_hint)
    if found := re.match(r"No such option: (\S+)", message):
        return UsageError(f"there is no option {found[1]}", _mean(getattr(error, "possibilities", None)) or help_hint)
    if found := re.match(r"Missing (argument|option|parameter)s? '?([^'.]*)", message):
        return UsageError(f"{found[2]} is missing", help_hint)
    if found := re.match(r"Option '([^']*)' requires an? .*", message):
        return UsageError(f"{found[1]} needs a value", help_hint)
    if found := re.match(r"Got unexpected extra arguments?\(?s?\)? \((.*)\)", message):
        return UsageError(f"{found[1]} is too much: {command} takes no more arguments", help_hint)
    if found := re.match(r"Invalid value for '([^']*)'[^:]*: (.*)", message, flags=re.DOTALL):
        return UsageError(f"{found[1]}: {foreign.say_plainly(found[2].strip())}", help_hint)
    return UsageError(f"{message[:1].lower()}{message[1:]}".rstrip("."), help_hint)


def find_former(words: Sequence[str]) -> UsageError | None:
    """Return the error for a line that begins with a command of an earlier version."""
    for count in (3, 2, 1):
        if new := FORMER_COMMANDS.get(old := " ".join(words[:count])):
            return UsageError(f"`farm {old}` is `farm {new}` now", f"`farm {new.split(' --')[0]} --help` shows how.")
    return None


def _mean(near: Any) -> str:
    return f"Did you mean {' or '.join(near)}?" if near else ""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A command or a noun: its module of farm/cli, the function or typer app there, its line in `farm --help`."""

    module: str
    attribute: str
    line: str


# In the order of `farm --help`, below titles.
_GROUPS: Mapping[str, Mapping[str, _Entry]] = {
    "The first day": {
        "quickstart": _Entry("quickstart", "quickstart", "Tune, compile, check and time a model on this machine."),
        "init": _Entry("init", "init", "Write the first files: boards, a campaign, settings."),
        "doctor": _Entry("doctor", "doctor", "Check every part of the farm, or every hop to a board."),
        "up": _Entry("services", "up", "Start the farm's services."),
        "tune": _Entry("tune", "tune", "Tune a model for a board type."),
    },
    "Models": {
        "model": _Entry("model", "app", "Models: show, compile, verify, package, deploy and run them."),
        "campaign": _Entry("campaign", "app", "Campaigns: models x board types x operating points."),
        "sweep": _Entry("sweep", "app", "Sweeps: latency, power and energy over a board's clocks."),
        "program": _Entry("program", "app", "Any program: time it on a board."),
        "record": _Entry("record", "app", "Records: the best verified trial of each workload."),
        "result": _Entry(
            "result", "app", "Results of `farm model bench`, `run` and `evaluate`: list and compare them."
        ),
        "gate": _Entry("gate", "gate", "Pass or fail a change of a model, against a baseline."),
    },
    "Boards": {
        "board": _Entry("board", "app", "Boards: register, reach, provision, hold and inspect them."),
        "fleet": _Entry("fleet", "app", "Fleet files: all boards, and how each is reached."),
        "queue": _Entry("queue", "queue", "Show what waits for boards, why, and who has boards."),
    },
    "The farm itself": {
        "status": _Entry("services", "status", "Show the farm's services and how each board is reached."),
        "down": _Entry("services", "down", "End the farm's services."),
        "logs": _Entry("logs", "logs", "Show what all processes of the farm wrote, what happened, who changed what."),
        "web": _Entry("web", "app", "The farm's page and API: serve it, its token, its address."),
        "notices": _Entry("notices", "notices", "Show who hears of what, by a command, a webhook or a URL of Apprise."),
        "store": _Entry("store", "app", "The store: back it up, restore, check and prune it."),
    },
}
_COMMANDS = {name: entry for group in _GROUPS.values() for name, entry in group.items()}


class _Farm(typer.core.TyperGroup):
    """`farm --help` in groups. Typer's own need rich markup."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See `TyperGroup`."""
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, entry.line) for name, entry in group.items()])


def make_app(word: str | None = None, *, names_only: bool = False) -> typer.Typer:
    """Return the command line, or its part under one command or noun where `word` names one.

    `names_only` loads no command: the result can list them, and run none.
    """
    app = typer.Typer(
        name="farm",
        cls=_Farm,
        help="Tune neural networks on the boards you own.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, entry in _COMMANDS.items():
        if names_only:
            app.command(name, short_help=entry.line)(_never)
            continue
        if word in _COMMANDS and name != word:
            continue
        command = getattr(importlib.import_module(f"farm.cli.{entry.module}"), entry.attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=entry.line)
        else:
            app.command(name, short_help=entry.line)(command)
    return app


def _never() -> None:
    raise AssertionError("commands that are listed alone are not run")


def _runs_none(words: Sequence[str]) -> bool:
    """Return whether a line runs no command: it lists them, asks for the version, or names an unknown one."""
    return not words or words[0] in ("-h", "--help", "--version") or not (words[0] in _COMMANDS or words[0][:1] == "-")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tvm-farm {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show version and exit."),
) -> None:
    """Tune neural networks on the boards you own."""


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


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    listening.raise_descriptor_limit()  # a sweep, or a provisioning, may hold a rack of boards
    # What is fitted here is small: on a busy machine threads that wait for each other make it forty times slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Most of what a command makes are modules, which stay: looking for garbage among them took a fifth of its start.
    gc.set_threshold(50_000, 20, 20)
    os.umask(os.umask(0o022) | 0o022)  # other users write no file of ours
    words = sys.argv[1:]
    if _COMPLETING in os.environ:
        # The line that a shell completes: bash and zsh, fish and others, call it by different names.
        words = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()[1:]
    elif error := find_former(words):
        leave(error)
    command = typer.main.get_command(make_app(*words[:1], names_only=_runs_none(words)))
    complete(command)
    try:
        code = command.main(sys.argv[1:], prog_name="farm", standalone_mode=False)
    except Exception as error:
        # Commands see to their own errors (`output.run`): what comes here is about the line that was typed.
        if not hasattr(error, "format_message"):
            raise
        leave(error)
    sys.exit(code if isinstance(code, int) else 0)
