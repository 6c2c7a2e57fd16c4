"""A candidate as it travels between processes. How it came about, and what becomes of it, is not known here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One scheduled version of a workload, in forms that travel between processes.

    `arguments` are (shape, dtype) of what its function takes: a weight that the schedule wants packed has the packed
    shape, which differs from the workload's own.

    `hash` is over the scheduled function, so two traces that end in the same code are one candidate. `trace_json`
    replays it; `module_json` is the scheduled function itself, ready to build.
    """

    workload: str
    hash: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    trace_json: str = dataclasses.field(repr=False)
    module_json: str = dataclasses.field(repr=False)
