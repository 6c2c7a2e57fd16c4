"""One probe of one board: lease it, connect, read its description, run the golden kernel, report to the store.

`probe_rules` judges results and plans probes, `probing` starts them. A few boards are probed at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio

from device_agent.protocol import Description, Outcome
from farm.connectivity.tracker import Tracker
from farm.crew import calibration
from farm.crew.calibration import MIN_SAMPLES
from farm.crew.health import HealthLimits, Kind, Observation, decide_by, find_kind
from farm.crew.held_board import Address, Ended, HeldBoard, Job, Request, opening, running
from farm.errors import (
    BoardBusyError,
    BoardUnsafeError,
    FarmError,
    InvalidReplyError,
    LeaseOverError,
    TransientError,
    UnavailableError,
)
from farm.inventory.board_types import BoardType
from farm.search.codegen import golden
from farm.services import probe_rules
from farm.services.probe_rules import MOST_AT_ONCE, Finding
from farm.store import Store
from farm.store.leases import PROBE
from farm.values import DEFAULT_POINT, GoldenSample, Health, Lease

PURPOSE = "probe"
# No step of a probe lasts longer (see `farm.measure.session` and below); the lease is renewed between them.
PROBE_TTL_S = 60.0
# A board that a TVM client has is left to it; the probe is requested again.
WAIT_S = 3.0
# Calls of 5 ms each on a Jetson Nano before timing: a governor has raised the clocks by then.
WARMUP, RUNS = 25, 25

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """The result of a probe. A `skipped` one says nothing of the board; with `busy` it may be possible soon.

    `kind` is the observation, `health` the board's health after it. `median_s` is the golden kernel's time where it ran
    well, `factor` that time divided by the type's where enough is known.
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
        return dataclasses.asdict(self) | {"samples_s": list(self.samples_s)}


class Prober:
    """What all probes share. Used on one thread, a crew's. `owner` is the name on the leases."""

    def __init__(
        self,
        tracker: Tracker,
        kernels: golden.GoldenKernels,
        board_types: Mapping[str, BoardType],
        owner: str,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        """Start nothing. `wait_s`: how long to wait for a board that a TVM client has."""
        self.tracker, self.kernels, self.board_types = tracker, kernels, board_types
        self.owner, self.wait_s = owner, wait_s
        self.limits = HealthLimits()
        # By board type and architecture.
        self.found: dict[tuple[str, str], golden.GoldenKernel] = {}
        self._turns = anyio.Semaphore(MOST_AT_ONCE)

    async def probe(self, store: Store, name: str) -> ProbeReport:
        """Probe a board and return the result; the lease is returned at any end.

        Expected errors are not raised: those of the board are observed, ours make the probe `skipped`.
        """
        began = time.monotonic()
        try:
            async with self._turns:
                began = time.monotonic()
                report = await self._probe(store, name)
        except _SkippedError as skipped:
            report = ProbeReport(name, skipped=True, busy=skipped.busy, reason=str(skipped))
        except FarmError as error:
            busy = isinstance(error, TransientError)
            report = ProbeReport(name, skipped=True, busy=busy, reason=error.message)
        return dataclasses.replace(report, seconds=time.monotonic() - began)

    async def _probe(self, store: Store, name: str) -> ProbeReport:
        held = HeldBoard()
        lease: Lease | None = None
        try:
            lease = store.leases.acquire(name, self.owner, PURPOSE, ttl_s=PROBE_TTL_S, allowed=PROBE)
            visit = _Visit(self, store, lease, held)
            try:
                found = await visit.examine()
            finally:
                held.stop()  # before the lease is returned
            return visit.conclude(found)
        finally:
            if lease is not None:
                store.leases.give_back(lease)


class _SkippedError(Exception):
    """The probe could not be made, through no fault of the board."""

    def __init__(self, reason: str, busy: bool) -> None:
        super().__init__(reason)
        self.busy = busy


class _Visit:
    """The part of a probe for which the board is leased."""

    def __init__(self, prober: Prober, store: Store, lease: Lease, held: HeldBoard) -> None:
        self._prober, self._store, self._lease, self._held = prober, store, lease, held
        self._name = lease.board
        with _our_side():
            self._type = store.boards.require(self._name).board_type
        self._key = f"{self._type}/{self._name}"
        self._report = ProbeReport(self._name)

    async def examine(self) -> Finding:
        """Return what is observed. Raises _SkippedError."""
        try:
            return await self._look()
        except (BoardUnsafeError, InvalidReplyError) as error:
            return Finding(find_kind(error), error.message)
        except LeaseOverError as error:
            with _our_side():
                self._store.leases.raise_token(error.greatest)
            raise _SkippedError(error.message, busy=True) from error
        except BoardBusyError as error:
            raise _SkippedError(error.message, busy=True) from error
        except UnavailableError as error:  # the agent is of another version or type
            return Finding(Kind.MISFIT, " ".join((error.message, error.hint)).strip())
        except FarmError as error:
            return Finding(Kind.PROBE_FAILED, " ".join((error.message, error.hint)).strip())

    def conclude(self, finding: Finding) -> ProbeReport:
        """Report the finding to the store. Raises _SkippedError."""
        observation = Observation(finding.kind, finding.detail)
        with _our_side():
            transition = self._store.boards.observe(
                self._name, finding.kind, self._prober.owner, decide_by(observation, self._prober.limits)
            )
        # A suspect board becomes good only by a pass; any doubt makes a good one suspect.
        passed = finding.kind is Kind.PROBE_PASSED
        return dataclasses.replace(
            self._report,
            passed=passed,
            kind=str(finding.kind),
            health=str(Health(transition.standing.health)),
            reason=finding.detail if passed else observation.text,
        )

    async def _look(self) -> Finding:
        """Connect and examine. Raises FarmError for faults of the board, or _SkippedError."""
        with _our_side():
            keys = await self._prober.tracker.fetch_keys()
        if self._key not in keys:
            for kind in (key.partition("/")[0] for key in keys if key.partition("/")[2] == self._name):
                raise UnavailableError(f"it is registered as {self._type}, but its agent says that it is a {kind}")
            raise _SkippedError(f"no agent has registered with the tracker as {self._key}", busy=True)
        description = (await self._ask(opening(self._prober.wait_s, doubted=True))).result
        with _our_side():
            self._store.boards.save_description(self._name, description.to_dict(), simulated=description.simulated)
        self._report = dataclasses.replace(self._report, simulated=description.simulated)
        if wrong := probe_rules.find_wrong_type(self._type, description):
            return Finding(Kind.MISFIT, wrong)
        return await self._run(description)

    async def _run(self, description: Description) -> Finding:
        kernel = await self._require_kernel(description)
        outcome, finding = await self._run_once(kernel)
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
            # One run may be chance; several in a row decide.
            for _ in range(MIN_SAMPLES - 1):
                again, finding = await self._run_once(kernel)
                if finding is not None:
                    return finding
                runs_s.append(statistics.median(again.latency_s))
        with _our_side():
            self._store.golden.add(
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

    async def _require_kernel(self, description: Description) -> golden.GoldenKernel:
        """Return the kernel; the first for a target takes seconds to build, while other boards are probed."""
        about, found = (self._type, description.architecture), self._prober.found
        if about not in found:
            known, kernels = self._prober.board_types.get(self._type), self._prober.kernels
            require = functools.partial(calibration.require_kernel, kernels, known, description.architecture)
            with _our_side():
                found[about] = await anyio.to_thread.run_sync(require)
        return found[about]

    def _fetch_medians(
        self, kernel: str, simulated: bool, newest: int, board: str | None = None
    ) -> dict[str, Sequence[float]]:
        with _our_side():
            samples = self._store.golden.fetch(
                self._type, kernel, DEFAULT_POINT, simulated=simulated, newest=newest, board=board
            )
        return {name: [sample.median_s for sample in runs] for name, runs in samples.items()}

    async def _run_once(self, kernel: golden.GoldenKernel) -> tuple[Outcome, Finding | None]:
        ended = await self._ask(running(calibration.plan_run(RUNS, WARMUP), kernel.library, golden.make_inputs()))
        return ended.result, probe_rules.judge_run(ended.result, ended.outputs)

    async def _ask(self, job: Job) -> Ended:
        """Return a job's answer; the lease is extended for it. Raises what the session raised, or _SkippedError."""
        with _our_side():
            self._lease = self._store.leases.renew(self._lease)
        ended = await self._held.call(Request(Address(self._prober.tracker, self._key, self._lease), job))
        if isinstance(ended.result, FarmError):
            raise ended.result
        return ended


@contextlib.contextmanager
def _our_side() -> Iterator[None]:
    """Attribute errors in the block (store, tracker, compiler) to us, not the board."""
    try:
        yield
    except FarmError as error:
        raise _SkippedError(str(error), busy=isinstance(error, TransientError | LeaseOverError)) from error
