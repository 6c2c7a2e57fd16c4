"""Link what a stock client uploads (an object file, or a tar of them) into a library, on the board."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tarfile
from pathlib import Path

from device_agent.protocol.interpreters import python_command

# Linking a few objects takes 0.2 s; the first call of ziglang on a slow board builds its C library first.
_TIMEOUT_S = 120.0


class NoLinkerError(RuntimeError):
    """The board has no linker."""


def link(path: Path) -> Path:
    """The path of a loadable library made from `path`: itself, unless it is a .o or .tar.

    Raises NoLinkerError where the board cannot link, RuntimeError with the linker's words where linking fails.
    """
    if path.suffix == ".o":
        objects = [path]
    elif path.suffix == ".tar":
        objects = _unpack(path)
    else:
        return path
    output = path.with_name(path.name + ".so")
    command = [*find_linker(), "-shared", "-fPIC", "-o", str(output), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return output


def _unpack(archive_path: Path) -> list[Path]:
    """Write the files of a tar side by side, under names of our own, so that no member's name can lead elsewhere."""
    folder = archive_path.with_suffix(".objects")
    folder.mkdir(exist_ok=True)
    objects: list[Path] = []
    with tarfile.open(archive_path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                objects.append(folder / f"{len(objects)}-{Path(member.name).name}")
                objects[-1].write_bytes(content.read())
    return objects


def find_linker() -> list[str]:
    """The command that links here. Raises NoLinkerError."""
    for name in ("g++", "gcc"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return python_command("-m", "ziglang", "cc")
    raise NoLinkerError(
        "this board has no g++, gcc or ziglang to link uploaded objects with; upload a linked .so, or install ziglang"
    )
