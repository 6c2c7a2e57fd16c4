"""What each function of a model takes, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from farm.cli import output, tables

PerLayer = Annotated[
    bool, typer.Option("--per-layer", help="Show what each function takes, watched in runs after the timed ones.")
]


def print_layers(name: str, layers: Sequence[Mapping[str, Any]], median_s: float) -> None:
    """The functions in the order in which they ran, each with its share of an inference."""
    if not layers:
        output.say(f"{name}: what its functions take is not known: only code of TVM's on a processor is watched")
        return
    tables.print_table(
        ("Function", "Calls", "Time (us)", "Share"),
        [
            (each["name"], each["calls"], f"{each['latency_s'] * 1e6:,.1f}", f"{each['latency_s'] / median_s:.1%}")
            for each in layers
        ],
        left=(0,),
    )
    rest_s = median_s - sum(each["latency_s"] for each in layers)
    output.say(f"{name}: {max(0.0, rest_s) / median_s:.1%} of {median_s * 1e3:.3f} ms is none of theirs")
