"""The wheel that a board gets of this project: `device_agent` and the board types, packed from what is installed here.

Packed by hand, because the coordinator may be an installed wheel itself, without sources or a build tool; and so that
equal sources give equal bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import device_agent.protocol
from farm.errors import UnavailableError
from farm.inventory.paths import require_inventory_folder
from farm.provision.wheels import pack_wheel

NAME = "tvm-farm"
_VERSION = re.compile(r'(?m)^__version__ = "([A-Za-z0-9.+_-]+)"$')
# A board's agent reads the same variable (device_agent/board_types.py): what the user added here comes along.
_EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"


def find_agent_source() -> Path:
    """The folder of the package `device_agent` that belongs to this farm."""
    return Path(device_agent.protocol.__file__).resolve().parents[1]


def read_agent_version(source: Path) -> str:
    """The version that an agent from `source` gives itself. Raises UnavailableError."""
    try:
        found = _VERSION.search((source / "__init__.py").read_text(encoding="utf-8"))
    except OSError as error:
        raise UnavailableError(f"the agent's package cannot be read: {error}") from error
    if found is None:
        raise UnavailableError(f"{source} names no version", "Install tvm-farm again, or use a whole checkout.")
    return found[1]


def pack_agent(source: Path, folder: Path, added: Mapping[str, bytes] | None = None, system: str = "any") -> Path:
    """Write the wheel into `folder` and return its path. `added` is what it has besides, by its place in the wheel; it
    may then be for one `system` alone, such as `manylinux_2_27_aarch64`.

    Raises UnavailableError where the sources are not there.
    """
    version = read_agent_version(source)
    contents = {
        f"device_agent/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    contents |= added or {}
    for types in _type_folders():
        for path in sorted(types.glob("*.yaml")):
            contents[f"farm/inventory/data/board_types/{path.name}"] = path.read_bytes()
    info = f"tvm_farm-{version}.dist-info"
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: The board's half of tvm-farm\n"
        "Requires-Python: >=3.10\n"
    ).encode()
    pure, tag = "true" if system == "any" else "false", f"py3-none-{system}"
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tvm-farm\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    )
    contents[f"{info}/entry_points.txt"] = b"[console_scripts]\ndevice-agent = device_agent.agent:main\n"
    wheel = folder / f"tvm_farm-{version}-{tag}.whl"
    pack_wheel(wheel, contents, f"{info}/RECORD")
    return wheel


def _type_folders() -> list[Path]:
    folders = [require_inventory_folder() / "board_types"]
    if extra := os.environ.get(_EXTRA_FOLDER_VARIABLE):
        folders.append(Path(extra).expanduser())
    return folders
