"""One tuning from start to finish: bring up the local farm, warm-start, tune, verify, take down. `farm tune` is this.

`quickstart` wraps it with a model's compilation and timing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from farm.campaign.engine import Engine
from farm.campaign.engine_parts import Parts, ray_running
from farm.campaign.engine_verify import Verdict, verify_winners
from farm.errors import FarmError, UnavailableError, UsageError
from farm.fleet.local import LocalFarm
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.report.progress import Progress
from farm.search import linker
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Board


class Listener(Protocol):
    """Who is told how a run goes."""

    def note(self, text: str) -> None:
        """One line about what begins or was decided."""

    def progress(self, progress: Progress) -> None:
        """How far tuning is; called at least twice a second."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a tuning came to. Times in seconds; `overheads_s` has one entry per good trial: session held minus timing."""

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


class LocalTuning:
    """The farm on this machine, up for the length of a `with` block: tracker, agent, Ray, and the engine's parts."""

    def __init__(self, settings: Settings, store: Store, board_type: BoardType, listener: Listener) -> None:
        if not board_type.host_is_board:
            raise UnavailableError(
                f"no board of type {board_type.name!r} is registered",
                "This version tunes for the machine it runs on: --board-type local.",
            )
        self._settings, self._store, self._listener = settings, store, listener
        self._board_type = board_type
        self._stack = contextlib.ExitStack()
        self.board_cores, self.host_cores = _share_cores(settings.isolation)

    def __enter__(self) -> LocalTuning:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _start(self) -> None:
        settings = self._settings
        self._stack.enter_context(_machine_lock())
        cache = settings.home_path / "cache" / "zig"
        os.environ.setdefault("FARM_ZIG_CACHE", str(cache))
        logs = settings.home_path / "logs"
        pinned = settings.isolation == "own-core"
        if pinned:
            everything = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.host_cores)
            self._stack.callback(os.sched_setaffinity, 0, everything)
        # From this thread, which lives as long as the farm: the children are told to die with the thread that made them.
        self.farm = self._stack.enter_context(
            LocalFarm(settings.tracker_port, logs, self.board_cores if pinned else None)
        )
        self._stack.enter_context(ray_running(len(self.host_cores)))
        if self.farm.tracker.port != settings.tracker_port:
            self._listener.note(f"port {settings.tracker_port} is in use; the tracker took {self.farm.tracker.port}")
        self.parts = self._stack.enter_context(
            Parts(
                self.farm,
                self._store,
                settings,
                self._board_type.target.to_tvm() if self._board_type.target else None,
                self._board_type.pipeline,
                len(self.host_cores),
                len(self.board_cores),
            )
        )
        self._warming = threading.Thread(target=self._warm_linker, name="farm-warm", daemon=True)
        self._warming.start()

    def load(self, source: ModelSource, inputs: Sequence[InputSpec], ops: Sequence[str]) -> list[Any]:
        """Import the model; returns the workloads that `ops` (operator kinds; empty: all) chooses. Raises UsageError."""
        workloads = self.parts.load(source.onnx_bytes, {spec.name: spec.static_shape for spec in inputs})
        kinds = {workload.kind for workload in workloads}
        if unknown := sorted(set(ops) - kinds):
            raise UsageError(
                f"the model has no operator {', '.join(map(repr, unknown))}", f"It has: {', '.join(sorted(kinds))}."
            )
        return [workload for workload in workloads if not ops or workload.kind in ops]

    def board(self) -> Board:
        """The board, as it describes itself now; also written to the store."""
        description = self.parts.connect()
        board = Board(description["name"], description["board_type"], bool(description["simulated"]), description)
        self._store.save_board(board)
        return board

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
            {**dataclasses.asdict(self._settings), "target": self.parts.target()},
        )
        state = "failed"
        began = time.monotonic()
        wall = time.time() - (began - since)
        try:
            self._store.save_workloads(campaign, [_row(workload) for workload in workloads])
            # The warm-up of the linker keeps a core busy for some seconds, which would be measured along.
            self._warming.join()
            engine = Engine(self.parts, self._store, campaign, workloads, known)
            engine.tune(trials, self._listener.progress)
            seconds = time.monotonic() - began
            verdict = verify_winners(
                self.parts, self._store, campaign, board.board_type, workloads, self._listener.note
            )
            state = "finished"
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            self._store.finish_campaign(campaign, state)
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

    def _warm_linker(self) -> None:
        with contextlib.suppress(FarmError, OSError), tempfile.TemporaryDirectory(prefix="farm-warm-") as folder:
            linker.warm(Path(folder), self._board_type.link_triple)


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


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    """Keep a second farm from measuring on this machine at the same time: each would be the other's noise."""
    import fcntl

    path = Path(tempfile.gettempdir()) / f"tvm-farm-{os.getuid()}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UnavailableError(
                f"another farm command is measuring on this machine (pid {holder})",
                "Two at once would spoil each other's results; wait for it to end.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
