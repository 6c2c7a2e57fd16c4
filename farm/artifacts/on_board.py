"""A board held while a model runs: this machine, or a leased board of the farm.

It describes itself, pins clocks and runs programs on inputs; callers interpret the results.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from device_agent.protocol import GPU, Description, Limits, OperatingPoint, Outcome, PinReport, Status
from farm.artifacts.artifact_folder import list_model_options, list_options, to_name
from farm.artifacts.manifest import GpuCode, Manifest
from farm.artifacts.timing import Run
from farm.crew.crew import open_crew
from farm.errors import PermanentError, UsageError
from farm.gpu import code as gpu_code
from farm.gpu.code import find_newest, is_newer
from farm.inventory.board_types import BoardType, describe_watts, require_board_type
from farm.points.grid import find_online
from farm.points.values import format_clocks
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT

LOCAL = "local"


class HeldForModels:
    """One held board with its `description`.

    `run` runs a program on inputs in the order of its arguments and raises the errors of `DrivenBoard.run`.
    """

    def __init__(
        self, description: Description, settings: Settings, run: Run, pin: Callable[[OperatingPoint], PinReport]
    ) -> None:
        self.description, self.run = description, run
        self._settings, self._pin = settings, pin
        self.cores = len(description.cores_online)  # those that are on
        self.point = DEFAULT_POINT

    @property
    def name(self) -> str:
        """The board's name."""
        return self.description.name

    def describe(self) -> dict[str, Any]:
        """Return the board for a document; `watts` says how well those of a simulated one are known."""
        about = self.description
        watts = describe_watts(about.board_type) if about.simulated else ""
        return {"name": self.name, "type": about.board_type, "simulated": about.simulated, "watts": watts}

    def pin(self, point: OperatingPoint, called: str) -> None:
        """Pin its clocks until the board is released. Raises the errors of `DrivenBoard.pin`."""
        clocks = self._pin(point).clocks
        if clocks is not None and clocks.clusters:
            self.cores = len(find_online(clocks))
        self.point = called

    def read_clocks(self, outcome: Outcome, device: str) -> str:
        """Return the clocks during a program (`format_clocks`), of clusters that the scheduler may use."""
        clocks = self.description.clocks
        clusters = {each.name: each.cpus for each in (clocks.clusters if clocks else ()) if not each.isolated}
        return format_clocks(outcome, clusters, on_gpu=device == GPU)

    def limits(self, threads: int) -> Limits:
        """Return a model's limits here; threads are limited to the cores that are on at the pinned point."""
        settings, cores = self._settings, self.cores
        return Limits(
            timeout_s=settings.model_timeout_s,
            memory_bytes=settings.model_memory_bytes,
            threads=min(threads, cores) if cores else threads,
        )

    def require_fit(self, manifest: Manifest) -> None:
        """Refuse an artifact that cannot run here, before sending it. Raises UsageError, PermanentError."""
        require_made_for(manifest, self.name, self.description)
        if manifest.gpu is not None:
            require_gpu(manifest.gpu, self.name, self.description)
        has = self.description.memory_bytes
        if 0 < has < manifest.memory_bytes:
            raise PermanentError(
                f"{self.name} has {has >> 20} MiB of memory; {manifest.name} needs about "
                f"{manifest.memory_bytes >> 20} MiB",
                "Take a board with more memory, or a smaller model.",
            )


def require_made_for(manifest: Manifest, name: str, description: Description) -> None:
    """Raise UsageError where an artifact is made for another kind of board, naming both.

    Code for other cores may hit an illegal instruction, and its figures would be meaningless.
    """
    is_gpu = manifest.gpu is not None
    is_other_kind = manifest.simulated != description.simulated and (manifest.simulated or is_gpu)
    # A virtual GPU's code runs on the machine that simulates the board.
    is_for_it = (manifest.simulated and is_gpu) or description.architecture == manifest.architecture
    if is_for_it and description.board_type == manifest.board_type and not is_other_kind:
        return
    made = manifest.board_type + (", simulated" if manifest.simulated else "")
    kind = description.board_type + (", simulated" if description.simulated else "")
    raise UsageError(
        f"{manifest.name} is compiled for {manifest.architecture} ({made}); "
        f"board {name} is {description.architecture} ({kind})",
        f"`{_plan_command(manifest, name, description)}` makes one for it.",
    )


def _plan_command(manifest: Manifest, name: str, description: Description) -> str:
    """Return the command that compiles the same model for a board."""
    about, kind = manifest.model, description.board_type
    words = ["farm", "model", "compile", about.typed]
    words += ["--board-type", LOCAL] if kind == LOCAL else ["--board", name]
    words += [*list_model_options(about.batch, about.shapes), *list_options(manifest.pipeline)]
    return shlex.join([*words, "--out", to_name(manifest.name, name)])


def require_gpu(code: GpuCode, name: str, description: Description) -> None:
    """Raise PermanentError where a board's GPU cannot run code: none, an older one, or an old driver."""
    cuda, _, arch = description.engine_versions.get("cuda", "").partition(" ")
    if not cuda:
        reasons = [note for note in description.notes if "GPU" in note]
        raise PermanentError(
            f"board {name} runs no code for GPUs: {'; '.join(reasons) or 'its agent has no plug-in for one'}",
            "`farm board provision` brings the plug-in, which needs the driver of the board's L4T.",
        )
    if code.arch.removeprefix("sm_") > arch.removeprefix("sm_"):
        raise PermanentError(f"the code is for {code.arch}; the GPU of board {name} is an older one, {arch}")
    if is_newer(code.ptx, takes := find_newest(cuda)):
        raise PermanentError(
            f"the driver of board {name} is too old: CUDA {cuda} takes PTX {takes}, the code needs {code.ptx}",
            "Update the board's L4T, or compile for a board type with that driver.",
        )


def prepare_gpu(manifest: Manifest, settings: Settings) -> None:
    """Build what virtual boards need for GPU code, once per home. Raises the linker's errors."""
    if manifest.gpu is not None and manifest.simulated:
        settings.share_linker_cache()
        gpu_code.prepare(settings.home_path)


def require_ok(outcome: Outcome, what: str, board: str) -> None:
    """Raise PermanentError for a program that did not run."""
    if not outcome.latency_s or outcome.status in (Status.CRASHED, Status.OUT_OF_MEMORY, Status.LOAD_FAILED):
        raise PermanentError(f"{what} does not run on {board}: {outcome.status} {outcome.message}".rstrip())


def find_board(store: Store, name: str) -> tuple[BoardType, str | None]:
    """Return a board's type and its name at the farm; None for this machine, whose agent is started on demand."""
    if name == LOCAL and not any(row.name == LOCAL for row in store.boards.fetch()):
        return require_board_type(LOCAL), None
    row = store.boards.require(name)
    kind = require_board_type(str(row.board_type))
    return kind, None if row.on_demand and kind.host_is_board else name


def choose_board(store: Store, board_type: str | None, board: str | None) -> tuple[BoardType, str | None]:
    """Return the named type, else the board's, else this machine's; and the board, or None. Raises UsageError."""
    if board is None:
        return require_board_type(board_type or LOCAL), None
    kind, name = find_board(store, board)
    if board_type in (None, kind.name):
        return kind, name
    if board == LOCAL and name is None:
        raise UsageError(f"--board local is this machine, which is no {board_type}", "Leave --board-type out.")
    return require_board_type(board_type or ""), board


@contextlib.contextmanager
def hold_board(
    settings: Settings,
    store: Store,
    place: str | tuple[BoardType, str | None],
    wait_s: float,
    purpose: str,
    say: Callable[[str], None],
    *,
    is_timed: bool = True,
) -> Iterator[HeldForModels]:
    """Hold a board for a block: the named one, or of a type the named or any free one. Raises as `open_crew` does."""
    kind, name = find_board(store, place) if isinstance(place, str) else place
    with open_crew(settings, store, kind, name, wait_s, purpose, say, is_timed=is_timed) as (crew, _):
        [board] = crew.boards
        description = crew.call(board.open())
        yield HeldForModels(
            description,
            settings,
            lambda spec, program, inputs: crew.call(board.run(spec, program, inputs)),
            lambda point: crew.call(board.pin(point)),
        )
