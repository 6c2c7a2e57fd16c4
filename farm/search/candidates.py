"""A candidate schedule in a form that travels between processes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One scheduled version of a workload.

    `arguments` are the (shape, dtype) of its function's arguments; a weight that the schedule packs has its packed
    shape. `hash` is over the scheduled function, so two traces that give the same code are one candidate. `trace_json`
    replays it; `module_json` is the scheduled function, ready to build.
    """

    workload: str
    hash: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    trace_json: str = dataclasses.field(repr=False)
    module_json: str = dataclasses.field(repr=False)
