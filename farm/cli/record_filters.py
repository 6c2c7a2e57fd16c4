"""The options with which `farm record` commands say which records are meant; what they choose is `record_choice`'s."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from farm.cli import output
from farm.report.record_choice import Filters

Workload = Annotated[
    str, typer.Option("--workload", metavar="TEXT", help="Hash, its first digits, or a part of the name.")
]
Operator = Annotated[str, typer.Option("--operator", metavar="KIND", help="Operator: conv2d, dense, softmax, …")]
BoardType = Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Board type.")]
Target = Annotated[str, typer.Option("--target", metavar="TEXT", help="Part of the target: cortex-a57, …")]
Point = Annotated[str, typer.Option("--operating-point", metavar="POINT", help="Operating point.")]
Since = Annotated[str, typer.Option("--since", metavar="WHEN", help="Verified at or after a date, or within 7d.")]
Until = Annotated[str, typer.Option("--until", metavar="WHEN", help="Verified before a date, or before 7d ago.")]
Campaign = Annotated[
    str, typer.Option("--campaign", metavar="NAME", help="Campaign that tried the candidate: name or number.")
]
Simulated = Annotated[bool, typer.Option("--simulated", help="Records of virtual boards instead of real ones.")]
Imported = Annotated[bool, typer.Option("--imported", help="Records from another farm or file.")]

_ALL: dict[str, Any] = {
    "workload": Workload,
    "operator": Operator,
    "board_type": BoardType,
    "target": Target,
    "operating_point": Point,
    "since": Since,
    "until": Until,
    "campaign": Campaign,
    "imported": Imported,
    "simulated": Simulated,
}


def filtered(function: Callable[..., output.Document]) -> Callable[..., output.Document]:
    """Give a command all of these options, in the place of its parameter `wanted`."""

    @functools.wraps(function)
    def carried_out(*values: Any, **options: Any) -> output.Document:
        chosen = {name: options.pop(name) for name in _ALL}
        yield from function(*values, wanted=Filters(**chosen), **options)

    signature = inspect.signature(function, eval_str=True)
    defaults = Filters()
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=option)
        for name, option in _ALL.items()
    ]
    own = [each for each in signature.parameters.values() if each.name != "wanted"]
    # What a command takes without a name comes first, its own options last.
    at = sum(each.default is inspect.Parameter.empty for each in own)
    own = [*own[:at], *parameters, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own[at:])]
    carried_out.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return carried_out
