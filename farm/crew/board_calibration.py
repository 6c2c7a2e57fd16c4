"""What the golden kernel's history says of one board, for people: its latest time, and its factor against its type.

Measurements keep their raw values; nothing here corrects them. How factors are worked out is in `calibration.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from farm.crew.calibration import Factor, fit_factor
from farm.store import Store
from farm.values import GoldenSample

# Of each board of the type.
_RUNS = 30


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A board's golden-kernel runs, oldest first, and its factor against its type, None where too little is known."""

    samples: tuple[GoldenSample, ...]
    factor: Factor | None

    @property
    def latest(self) -> GoldenSample:
        """The newest run."""
        return self.samples[-1]

    @property
    def text(self) -> str:
        """One line for people."""
        runs = f"{self.latest.median_s * 1e3:.3f} ms in the latest of {len(self.samples)} runs of {self.latest.kernel}"
        if self.factor is None:
            return f"{runs}; too few runs or boards for a factor against its type"
        interval = f"{self.factor.ci_low:.3f} to {self.factor.ci_high:.3f}"
        return f"{runs}; {self.factor.percent} against {self.factor.boards} boards of its type (factor {interval})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "kernel": self.latest.kernel,
            "operating_point": self.latest.operating_point,
            "simulated": self.latest.simulated,
            "factor": None if self.factor is None else dataclasses.asdict(self.factor),
            "runs": [{"at": sample.at, "median_s": sample.median_s} for sample in self.samples],
        }


def to_document(
    board: Mapping[str, Any], calibration: Calibration | None, events: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a board with its golden kernel and its events: what `farm board show --json` prints."""
    known = None if calibration is None else calibration.to_dict()
    return {**board, "calibration": known, "events": [dict(each) for each in events]}


def fetch_calibration(store: Store, board: Mapping[str, Any]) -> Calibration | None:
    """The calibration of a row of `Store.fetch_boards`; None where the golden kernel has not run on it."""
    latest = store.find_golden_sample(board["name"])
    if latest is None:
        return None
    peers = store.fetch_golden_samples(
        board["board_type"], latest.kernel, latest.operating_point, simulated=latest.simulated, newest=_RUNS
    )
    medians_s = {name: [sample.median_s for sample in samples] for name, samples in peers.items()}
    return Calibration(tuple(peers[board["name"]]), fit_factor(board["name"], medians_s))
