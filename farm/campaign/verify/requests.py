"""What a verification of winners asks of those who drive it. Plain facts; who decides is `winners`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from device_agent.protocol import MeasureSpec, OperatingPoint, RunSpec

# Distinct within one verification; its campaign's number is the first part.
Token = str


class WinnerKey(NamedTuple):
    """What has one winner: a workload (hash) on a board type at an operating point (text in trials and records)."""

    board_type: str
    workload: str
    point: str


@dataclasses.dataclass(frozen=True)
class ReplayWanted:
    """Have the campaign's search replay a trace; answer with `on_replayed`. Any of `key`'s tasks will do for it."""

    token: Token
    key: WinnerKey
    trace_json: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class BuildWanted:
    """Compile a function (TVM's JSON) for a target; answer with `on_built`."""

    token: Token
    module_json: str = dataclasses.field(repr=False)
    target: Mapping[str, Any]
    standalone: bool


@dataclasses.dataclass(frozen=True)
class RunWanted:
    """Run a program on a board that was given, clocks held at `point`; answer with `on_ran`."""

    token: Token
    board: str
    point: OperatingPoint
    spec: RunSpec
    program: bytes = dataclasses.field(repr=False)
    inputs: dict[str, npt.NDArray[np.generic]] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class MeasureWanted:
    """Time a library on a board that was given, clocks held at `point`; answer with `on_measured`."""

    token: Token
    board: str
    point: OperatingPoint
    spec: MeasureSpec
    library: bytes = dataclasses.field(repr=False)


Request = ReplayWanted | BuildWanted | RunWanted | MeasureWanted
