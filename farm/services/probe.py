"""One probe of one board: lease it, connect, see what it is, run the golden kernel, and tell the store what that says.

What counts as wrong is in `probe_rules`, when a probe is due in `probe_plan`, which process does this in `prober`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import ClaimStatus, Description, Outcome
from farm.connectivity import fences
from farm.connectivity.tracker import Tracker
from farm.crew import golden_runs
from farm.crew.calibration import MIN_SAMPLES
from farm.crew.health import HealthLimits, Kind, Observation, decide_by, find_kind
from farm.errors import (
    BoardNonsenseError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    LeaseOverError,
    TransientError,
    UnavailableError,
)
from farm.inventory.board_types import BoardType
from farm.measure.session import BoardSession, Direct
from farm.search.build import golden
from farm.services import probe_rules
from farm.services.probe_rules import Finding
from farm.store import Store
from farm.store.leases import PROBE
from farm.values import DEFAULT_POINT, GoldenSample, Health, Lease

PURPOSE = "probe"
# No step of a probe lasts longer (see `farm.measure.session` and below); the lease is renewed between them.
PROBE_TTL_S = 60.0
# A board that a TVM client has is left to it; whoever wants the probe asks again.
WAIT_S = 3.0
# So many calls, 5 ms each on a Jetson Nano, before times count: a governor has raised the clocks by then.
WARMUP, RUNS = 25, 25

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """What came of a probe. One that was `skipped` says nothing of the board; with `busy` it may be possible soon.

    `kind` is what was observed, `health` what that made of the board. `median_s` is the golden kernel's time where it
    ran as it should, `factor` that time divided by the type's where enough is known.
    """

    board: str
    passed: bool = False
    skipped: bool = False
    busy: bool = False
    seconds: float = 0.0
    kind: str = ""
    health: str = ""
    reason: str = ""
    kernel: str = ""
    median_s: float | None = None
    samples_s: tuple[float, ...] = ()
    factor: float | None = None
    simulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self) | {"samples_s": list(self.samples_s)}


@dataclasses.dataclass(frozen=True)
class Prober:
    """What every probe of a process shares. `owner` says who holds the leases, so that a person can find them.

    `leases` are those of probes under way, by board.
    """

    tracker: Tracker
    kernels: golden.GoldenKernels
    board_types: Mapping[str, BoardType]
    owner: str
    limits: HealthLimits = dataclasses.field(default_factory=HealthLimits)
    wait_s: float = WAIT_S
    leases: dict[str, Lease] = dataclasses.field(default_factory=dict)

    def probe(self, store: Store, name: str) -> ProbeReport:
        """Probe a board and return what came of it; no lease is left, however it ends. `store` is the thread's own.

        Raises nothing that is to be expected: what goes wrong on the board's side is observed of the board, what goes
        wrong on ours makes the probe `skipped`.
        """
        began = time.monotonic()
        try:
            lease = store.acquire_lease(name, self.owner, PURPOSE, ttl_s=PROBE_TTL_S, allowed=PROBE)
        except FarmError as error:
            report = _skip(name, error.message, busy=isinstance(error, TransientError))
            return dataclasses.replace(report, seconds=time.monotonic() - began)
        self.leases[name] = lease
        try:
            report = _Visit(self, store, lease).make()
        except _SkippedError as skipped:
            report = _skip(name, str(skipped), skipped.busy)
        finally:
            try:
                store.release_lease(lease)
            except FarmError as error:  # then it expires
                _log.warning("the lease %d of %s is not given back: %s", lease.token, name, error)
            del self.leases[name]
        return dataclasses.replace(report, seconds=time.monotonic() - began)


class _SkippedError(Exception):
    """The probe could not be made, through no fault of the board."""

    def __init__(self, reason: str, busy: bool) -> None:
        super().__init__(reason)
        self.busy = busy


@dataclasses.dataclass(frozen=True)
class _Offer(Direct):
    """A board that the tracker has just offered to us alone."""

    match_key: str = ""

    def request(self, key: str, timeout_s: float) -> tuple[str, int, str]:
        """What the tracker answered."""
        del key, timeout_s
        return self.host, self.port, self.match_key


class _Visit:
    """The part of a probe for which the board is leased."""

    def __init__(self, prober: Prober, store: Store, lease: Lease) -> None:
        self._prober, self._store, self._lease = prober, store, lease
        self._name = lease.board
        with _our_side():
            self._type = str(store.require_board(self._name)["board_type"])
        self._key = f"{self._type}/{self._name}"
        self._report = ProbeReport(self._name)

    def make(self) -> ProbeReport:
        """Look, and have the store draw its conclusion. Raises _SkippedError."""
        try:
            finding = self._examine()
        except (BoardUnsafeError, BoardNonsenseError) as error:
            finding = Finding(find_kind(error), error.message)
        except LeaseOverError as error:
            raise _SkippedError(error.message, busy=True) from error
        except UnavailableError as error:  # the agent is of another version or type
            finding = Finding(Kind.MISFIT, " ".join((error.message, error.hint)).strip())
        except FarmError as error:
            finding = Finding(Kind.PROBE_FAILED, " ".join((error.message, error.hint)).strip())
        observation = Observation(finding.kind, finding.detail)
        with _our_side():
            transition = self._store.observe_board(
                self._name, finding.kind, self._prober.owner, decide_by(observation, self._prober.limits)
            )
        # Of those in doubt only a pass makes a good board; of a good one, each doubt a suspect.
        passed = finding.kind is Kind.PROBE_PASSED
        return dataclasses.replace(
            self._report,
            passed=passed,
            kind=str(finding.kind),
            health=str(Health(transition.standing.health)),
            reason=finding.detail if passed else observation.text,
        )

    def _examine(self) -> Finding:
        """What there is to observe. Raises FarmError for what went wrong on the board's side, or _SkippedError."""
        offer = self._take()
        self._renew()
        with BoardSession(offer, self._key, lease=self._lease) as session:
            description = session.description
            with _our_side():
                self._store.save_description(self._name, description.to_dict(), simulated=description.simulated)
            self._report = dataclasses.replace(self._report, simulated=description.simulated)
            if wrong := probe_rules.find_wrong_type(self._type, description):
                return Finding(Kind.MISFIT, wrong)
            return self._run(session, description)

    def _take(self) -> _Offer:
        """Have the tracker offer us the board. A client that holds it is waited for a moment; an agent that is stuck is
        told apart by its silence.
        """
        tracker, claim = self._prober.tracker, fences.to_claim(self._lease)
        with _our_side():
            address = fences.find_agent(tracker, self._key)
        if address is None:
            self._refuse_strangers()
            raise _SkippedError(f"no agent has registered with the tracker as {self._key}", busy=True)
        holder = ""
        try:
            report = fences.send_fence(address, claim)
            holder = report.holder
            if report.status is ClaimStatus.REFUSED:
                with _our_side():
                    self._store.raise_token(report.greatest)
                raise _SkippedError(f"a later lease of the board is in force: {report.message}", busy=True)
        except UnavailableError as error:  # of another version: connecting says more
            _log.info("%s", error)
        except TransientError as error:
            if not isinstance(error.__cause__, TimeoutError):
                # The way to it has just been cut, or its agent has ended: that is the keeper's to find out.
                raise _SkippedError(error.message, busy=True) from error
            raise DeadlineError(
                f"its agent did not answer within {fences.FENCE_TIMEOUT_S:g} s: {error.message}"
            ) from error
        try:
            with _our_side(except_for=DeadlineError):
                return _Offer(*tracker.request(self._key, self._prober.wait_s))
        except DeadlineError as error:
            who = holder or "somebody"
            raise _SkippedError(f"{who} holds the board without a lease of the farm's", busy=True) from error

    def _refuse_strangers(self) -> None:
        """Raise FarmError where the board has registered, but as another type."""
        with _our_side():
            infos = self._prober.tracker.fetch_summary().get("server_info", ())
        for info in infos:
            kind, _, name = str(info.get("key", "")).removeprefix("server:").partition("/")
            if name == self._name and kind != self._type:
                raise UnavailableError(f"it is registered as {self._type}, but its agent says that it is a {kind}")

    def _run(self, session: BoardSession, description: Description) -> Finding:
        kernel = self._require_kernel(description)
        self._renew()
        outcome, finding = _run_once(session, kernel)
        if finding is not None:
            return finding
        median_s = statistics.median(outcome.latency_s)
        self._report = dataclasses.replace(
            self._report, kernel=kernel.name, median_s=median_s, samples_s=outcome.latency_s
        )
        if (outcome.other_load or 0.0) > probe_rules.OTHER_LOAD:
            text = f"other programs used {outcome.other_load:.1f} cores meanwhile, so its time is not compared"
            return self._look_at_sensors(description) or Finding(Kind.PROBE_PASSED, text)
        history_s = self._fetch_medians(kernel.name, description.simulated, 100, self._name).get(self._name, ())
        runs_s = [median_s]
        if probe_rules.is_off(median_s, history_s, description.simulated):
            # One run may be chance; several, now, tell.
            self._renew()
            for _ in range(MIN_SAMPLES - 1):
                again, finding = _run_once(session, kernel)
                if finding is not None:
                    return finding
                runs_s.append(statistics.median(again.latency_s))
        with _our_side():
            self._store.add_golden_sample(
                GoldenSample(
                    *(self._name, kernel.name, DEFAULT_POINT, statistics.median(runs_s)),
                    samples_s=outcome.latency_s,
                    simulated=description.simulated,
                )
            )
        drift = probe_rules.find_drift(history_s, runs_s, description.simulated)
        peers = self._fetch_medians(kernel.name, description.simulated, probe_rules.PEER_RUNS)
        factor, outlier = probe_rules.find_outlier(self._name, peers, description.simulated)
        self._report = dataclasses.replace(self._report, factor=factor)
        if why := drift or outlier:
            return Finding(Kind.DRIFTED, why + probe_rules.describe_limits(outcome, description))
        return self._look_at_sensors(description) or Finding(Kind.PROBE_PASSED)

    def _look_at_sensors(self, description: Description) -> Finding | None:
        known = self._prober.board_types.get(self._type)
        slow = probe_rules.find_slow_sensors(description.sensors, known.power.update_period_s if known else None)
        return Finding(Kind.SLOW_SENSORS, slow) if slow else None

    def _require_kernel(self, description: Description) -> golden.GoldenKernel:
        known = self._prober.board_types.get(self._type)
        with _our_side():
            return golden_runs.require_kernel(self._prober.kernels, known, description.architecture)

    def _fetch_medians(
        self, kernel: str, simulated: bool, newest: int, board: str | None = None
    ) -> dict[str, Sequence[float]]:
        with _our_side():
            samples = self._store.fetch_golden_samples(
                self._type, kernel, DEFAULT_POINT, simulated=simulated, newest=newest, board=board
            )
        return {name: [sample.median_s for sample in runs] for name, runs in samples.items()}

    def _renew(self) -> None:
        """Make the lease last for another step. Raises _SkippedError where it is over."""
        with _our_side():
            self._lease = self._store.renew_lease(self._lease)


def _run_once(session: BoardSession, kernel: golden.GoldenKernel) -> tuple[Outcome, Finding | None]:
    outcome, outputs = golden_runs.run_kernel(session, kernel, RUNS, WARMUP)
    return outcome, probe_rules.judge_run(outcome, outputs)


@contextlib.contextmanager
def _our_side(except_for: type[FarmError] | tuple[type[FarmError], ...] = ()) -> Iterator[None]:
    """What fails in here (store, tracker, compiler) is no fault of the board."""
    try:
        yield
    except except_for:
        raise
    except FarmError as error:
        raise _SkippedError(str(error), busy=isinstance(error, TransientError | LeaseOverError)) from error


def _skip(name: str, reason: str, busy: bool) -> ProbeReport:
    return ProbeReport(name, skipped=True, busy=busy, reason=reason)
