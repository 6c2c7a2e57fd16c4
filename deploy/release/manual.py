"""Write the manual pages of docs/man from the commands: `farm(1)`, and one page for each command or noun.

The commands (`farm/cli`) have the texts; this formats them for `man`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import typer.main

from farm import settings
from farm.cli import examples, main
from farm.version import __version__

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "man"
_EXIT_CODES = (
    ("0", "done"),
    ("1", "the work failed"),
    ("2", "wrong usage or input"),
    ("3", "a part of the farm is unavailable"),
    ("4", "a board is unsafe: its clocks could not be put back"),
    ("130", "interrupted; finished trials are kept"),
)


def make_pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    whole: Any = typer.main.get_command(main.make_app())
    examples.complete(whole)
    lines = {name: entry.line for name, entry in main._COMMANDS.items()}
    pages = {"farm.1": "\n".join([*_begin("farm", whole.help), *_overview(lines)]) + "\n"}
    for name, line in lines.items():
        command = whole.commands[name]
        page = [*_begin(f"farm-{name}", line)]
        if verbs := getattr(command, "commands", None):
            # Some do something without a verb, too.
            own = _describe(command) if command.invoke_without_command else _prose(command.help)
            page += [".SH DESCRIPTION", *own, ".SH COMMANDS"]
            for verb, each in verbs.items():
                page += _list_verb(f"farm {name} {_escape(verb)}", each)
        else:
            page += [".SH SYNOPSIS", f"\\fBfarm {name}\\fR{_usage(command)}", ".SH DESCRIPTION", *_describe(command)]
        pages[f"farm-{name}.1"] = "\n".join([*page, ".SH SEE ALSO", ".BR farm (1)"]) + "\n"
    return pages


def _list_verb(words: str, command: Any) -> Iterator[str]:
    """Return a verb, and the verbs below it."""
    yield from (f".SS {words}{_usage(command)}", *_describe(command))
    for verb, each in (getattr(command, "commands", None) or {}).items():
        yield from _list_verb(f"{words} {_escape(verb)}", each)


def _begin(title: str, line: str) -> Iterator[str]:
    # No date: the same commands make the same bytes.
    yield f'.TH {title.upper()} 1 "" "tvm\\-farm {__version__}" "Commands of tvm\\-farm"'
    yield from (".SH NAME", f"{_escape(title)} \\- {_escape(line.rstrip('.'))}")


def _overview(lines: dict[str, str]) -> Iterator[str]:
    yield from (".SH SYNOPSIS", "\\fBfarm\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]", ".SH COMMANDS")
    for name, line in lines.items():
        yield from (".TP", f".BR farm\\-{name} (1)", _escape(line))
    yield ".SH EXIT STATUS"
    for code, meaning in _EXIT_CODES:
        yield from (".TP", f".B {code}", _escape(meaning))
    yield ".SH ENVIRONMENT"
    for field in dataclasses.fields(settings.Settings):
        default = f" Default: {field.default}." if field.default not in ("", None) else ""
        yield from (".TP", f".B {_escape(field.metadata['env'])}", _escape(f"{field.metadata['meaning']}.{default}"))


def _usage(command: Any) -> str:
    words = [_metavar(each) for each in command.params if each.param_type_name == "argument"]
    return "".join(f" \\fI{_escape(word)}\\fR" for word in [*words, "[OPTIONS]"])


def _describe(command: Any) -> Iterator[str]:
    yield from _prose(command.help)
    for each in command.params:
        text = getattr(each, "help", None)
        if each.param_type_name == "argument":
            if text:
                yield from (".TP", f".I {_escape(_metavar(each))}", _escape(text))
        elif not each.hidden:
            names = ", ".join(f"\\fB{_escape(name)}\\fR" for name in [*each.opts, *each.secondary_opts])
            value = "" if each.is_flag else f" \\fI{_escape(_metavar(each))}\\fR"
            yield from (".TP", f"{names}{value}", _escape(f"{text or ''}{_default(each)}".strip()))
    example = re.sub(r"(?s).*Example:\s*", "", command.epilog or "")
    if example:
        yield from (".PP", "Example:", ".PP", ".nf", f".RS\n{_escape(example)}\n.RE", ".fi")


def _default(option: Any) -> str:
    # Defaults that are folders of this machine, or functions, are left out.
    shown = isinstance(option.default, str | int | float) and option.default != "" and not option.is_flag
    return f" Default: {option.default}." if shown else ""


def _metavar(parameter: Any) -> str:
    choices = typing.get_args(parameter.type_descriptor.annotation)
    words = [each for each in choices if isinstance(each, str)]
    return str(parameter.metavar or "|".join(words) or parameter.name.upper())


def _prose(text: str | None) -> Iterator[str]:
    for number, paragraph in enumerate(textwrap.dedent(text or "").strip().split("\n\n")):
        yield from ((".PP",) if number else ())
        yield _escape(" ".join(paragraph.split()))


def _escape(text: str) -> str:
    """Escape text for `man`, whose commands begin with a dot or an apostrophe."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def write() -> None:
    """Make docs/man hold the current pages and no others."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pages = make_pages()
    for path in FOLDER.glob("*.1"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
