"""How checks are shown on a terminal, one line each as it ends, with what to do below one that is not well."""

from __future__ import annotations

from rich import markup

from farm.cli import output
from farm.services.checks import Check, Level

_MARKS = {
    Level.OK: "[green]ok  [/]",
    Level.WARNING: "[yellow]warn[/]",
    Level.FAILED: "[red]FAIL[/]",
    Level.NOT_TRIED: "[dim]–   [/]",
}


def print_check(check: Check) -> None:
    """Print one."""
    seconds = f"  ({check.seconds:.1f} s)" if check.seconds >= 0.1 else ""
    line = f"{_MARKS[check.level]} {check.name:<12} {markup.escape(check.detail)}{seconds}"
    output.stdout.print(line, soft_wrap=not output.stdout.is_terminal)
    if check.advice and check.level is not Level.OK:
        output.say(f"  → {check.advice}")
