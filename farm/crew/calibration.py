"""How fast a board is against its type, and whether it still is what it was, from golden-kernel times. Pure.

Factors are shown and judge health; they never touch a measurement, which keeps its raw value.
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
from farm.measure.session import BoardSession
from farm.search.build import golden
from farm.store import Store
from farm.values import GoldenSample

# Under FARM_HOME: the kernels that were built.
KERNEL_FOLDER = "cache/golden"
# A few runs show that it computes; a time that is compared with others' takes more of both.
RUNS, WARMUP = 5, 2
# The golden kernel takes milliseconds; a board that needs this long hangs.
RUN_TIMEOUT_S = 30.0
# A board's first worker reads TVM from its disk: beside a busy host, an emulated board took more than 10 s.
LOAD_TIMEOUT_S = 60.0
_MEMORY_BYTES = 256 << 20


def require_kernel(kernels: golden.GoldenKernels, kind: BoardType | None, architecture: str) -> golden.GoldenKernel:
    """The kernel for boards of a type, or of none that is known. Raises DeadlineError, UnavailableError."""
    target = kind.target.to_tvm() if kind is not None and kind.target else None
    return kernels.require(golden.plan_target(target, architecture))


def run_kernel(
    session: BoardSession,
    kernel: golden.GoldenKernel,
    runs: int = RUNS,
    warmup: int = WARMUP,
    energy: EnergySpec | None = None,
) -> tuple[Outcome, Arrays]:
    """Its outcome and outputs, not judged."""
    return session.run_model(plan_run(runs, warmup, energy), kernel.library, golden.make_inputs())


def plan_run(runs: int = RUNS, warmup: int = WARMUP, energy: EnergySpec | None = None) -> RunSpec:
    """What to ask of a board."""
    limits = Limits(timeout_s=RUN_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, threads=1)
    return RunSpec(Engine.KERNEL, entry=golden.ENTRY, runs=runs, warmup=warmup, limits=limits, energy=energy)


def require_right(session: BoardSession, kernel: golden.GoldenKernel, energy: EnergySpec | None = None) -> Outcome:
    """A run with the right result. Raises PermanentError, whose message does not name the board."""
    outcome, outputs = run_kernel(session, kernel, energy=energy)
    check(outcome, outputs)
    return outcome


def check(outcome: Outcome, outputs: Arrays) -> None:
    """Raise PermanentError, whose message does not name the board, unless a run has the right result."""
    if outcome.status is not Status.OK:
        raise PermanentError(f"the golden kernel failed: {outcome.status} {outcome.message}")
    if wrong := golden.find_mismatch(outputs):
        raise PermanentError(wrong, "Its memory or processor may be faulty, or its clocks too high.")


# Resamples of each bootstrap (Efron & Tibshirani 1993, An Introduction to the Bootstrap, ch. 13: 1000 or more for
# percentile intervals), and a fixed seed, so that equal samples give equal answers.
_RESAMPLES = 2000
_SEED = 0
CONFIDENCE = 0.95
# Below this a percentile interval of a median is too narrow to be believed; five values at least bound it by their
# extremes with 93.75 % confidence (order statistics: 1 - 2 / 2**5).
MIN_SAMPLES = 5
# Our choice: well above what repeated runs of one healthy board differ by, below what would spoil a comparison.
DRIFT_TOLERANCE = 0.03
# Boards of one type differ by binning, cooling and supply; more than this is another matter.
TYPE_TOLERANCE = 0.10

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Factor:
    """A ratio of two median times with its interval at `CONFIDENCE`: 1.05 is 5 % slower than what it is against.

    `samples` counts the board's own values, `boards` those that the type's median was taken over (1 for a board
    against itself).
    """

    ratio: float
    ci_low: float
    ci_high: float
    samples: int
    boards: int

    def exceeds(self, tolerance: float) -> bool:
        """Whether the whole interval lies more than `tolerance` away from 1, to either side.

        Slower and faster count alike: a change of 3 % means a change by a factor of 1.03.
        """
        return self.ci_low > 1 + tolerance or self.ci_high < 1 / (1 + tolerance)

    @property
    def percent(self) -> str:
        """For people, such as `+4.2 %`."""
        return f"{(self.ratio - 1) * 100:+.1f} %"


def fit_factor(board: str, medians_s: Mapping[str, Sequence[float]]) -> Factor | None:
    """A board's factor against its type, or None where there is too little to say.

    `medians_s` has, per board of the type, one median per run of the golden kernel, in seconds, at one operating point.
    The type's time is the median over boards of their medians, the board itself included: boards share one reference,
    so that the factors of two of them may be divided, and a board measured often weighs no more than another. Boards
    with fewer than `MIN_SAMPLES` runs are left out; fewer than two that remain say nothing about a type.

    The interval is a percentile bootstrap that resamples runs within boards; the boards themselves are given, not drawn
    (stratified bootstrap: Davison & Hinkley 1997, Bootstrap Methods and their Application, sec. 3.2). A ratio of
    location with an interval, and not of means: Kalibera & Jones 2013, Rigorous Benchmarking in Reasonable Time;
    medians for skewed times: Hoefler & Belli 2015, Scientific Benchmarking of Parallel Computing Systems.

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
    return _to_factor(float(np.median(usable[board])) / reference, ratios, usable[board].size, len(names))


def compare_with_history(recent_s: Sequence[float], history_s: Sequence[float]) -> Factor | None:
    """A board's recent golden-kernel medians, in seconds, against its own earlier ones.

    None where either has fewer than `MIN_SAMPLES`. `Factor.exceeds(DRIFT_TOLERANCE)` is drift: not a difference that
    could be chance, but one that matters (an interval beyond a margin, not a test for zero, which enough samples always
    pass). Runs are taken as independent, so give one value per run and never the samples within it, which are not.
    Raises ValueError for a time that is no positive number.
    """
    if len(recent_s) < MIN_SAMPLES or len(history_s) < MIN_SAMPLES:
        return None
    rng = np.random.default_rng(_SEED)
    recent, history = _to_array(recent_s), _to_array(history_s)
    ratios = _resample_medians(recent, rng) / _resample_medians(history, rng)
    return _to_factor(float(np.median(recent) / np.median(history)), ratios, recent.size, 1)


def find_drift(medians_s: Sequence[float], recent: int = MIN_SAMPLES, tolerance: float = DRIFT_TOLERANCE) -> str:
    """Why a board's newest `recent` runs are not what its earlier ones were; empty where they are, or nobody can say.

    `medians_s` is oldest first. A board that drifts for long becomes its own history; its factor against the type
    (`find_outlier`) is what still tells then. After a change that is meant the history begins
    anew by `farm board replace`.
    """
    factor = compare_with_history(medians_s[-recent:], medians_s[:-recent])
    if factor is None or not factor.exceeds(tolerance):
        return ""
    return f"golden kernel {factor.percent} against its own history ({_interval(factor)}, {factor.samples} runs)"


def find_outlier(board: str, medians_s: Mapping[str, Sequence[float]], tolerance: float = TYPE_TOLERANCE) -> str:
    """Why a board is not as others of its type are; empty where it is, or nobody can say. See `fit_factor`."""
    factor = fit_factor(board, medians_s)
    if factor is None or not factor.exceeds(tolerance):
        return ""
    return f"golden kernel {factor.percent} against {factor.boards} boards of its type ({_interval(factor)})"


def _to_array(values: Sequence[float]) -> _Floats:
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("golden-kernel times must be positive numbers")
    return array


def _resample_medians(values: _Floats, rng: np.random.Generator) -> _Floats:
    return np.asarray(np.median(rng.choice(values, size=(_RESAMPLES, values.size)), axis=1))


def _to_factor(ratio: float, ratios: _Floats, samples: int, boards: int) -> Factor:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Factor(ratio, float(low), float(high), samples, boards)


def _interval(factor: Factor) -> str:
    return f"{CONFIDENCE:.0%} interval {factor.ci_low:.3f} to {factor.ci_high:.3f}"


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
