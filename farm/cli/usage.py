"""What is wrong with a command line, in the farm's own voice; typer finds it, and has another one."""

from __future__ import annotations

import re
import sys
from typing import Any

from farm.cli import output
from farm.errors import UsageError
from farm.foreign import say_plainly

_QUOTED = re.compile(r"'([^']*)'")


def leave(error: Any) -> None:
    """Say what typer found, on stderr, and leave with exit code 2. `error` is of a class that typer keeps to itself."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        raise SystemExit(2)
    output.run(lambda: _raise(error), debug=False)


def _raise(error: Any) -> None:
    raise translate(error)


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
        return UsageError(f"{found[1]}: {say_plainly(found[2].strip())}", help_hint)
    return UsageError(f"{message[:1].lower()}{message[1:]}".rstrip("."), help_hint)


def _mean(near: Any) -> str:
    return f"Did you mean {' or '.join(near)}?" if near else ""
