"""Decide whether virtual boards emulate their own aarch64 code, and build the emulator's native parts with zig.

The emulator is `farm/virtual/emulated/`, in its own process, since Unicorn is under the GPL, version 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import platform
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from farm import folders, linker, settings
from farm.errors import UnavailableError
from farm.inventory.board_types import BoardType
from farm.inventory.core_types import CoreType, find_core_type, load_core_types
from farm.inventory.documents import require_inventory_folder

# How records of simulated boards name their code; only records of version 0.1 and 0.2 have `NATIVE`.
NATIVE, EMULATED = "native", "emulated"
WORLD, HOOKS = "world.elf", "hooks.so"
# What the emulator found for the programs of quickstart's sweep (`make kept-emulations`): a minute of work.
KEPT = "kept_emulations.zip"
_MODULES = ("unicorn", "capstone")
_WORLD_OPTIONS = [
    *("-ffreestanding", "-fno-builtin", "-nostdlib", "-static", "-fno-stack-protector"),
    *("-Wl,--no-gc-sections", "-Wl,-e,farm_stop"),
]


def runs_own_code(board_type: BoardType) -> bool:
    """Say whether virtual boards of a type run the type's own code: all their cores must be described."""
    return find_core(board_type) is not None


def find_core(board_type: BoardType) -> CoreType | None:
    """Return the core type that can be emulated for a board type: the one of all its open clusters, or None.

    All clusters need described cores.
    """
    if board_type.target is None:
        return None
    described = {core.name for core in load_core_types() if core.pipeline is not None}
    core = find_core_type(board_type.target.mcpu, board_type.target.mtriple.partition("-")[0])
    open_kinds = {cluster.core for cluster in board_type.clusters if not cluster.isolated}
    if core is None or {core.name} != open_kinds or not {each.core for each in board_type.clusters} <= described:
        return None
    return core


def name_code(board_type: BoardType, mtriple: str) -> str:
    """Name how virtual boards of a type run code for a triple: `EMULATED`, `NATIVE`, or "" where both are the same.

    Native code ran on this machine, and its cost was this machine's time.
    """
    if board_type.target is None or not mtriple:
        return ""
    own = board_type.target.mtriple.partition("-")[0]
    if mtriple.partition("-")[0] != own:
        return NATIVE
    return EMULATED if own != platform.machine() and find_core(board_type) is not None else ""


def find_folder(home: Path) -> Path:
    """Return the folder of the emulator's parts, named by a hash of their sources."""
    return home / "cache" / "emulator" / _hash(_list_sources())[:16]


def prepare(loaded: settings.Settings) -> Path:
    """Build the missing parts of the emulator and return their folder.

    Raises UnavailableError where the emulator is not installed or the folder cannot be made, and the linker's errors.
    """
    require_installed()
    loaded.share_linker_cache()
    folder = find_folder(loaded.home_path)
    try:
        folders.make_private(folder)
    except OSError as error:
        raise UnavailableError(
            f"cannot create the folder of the emulator's parts, {folder}: {error.strerror}",
            "Set FARM_HOME to a folder of yours.",
        ) from error
    sources = {path.name: path for path in _list_sources()}
    for name in (WORLD, HOOKS):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
                made = Path(partial) / name
                if name == WORLD:
                    linker.link_program(made, [sources["world.c"]], "aarch64-freestanding-none", _WORLD_OPTIONS)
                else:
                    linker.link_program(made, [sources["hooks.c"]], None, ["-shared", "-lm"])
                made.replace(folder / name)
    return folder


def find_work_folder(home: Path) -> Path:
    """Return the folder where virtual boards cache what programs cost and compute."""
    return home / "cache" / "work"


def take_kept(home: Path) -> None:
    """Add the kept emulations of quickstart's own model to a home; nothing where another emulator made them."""
    path = require_inventory_folder() / KEPT
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        if archive.comment.decode() == find_version():
            folder = find_work_folder(home)
            for name in archive.namelist():
                if not (folder / name).exists():  # a board may be reading it
                    archive.extract(name, folder)


def find_version() -> str:
    """Return a hash over all sources of the emulator and its estimates."""
    return _hash(path for path in sorted(_find_sources().iterdir()) if path.suffix in (".c", ".inc", ".py"))


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def require_installed() -> None:
    """Raise UnavailableError where the emulator is not installed."""
    if missing := [name for name in _MODULES if importlib.util.find_spec(name) is None]:
        raise UnavailableError(
            f"virtual boards cannot run aarch64 code: {missing[0]} is not installed", "Install the extra `emulator`."
        )


def _list_sources() -> list[Path]:
    return [_find_sources() / name for name in ("caches.inc", "hooks.c", "math.inc", "world.c")]


def _find_sources() -> Path:
    return linker.find_package("farm") / "virtual" / "emulated"
