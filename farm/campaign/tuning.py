"""One tuning from start to finish: bring up what it needs, warm-start, tune, verify, take down. `farm tune` is this.

Here for the machine that it runs on, which is coordinator and board at once; on boards of a fleet: `fleet_tuning`.
`quickstart` wraps it with a model's compilation and timing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from farm.campaign.board_choice import TargetPlan, plan_target
from farm.campaign.engine import Engine
from farm.campaign.engine_actors import REQUEST_TIMEOUT_S
from farm.campaign.engine_parts import Parts
from farm.campaign.engine_ray import ray_running
from farm.campaign.engine_verify import Verdict, verify_winners
from farm.campaign.machine import close_abandoned_campaigns, machine_lock, process_identity
from farm.errors import FarmError, PermanentError, UnavailableError, UsageError
from farm.fleet import processes
from farm.fleet.local import LocalFarm
from farm.fleet.site import Site
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.report.progress import Progress
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Board

# Runs in a process of its own, so that nothing of it is left when the farm is told to end meanwhile.
_WARM_LINKER = """
import pathlib, sys
from farm.search import linker
linker.warm(pathlib.Path(sys.argv[1]), sys.argv[2] or None)
"""
# The first use ever of the linker takes 5 to 30 s; without it the farm works all the same, some seconds slower.
_WARM_TIMEOUT_S = 120.0

_Self = TypeVar("_Self", bound="Tuning")


class Listener(Protocol):
    """Who is told how a run goes."""

    def note(self, text: str) -> None:
        """One line about what begins or was decided."""

    def progress(self, progress: Progress) -> None:
        """How far tuning is; called at least twice a second."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a tuning came to. Times in seconds; `overheads_s`: for how long each good trial held the session untimed."""

    campaign: int
    workloads: tuple[Any, ...]
    trials: dict[str, int]
    verdict: Verdict
    progress: Progress
    recalled: int
    seconds_to_first_trial: float | None
    seconds_tuning: float
    overheads_s: tuple[float, ...]
    history: tuple[tuple[int, float], ...]


def find_failure(trials: Mapping[str, int], records: int) -> PermanentError | None:
    """What a run stands for that made `trials` (by fault side) and holds so many checked records; None: it worked."""
    if not any(trials.values()) or (trials["ok"] and records):
        return None
    if trials["ok"]:
        said = f"none of {trials['ok']} good trials computes what it should"
    else:
        faults = ", ".join(f"{side.removesuffix('_faults')} {count}" for side, count in trials.items() if count)
        said = f"all {sum(trials.values())} trials failed; faults: {faults}"
    return PermanentError(said, "`farm doctor` tries each part of the farm; logs are in the folder logs of FARM_HOME.")


class Tuning(abc.ABC):
    """A farm that is up for the length of a `with` block: a way to a board, Ray, and the engine's parts."""

    parts: Parts

    def __init__(self, settings: Settings, store: Store, board_type: BoardType, listener: Listener) -> None:
        self._settings, self._store, self._listener = settings, store, listener
        self._board_type = board_type
        self._stack = contextlib.ExitStack()

    def __enter__(self: _Self) -> _Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @abc.abstractmethod
    def _start(self) -> None:
        """Bring up what is needed, on `_stack`, and then the parts (`_start_parts`)."""

    @abc.abstractmethod
    def board(self) -> Board:
        """The board, as it describes itself now."""

    def _wait_until_quiet(self) -> None:
        """Wait for what was started and would be measured along; nothing where the host is not the board."""
        return

    def _start_parts(
        self,
        site: Site,
        plan_target: Callable[[Mapping[str, Any]], TargetPlan],
        host_cores: int,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Ray and the parts, from the thread that lives as long as they do."""
        settings = self._settings
        close_abandoned_campaigns(self._store)
        settings.share_linker_cache()
        self._stack.enter_context(ray_running(host_cores))
        self.parts = self._stack.enter_context(
            Parts(
                site,
                self._store,
                settings,
                plan_target,
                self._board_type.pipeline,
                host_cores,
                request_timeout_s,
            )
        )

    def load(self, source: ModelSource, inputs: Sequence[InputSpec], ops: Sequence[str]) -> list[Any]:
        """Import the model; returns the workloads that `ops` (operator kinds; empty: all) choose. Raises UsageError."""
        workloads = self.parts.load(source.onnx_bytes, {spec.name: spec.static_shape for spec in inputs})
        kinds = {workload.kind for workload in workloads}
        if unknown := sorted(set(ops) - kinds):
            raise UsageError(
                f"the model has no operator {', '.join(map(repr, unknown))}", f"It has: {', '.join(sorted(kinds))}."
            )
        return [workload for workload in workloads if not ops or workload.kind in ops]

    def tune(
        self, command: str, source: ModelSource, workloads: Sequence[Any], trials: int, fresh: bool, since: float
    ) -> Tuned:
        """Tune, then verify the winners. `since` (monotonic seconds) is when the user's command began."""
        board = self.board()
        known = {} if fresh else self._recall(workloads, board)
        recalled = sum(map(len, known.values()))
        if recalled:
            self._listener.note(f"starting from {recalled} candidates measured by earlier runs (--fresh would not)")
        campaign = self._store.start_campaign(
            command,
            source.name,
            source.sha256,
            board.board_type,
            trials,
            {**dataclasses.asdict(self._settings), "target": self.parts.target(), "process": process_identity()},
        )
        began = time.monotonic()
        wall = time.time() - (began - since)
        try:
            self._store.save_workloads(campaign, [_row(workload) for workload in workloads])
            self._wait_until_quiet()
            engine = Engine(self.parts, self._store, campaign, workloads, known)
            engine.tune(trials, self._listener.progress)
            seconds = time.monotonic() - began
            verdict = verify_winners(
                self.parts, self._store, campaign, board.board_type, workloads, self._listener.note
            )
        except BaseException as error:
            # A store that is full refuses this too; the first error is the one to report.
            with contextlib.suppress(FarmError):
                self._store.finish_campaign(
                    campaign, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                )
            raise
        self._store.finish_campaign(campaign, "finished")
        return Tuned(
            campaign=campaign,
            workloads=tuple(workloads),
            trials=self._store.count_trials(campaign),
            verdict=verdict,
            progress=engine.progress(finished=True),
            recalled=recalled,
            seconds_to_first_trial=None if engine.first_trial_at is None else engine.first_trial_at - wall,
            seconds_tuning=seconds,
            overheads_s=tuple(engine.overheads_s),
            history=tuple(engine.history),
        )

    def _recall(self, workloads: Sequence[Any], board: Board) -> dict[str, list[tuple[str, str, float | None]]]:
        known = {}
        for workload in workloads:
            rows = self._store.fetch_known_candidates(workload.hash, board.board_type, DEFAULT_POINT, board.simulated)
            if rows:
                known[workload.hash] = [(row["candidate"], row["trace_json"], row["median_s"]) for row in rows]
        return known


class LocalTuning(Tuning):
    """The farm on this machine: a tracker and an agent of our own, the host being the board."""

    def __init__(self, settings: Settings, store: Store, board_type: BoardType, listener: Listener) -> None:
        if not board_type.host_is_board:
            raise UnavailableError(
                f"boards of type {board_type.name!r} are not this machine",
                "`farm tune --board-type` uses a registered board of that type.",
            )
        super().__init__(settings, store, board_type, listener)
        self.board_cores, self.host_cores = _share_cores(settings.isolation)

    def board(self) -> Board:
        """The board, as it describes itself now; also written to the store."""
        description = self.parts.connect()
        board = Board(description["name"], description["board_type"], bool(description["simulated"]), description)
        self._store.save_board(board)
        return board

    def _start(self) -> None:
        settings = self._settings
        self._stack.enter_context(machine_lock())
        pinned = settings.isolation == "own-core"
        if pinned:
            everything = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.host_cores)
            self._stack.callback(os.sched_setaffinity, 0, everything)
        # From this thread, which lives as long as the farm: children are told to die with the thread that made them.
        self.farm = self._stack.enter_context(
            LocalFarm(settings.tracker_port, settings.home_path / "logs", self.board_cores if pinned else None)
        )
        if self.farm.tracker.port != settings.tracker_port:
            self._listener.note(f"port {settings.tracker_port} is in use; the tracker took {self.farm.tracker.port}")
        cores = len(self.board_cores)
        self._start_parts(self.farm, lambda about: plan_target(self._board_type, about, cores), len(self.host_cores))
        folder = settings.home_path / "cache" / "warm"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _WARM_LINKER, str(folder), self._board_type.link_triple or ""]
        self._warming = processes.start(command, settings.home_path / "logs" / "linker.log", os.environ)
        self._stack.callback(processes.stop, self._warming)

    def _wait_until_quiet(self) -> None:
        """Wait for the warm-up of the linker, which keeps a core busy for some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._warming.wait(_WARM_TIMEOUT_S)


def _row(workload: Any) -> Mapping[str, Any]:
    return {
        "hash": workload.hash,
        "name": workload.name,
        "flop": workload.flop,
        "arguments": [[list(shape), dtype] for shape, dtype in workload.arguments],
        "target": dict(workload.target),
        "pipeline": workload.pipeline,
        "module_json": workload.module_json,
        "weight": workload.weight,
    }


def _share_cores(isolation: str) -> tuple[set[int], set[int]]:
    """Cores of the board and of the host's own work. One machine is both; only `own-core` divides it."""
    cores = sorted(os.sched_getaffinity(0))
    if isolation != "own-core":
        return set(cores), set(cores)
    if len(cores) < 2:
        raise UsageError("FARM_ISOLATION=own-core needs at least two cores", "Use exclusive on this machine.")
    half = len(cores) // 2
    return set(cores[half:]), set(cores[:half])
