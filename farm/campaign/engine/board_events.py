"""What the crew of boards tells: see `boards`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import Outcome
from farm.measure.arrays import Arrays


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A board is leased and its session is open: it may be given work. `is_host`: while it measures, search and build
    rest, since it is the machine that they run on.
    """

    board: str
    board_type: str
    labels: Mapping[str, str]
    description: Mapping[str, Any]
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class Left:
    """A board may be used no more. Whatever it had still to do ends with this; no `TrialMeasured` or `Ran` follows.

    `lost`: it went down under what it was measuring, of which no `TrialMeasured` told. `doubted_after`: what it
    measured after this mark of the store's (`Store.fetch_mark`) is not to be believed.
    """

    board: str
    reason: str
    lost: bool = False
    doubted_after: int | None = None


@dataclasses.dataclass(frozen=True)
class AskedBack:
    """A board is somebody else's in the queue: it is left as soon as it has nothing more to do, and is to be given
    nothing more. `Left` follows.
    """

    board: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TrialMeasured:
    """A measurement ended. `board_s` is for how long the board was busy with it, bringing its clocks there included."""

    assignment: Any
    board: str
    outcome: Outcome
    board_s: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """A program's run ended; `job` is whose it was."""

    job: Any
    board: str
    outcome: Outcome
    outputs: Arrays = dataclasses.field(repr=False)


BoardEvent = Arrived | Left | AskedBack | TrialMeasured | Ran
