"""Compare a board's golden-kernel times with its type's and with its own history. Pure.

Factors are shown and judge health; measurements keep their raw values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from device_agent.protocol import EnergySpec, Engine, Limits, Outcome, RunSpec, Status
from farm.errors import PermanentError
from farm.inventory.board_types import BoardType
from farm.measure.arrays import Arrays
from farm.measure.blocking import BlockingSession
from farm.measure.statistics import CONFIDENCE, bound_drawn
from farm.search.codegen import golden
from farm.store import Store
from farm.types.documents import BoardEvent, BoardInfo, BoardInFull
from farm.values import GoldenSample

# Under FARM_HOME: the kernels that were built.
KERNEL_FOLDER = "cache/golden"
# A few runs show that it computes; comparing times takes more of both.
RUNS, WARMUP = 5, 2
# The golden kernel takes milliseconds; a board that needs this long hangs.
RUN_TIMEOUT_S = 30.0
# A board's first worker reads TVM from its disk: beside a busy host, an emulated board took more than 10 s.
LOAD_TIMEOUT_S = 60.0
_MEMORY_BYTES = 256 << 20
# Resamples of each bootstrap (Efron & Tibshirani 1993, An Introduction to the Bootstrap, ch. 13: 1000 or more for
# percentile intervals), and a fixed seed, so that equal samples give equal answers.
_RESAMPLES = 2000
_SEED = 0
# Below this a percentile interval of a median is too narrow; five values bound it by their extremes with 93.75 %
# confidence (order statistics: 1 - 2 / 2**5).
MIN_SAMPLES = 5
# Our choice: well above the scatter of repeated runs of one healthy board, below what would spoil a comparison.
DRIFT_TOLERANCE = 0.03
# Boards of one type differ by binning, cooling and supply; more than this has another cause.
TYPE_TOLERANCE = 0.10
_Floats = np.ndarray[Any, np.dtype[np.float64]]
# Of each board of the type.
_RUNS = 30


def require_kernel(kernels: golden.GoldenKernels, kind: BoardType | None, architecture: str) -> golden.GoldenKernel:
    """Return the kernel for boards of a type, or for an unknown type. Raises DeadlineError, UnavailableError."""
    target = kind.target.to_tvm() if kind is not None and kind.target else None
    return kernels.require(golden.plan_target(target, architecture))


def plan_run(runs: int = RUNS, warmup: int = WARMUP, energy: EnergySpec | None = None) -> RunSpec:
    """Describe the timing of a golden kernel."""
    limits = Limits(timeout_s=RUN_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, threads=1)
    return RunSpec(Engine.KERNEL, entry=golden.ENTRY, runs=runs, warmup=warmup, limits=limits, energy=energy)


def require_right(session: BlockingSession, kernel: golden.GoldenKernel, energy: EnergySpec | None = None) -> Outcome:
    """Run it and check the result. Raises PermanentError, whose message does not name the board."""
    outcome, outputs = session.run_model(plan_run(energy=energy), kernel.library, golden.make_inputs())
    check(outcome, outputs)
    return outcome


def check(outcome: Outcome, outputs: Arrays) -> None:
    """Raise PermanentError, whose message does not name the board, unless a run has the right result."""
    if outcome.status is not Status.OK:
        raise PermanentError(f"the golden kernel failed: {outcome.status} {outcome.message}")
    if wrong := golden.find_mismatch(outputs):
        raise PermanentError(wrong, "Its memory or processor may be faulty, or its clocks too high.")


@dataclasses.dataclass(frozen=True)
class Factor:
    """A ratio of two median times with its interval at `CONFIDENCE`: 1.05 is 5 % slower than the reference.

    `samples` counts the board's own values, `boards` those behind the type's median (1 for a board against itself).
    """

    ratio: float
    ci_low: float
    ci_high: float
    samples: int
    boards: int

    def exceeds(self, tolerance: float) -> bool:
        """Whether the whole interval is more than `tolerance` away from 1, on either side.

        Slower and faster count alike: a change of 3 % means a change by a factor of 1.03.
        """
        return self.ci_low > 1 + tolerance or self.ci_high < 1 / (1 + tolerance)

    @property
    def percent(self) -> str:
        """Format the deviation, such as `+4.2 %`."""
        return f"{(self.ratio - 1) * 100:+.1f} %"


def fit_factor(board: str, medians_s: Mapping[str, Sequence[float]]) -> Factor | None:
    """Return a board's factor against its type, or None with too few data.

    `medians_s` has, per board of the type, one median per run of the golden kernel, in seconds, at one operating point.
    The type's time is the median over boards of their medians, the board itself included: with one common reference two
    boards' factors can be divided, and a board measured often weighs no more than another. Boards with fewer than
    `MIN_SAMPLES` runs are left out; at least two must remain.

    The interval is a percentile bootstrap that resamples runs within boards (stratified bootstrap: Davison & Hinkley
    1997, Bootstrap Methods and their Application, sec. 3.2). A ratio with an interval: Kalibera & Jones 2013, Rigorous
    Benchmarking in Reasonable Time. Medians for skewed times: Hoefler & Belli 2015, Scientific Benchmarking of Parallel
    Computing Systems.

    Raises ValueError for a time that is no positive number.
    """
    usable = {name: _to_array(values) for name, values in medians_s.items() if len(values) >= MIN_SAMPLES}
    if board not in usable or len(usable) < 2:
        return None
    rng = np.random.default_rng(_SEED)
    names = sorted(usable)
    resampled = np.stack([_resample_medians(usable[name], rng) for name in names])
    ratios = resampled[names.index(board)] / np.median(resampled, axis=0)
    reference = float(np.median([np.median(usable[name]) for name in names]))
    return Factor(float(np.median(usable[board])) / reference, *bound_drawn(ratios), usable[board].size, len(names))


def compare_with_history(recent_s: Sequence[float], history_s: Sequence[float]) -> Factor | None:
    """Compare a board's recent golden-kernel medians, in seconds, with its earlier ones.

    None where either has fewer than `MIN_SAMPLES`. `Factor.exceeds(DRIFT_TOLERANCE)` is drift: an interval beyond a
    margin, not a test for zero, which enough samples always pass. Runs are taken as independent: give one value per
    run, not its samples. Raises ValueError for a time that is no positive number.
    """
    if len(recent_s) < MIN_SAMPLES or len(history_s) < MIN_SAMPLES:
        return None
    rng = np.random.default_rng(_SEED)
    recent, history = _to_array(recent_s), _to_array(history_s)
    ratios = _resample_medians(recent, rng) / _resample_medians(history, rng)
    return Factor(float(np.median(recent) / np.median(history)), *bound_drawn(ratios), recent.size, 1)


def find_drift(medians_s: Sequence[float], recent: int = MIN_SAMPLES, tolerance: float = DRIFT_TOLERANCE) -> str:
    """Explain how a board's newest `recent` runs differ from its earlier ones; empty where they do not, or it is
    unknown.

    `medians_s` is oldest first. A slow drift becomes the board's own history; then its factor against the type shows it
    (`fit_factor`). After an intended change the history begins anew by `farm board replace`.
    """
    factor = compare_with_history(medians_s[-recent:], medians_s[:-recent])
    if factor is None or not factor.exceeds(tolerance):
        return ""
    interval = f"{CONFIDENCE:.0%} interval {factor.ci_low:.3f} to {factor.ci_high:.3f}"
    return f"golden kernel {factor.percent} against its own history ({interval}, {factor.samples} runs)"


def _to_array(values: Sequence[float]) -> _Floats:
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("golden-kernel times must be positive numbers")
    return array


def _resample_medians(values: _Floats, rng: np.random.Generator) -> _Floats:
    return np.asarray(np.median(rng.choice(values, size=(_RESAMPLES, values.size)), axis=1))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A board's golden-kernel runs, oldest first, and its factor against its type, None with too few data."""

    samples: tuple[GoldenSample, ...]
    factor: Factor | None

    @property
    def latest(self) -> GoldenSample:
        return self.samples[-1]

    @property
    def text(self) -> str:
        """Describe it in one line."""
        runs = f"{self.latest.median_s * 1e3:.3f} ms in the latest of {len(self.samples)} runs of {self.latest.kernel}"
        if self.factor is None:
            return f"{runs}; too few runs or boards for a factor against its type"
        interval = f"{self.factor.ci_low:.3f} to {self.factor.ci_high:.3f}"
        return f"{runs}; {self.factor.percent} against {self.factor.boards} boards of its type (factor {interval})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.latest.kernel,
            "operating_point": self.latest.operating_point,
            "simulated": self.latest.simulated,
            "factor": None if self.factor is None else dataclasses.asdict(self.factor),
            "runs": [{"at": sample.at, "median_s": sample.median_s} for sample in self.samples],
        }


def to_document(board: BoardInfo, calibration: Calibration | None, events: Sequence[BoardEvent]) -> BoardInFull:
    """Return a board with its golden kernel and its events: what `farm board show --json` prints."""
    known = None if calibration is None else calibration.to_dict()
    return BoardInFull(**dict(board), calibration=known, events=list(events))


def fetch_calibration(store: Store, board: BoardInfo) -> Calibration | None:
    """Return the calibration of a row of `store.boards.fetch`; None where the golden kernel has not run on it."""
    latest = store.golden.find_last(board.name)
    if latest is None:
        return None
    peers = store.golden.fetch(
        board.board_type, latest.kernel, latest.operating_point, simulated=latest.simulated, newest=_RUNS
    )
    medians_s = {name: [sample.median_s for sample in samples] for name, samples in peers.items()}
    return Calibration(tuple(peers[board.name]), fit_factor(board.name, medians_s))
