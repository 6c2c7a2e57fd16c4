"""The options with which `farm record` commands say which records are meant; what they choose is `record_choice`'s."""

from __future__ import annotations

from typing import Annotated

import typer

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
