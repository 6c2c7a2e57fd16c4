"""Options of commands that run any program on a board."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from farm.programs.order import ProgramOrder

_METRIC = "'NAME=EXPRESSION, more|less, UNIT'"


@dataclasses.dataclass(frozen=True)
class AskedProgram:
    """The options beside a program's command."""

    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar=_METRIC,
            help="Number in a run's output: a regular expression with one group, or JMESPath; repeatable, the first is "
            "the objective. Default: the time of a run.",
        ),
    ] = None
    file: Annotated[
        list[str] | None, typer.Option("--file", metavar="PATH", help="File beside the program; repeatable.")
    ] = None
    begin: Annotated[str, typer.Option("--from", metavar="REGEX", help="Measure from this line of the output.")] = ""
    end: Annotated[str, typer.Option("--until", metavar="REGEX", help="Measure until this line of the output.")] = ""
    in_shell: Annotated[bool, typer.Option("--shell", help="The program is a command for /bin/sh.")] = False

    def read_program(self, command: str, **others: list[str] | None) -> ProgramOrder:
        """Return the order of a program; `others` are fields of it. Raises UsageError."""
        lists = {"files": self.file, "metrics": self.metric, **others}
        listed = {name: tuple(each or ()) for name, each in lists.items()}
        return ProgramOrder(command, begin=self.begin, end=self.end, in_shell=self.in_shell, **listed)
