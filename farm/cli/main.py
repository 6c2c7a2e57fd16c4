"""Puts the nouns together; `main` is the console script."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Mapping

import typer
import typer.main

from farm.cli import examples, usage
from farm.processes.listening import raise_descriptor_limit
from farm.version import __version__

# In the order of `farm --help`: module of farm/cli and what in it is the command, or the noun's commands.
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "quickstart": ("quickstart", "quickstart"),
    "tune": ("tune", "tune"),
    "doctor": ("doctor", "doctor"),
    "up": ("services", "up"),
    "down": ("services", "down"),
    "status": ("services", "status"),
    "backup": ("store", "backup"),
    "restore": ("store", "restore"),
    "db": ("store", "app"),
    "model": ("model", "app"),
    "record": ("record", "app"),
    "board": ("board", "make_app"),
    "fleet": ("fleet", "app"),
    "sweep": ("sweep", "app"),
    "bundle": ("bundle", "app"),
    "campaign": ("campaign", "app"),
    "completion": ("completion", "completion"),
}


def make_app(word: str | None = None, verb: str | None = None) -> typer.Typer:
    """The command line; of its commands only the one that begins with `word`, where there is such a one; of that the
    verb `verb`, where the noun's verbs take long to load.

    The modules of commands are loaded here: all of them take twice the time that most take alone.
    """
    app = typer.Typer(
        name="farm",
        help="Tune neural networks on the boards you own.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, (module, attribute) in _COMMANDS.items():
        if word in _COMMANDS and name != word:
            continue
        command = getattr(importlib.import_module(f"farm.cli.{module}"), attribute)
        if attribute == "make_app":
            command = command(verb)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tvm-farm {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show version and exit."),
) -> None:
    """Tune neural networks on the boards you own."""


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    raise_descriptor_limit()  # a sweep, or a provisioning, may hold a rack of boards
    # What is fitted here is small: on a busy machine threads that wait for each other make it forty times slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Most of what a command makes are modules, which stay: looking for garbage among them took a fifth of its start.
    gc.set_threshold(50_000, 20, 20)
    words = sys.argv[1:]
    if "_FARM_COMPLETE" in os.environ:
        # A shell asks what could stand there; the noun that is typed already is all that has to be loaded.
        from typer.completion import completion_init  # type: ignore[attr-defined]

        from farm.cli.completion import find_words

        completion_init()
        words = find_words()
    command = typer.main.get_command(make_app(*words[:2]))
    examples.complete(command)
    try:
        code = command.main(sys.argv[1:], prog_name="farm", standalone_mode=False)
    except Exception as error:
        # Commands see to their own errors (`output.run`): what comes here is about the line that was typed.
        if not hasattr(error, "format_message"):
            raise
        usage.leave(error)
    sys.exit(code if isinstance(code, int) else 0)
