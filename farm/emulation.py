"""Whether virtual boards run their own aarch64 code in an emulator, and what that needs beside Python, built with zig.

The emulator itself is `device_agent/emulated/`. It is in a process of its own: Unicorn is under the GPL, version 2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import tempfile
from pathlib import Path

from farm import folders, linker, settings
from farm.errors import UnavailableError
from farm.inventory.board_types import BoardType
from farm.inventory.core_types import CoreType, find_core_type, load_core_types

# What records of simulated boards say of their code; `NATIVE` is in records of version 0.1 and 0.2 only.
NATIVE, EMULATED = "native", "emulated"
WORLD, HOOKS = "world.elf", "hooks.so"
_MODULES = ("unicorn", "capstone")
_WORLD_OPTIONS = [
    *("-ffreestanding", "-fno-builtin", "-nostdlib", "-static", "-fno-stack-protector"),
    *("-Wl,--no-gc-sections", "-Wl,-e,farm_stop"),
]


def runs_own_code(board_type: BoardType) -> bool:
    """Return whether virtual boards of a type run the type's own code: where all their cores are described."""
    return find_core(board_type) is not None


def find_core(board_type: BoardType) -> CoreType | None:
    """The core whose code can be emulated and priced for a type: that of all its open clusters, where it and those of
    the others are described.
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
    """What code for such a triple is to virtual boards of a type: their own, emulated and priced by a model of their
    core, or this machine's (`NATIVE`), whose cost was this machine's time; "" where the two are not told apart.
    """
    if board_type.target is None or not mtriple:
        return ""
    own = board_type.target.mtriple.partition("-")[0]
    if mtriple.partition("-")[0] != own:
        return NATIVE
    return EMULATED if own != platform.machine() and find_core(board_type) is not None else ""


def find_folder(home: Path) -> Path:
    """Where the emulator's own parts are kept, named after what they are made of."""
    digest = hashlib.sha256()
    for path in _list_sources():
        digest.update(path.name.encode() + path.read_bytes())
    return home / "cache" / "emulator" / digest.hexdigest()[:16]


def prepare(loaded: settings.Settings) -> Path:
    """Build the emulator's own parts unless they are there; return their folder.

    Raises UnavailableError where the emulator is not installed or the home is no folder; what the linker raises.
    """
    require_installed()
    loaded.share_linker_cache()
    folder = find_folder(loaded.home_path)
    try:
        folders.make_private(folder)
    except OSError as error:
        raise UnavailableError(
            f"there is no room for the emulator's parts: {folder}: {error.strerror}",
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


def require_installed() -> None:
    """Raise UnavailableError where the emulator is not installed."""
    if missing := [name for name in _MODULES if importlib.util.find_spec(name) is None]:
        raise UnavailableError(
            f"virtual boards cannot run aarch64 code: {missing[0]} is not installed",
            "Install the extra `emulator`.",
        )


def _list_sources() -> list[Path]:
    spec = importlib.util.find_spec("device_agent")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError("the package device_agent is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "emulated"
    return [folder / name for name in ("caches.inc", "hooks.c", "math.inc", "world.c")]
