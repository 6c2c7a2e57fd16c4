"""Decide whether a board can have an agent, and which steps remain. Pure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.errors import PermanentError
from farm.inventory.board_types import BoardType
from farm.provision.bundle import Bundle
from farm.provision.layout import BoardFile, Layout, compute_digest
from farm.provision.survey import BoardSurvey, find_doubt
from farm.provision.wheels import ARCHS, LEAST_GLIBC_MINOR

# In order of execution. `connect` and `check` only read, `bundle` runs on the coordinator, `probe` uses the board.
STEPS = (
    *("connect", "check", "bundle", "folder", "send", "python", "install", "user", "services", "switch", "start"),
    *("probe", "finish"),
)
# Beyond the installation: logs, a session's uploads.
_ROOM_TO_LIVE_BYTES = 64 << 20
_ROOM_TO_LIVE_FILES = 1000
_FILES_PER_BYTE = 1 / 12_000
# Certificates and logs are useless with a clock this far off. Nothing here depends on it.
CLOCK_TOLERANCE_S = 60.0


class StepStatus(StrEnum):
    """How a step ended."""

    OK = "ok"  # a check that passed
    DONE = "done"  # it changed the board
    ALREADY = "already"  # there was nothing left to change
    WOULD = "would"  # it would change the board, in a dry run
    FAILED = "failed"


class ProvisioningOutcome(StrEnum):
    """The outcome for a board."""

    PROVISIONED = "provisioned"  # changed and proven
    UNCHANGED = "unchanged"  # everything was there already
    PLANNED = "planned"  # a dry run
    REMOVED = "removed"
    ROLLED_BACK = "rolled back"  # the new version failed; the previous one runs again
    FAILED = "failed"
    INTERRUPTED = "interrupted"


# Outcomes with the board as requested.
GOOD = frozenset(
    {
        ProvisioningOutcome.PROVISIONED,
        ProvisioningOutcome.UNCHANGED,
        ProvisioningOutcome.PLANNED,
        ProvisioningOutcome.REMOVED,
    }
)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step, with its duration `seconds`."""

    name: str
    status: StepStatus
    detail: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class BoardReport:
    """One board. `version` is what runs there as far as known; `notes` are for the operator.

    `state` describes in a sentence how the board is left.
    """

    board: str
    outcome: ProvisioningOutcome
    version: str
    state: str
    steps: tuple[StepReport, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        return document | {
            "outcome": str(self.outcome),
            "steps": [s | {"status": str(s["status"])} for s in document["steps"]],
        }


@dataclasses.dataclass(frozen=True)
class ProvisioningPlan:
    """The `STEPS` that change the board, and the Python of the version's environment.

    `python` is a program on the board, empty for the bundle's own; its series is `series`.
    """

    needed: frozenset[str]
    python: str
    series: str

    @property
    def disturbs(self) -> bool:
        """Whether it affects the running agent."""
        return bool({"services", "switch", "start"} & self.needed)


def check_board(survey: BoardSurvey, layout: Layout, now: float, board_type: BoardType | None = None) -> list[str]:
    """Notes for the operator on a board that can have an agent. Raises PermanentError for one that cannot."""
    if survey.arch not in ARCHS:
        raise PermanentError(
            f"the board is {survey.arch or 'of an unknown machine'}, and there are wheels for {' and '.join(ARCHS)}",
            "A 64-bit system is needed; some boards run a 32-bit one on a 64-bit processor.",
        )
    if not survey.glibc or tuple(map(int, survey.glibc.split("."))) < (2, LEAST_GLIBC_MINOR):
        has = f"glibc {survey.glibc}" if survey.glibc else "no glibc"
        raise PermanentError(
            f"the board has {has}, TVM's wheels need 2.{LEAST_GLIBC_MINOR} or newer",
            "Ubuntu 18.04 (JetPack 4), Debian 10 and anything later have it; musl systems such as Alpine do not.",
        )
    if survey.lacks:
        raise PermanentError(f"the board lacks {', '.join(survey.lacks)}", "Install what is missing there.")
    if survey.foreign:
        raise PermanentError(
            f"{layout.prefix} holds files that are not ours", "Move them away, or give another folder with --prefix."
        )
    if not survey.writable:
        raise PermanentError(
            f"the login may not write to {layout.prefix} or what is above it",
            "Let it use sudo without a password, or give a folder of its own with --prefix.",
        )
    if survey.listening and survey.agent_pid is None:
        raise PermanentError(
            "another program has the agent's port on the board",
            "`ss -ltnp` there names it; or give the board another agent_port in a fleet file.",
        )
    notes = [doubt] if (doubt := find_doubt(survey.l4t, board_type)) else []
    off_s = survey.clock_s - now
    if abs(off_s) > CLOCK_TOLERANCE_S:
        ahead = "ahead" if off_s > 0 else "behind"
        said = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(survey.clock_s))
        notes.append(f"its clock is {describe_span(abs(off_s))} {ahead} (it says {said}); set it")
    if not layout.as_root:
        notes.append(
            "neither root nor sudo without a password: no clock helper, so clocks cannot be held; "
            "nothing starts the agent when the board boots; candidates run as the login itself"
        )
    elif not layout.systemd:
        notes.append("no systemd: the agent is not started when the board boots; tvm-farm-board start does it")
    return notes


def plan_steps(
    survey: BoardSurvey, layout: Layout, bundle: Bundle | None, files: Sequence[BoardFile]
) -> ProvisioningPlan:
    """The remaining steps; `bundle` is None if it is still to be built, and so on no board.

    Raises PermanentError if the board lacks space.
    """
    pythons, key, managed = tuple(survey.pythons)[:1], "", ""
    if bundle is not None:
        pythons, key, managed = bundle.manifest.pythons, bundle.manifest.key, bundle.manifest.managed_python
    usable = [series for series in survey.pythons if series in pythons]
    needed = set()
    installed = key in survey.versions
    if not survey.ours:
        needed.add("folder")
    if not installed:
        needed |= {"send", "install"} | ({"python"} if not usable else set())
    if layout.user and not survey.user_exists:
        needed.add("user")
    if any(survey.files.get(file.path) != file.sha256 for file in files):
        needed.add("services")
    if not key or survey.current != key:
        needed.add("switch")
    restart = {"services", "switch", "user"} & needed or survey.pending is not None or survey.agent_pid is None
    if restart or survey.started != f"{key} {compute_digest(tuple(files))}":
        needed.add("start")
    if needed or survey.left or survey.partial or len(survey.versions) > 2 or survey.pending is not None:
        needed.add("finish")
    if bundle is not None and not installed:
        _require_room(survey, layout, bundle)
    series = usable[0] if usable else ".".join(managed.removeprefix("cpython-").split(".")[:2])
    return ProvisioningPlan(frozenset(needed), survey.pythons[usable[0]] if usable else "", series)


def describe_span(seconds: float) -> str:
    """Format a duration for people: `4 min`, `3 h`, `12 days`, `1.1 years`."""
    for unit, name in ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}" if name == "years" else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def plan_removals(survey: BoardSurvey, key: str) -> tuple[str, ...]:
    """The versions to remove once `key` is proven: all but it and its predecessor."""
    others = [version for version in survey.versions if version != key]
    before = survey.pending if survey.pending in others else survey.current
    keep = before if before in others else next(iter(others), "")
    return (*(version for version in others if version != keep), *(name for name in survey.partial if name != key))


def _require_room(survey: BoardSurvey, layout: Layout, bundle: Bundle) -> None:
    # Bytecode adds about a third; until the end the bundle is there too, packed and unpacked.
    manifest = bundle.manifest
    need = int(1.4 * manifest.unpacked_bytes) + 2 * bundle.size + _ROOM_TO_LIVE_BYTES
    if survey.free_bytes < need:
        raise PermanentError(
            f"the disk is full: {survey.free_bytes >> 20} MiB free for {layout.prefix}, {need >> 20} MiB needed",
            "Free some space on the board, or give a folder on another disk with --prefix.",
        )
    files = int(manifest.unpacked_bytes * _FILES_PER_BYTE) + _ROOM_TO_LIVE_FILES
    if survey.free_files is not None and survey.free_files < files:
        raise PermanentError(
            f"the board's disk takes only {survey.free_files} more files, {files} are needed",
            "Remove what holds many small files.",
        )
