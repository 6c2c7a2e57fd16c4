"""Where boards with a real kernel are kept once they are made, and under which keys. Standard library only."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import machine
import material

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import debian
from debian import BuildError

BOARDS = tuple(machine.PROCESSORS)
_VARIABLE = "FARM_REAL_KERNEL_CACHE"
_HERE = Path(__file__).resolve().parent


def find_cache() -> Path:
    """Where everything is kept: $FARM_REAL_KERNEL_CACHE, or a cache folder of the user."""
    if chosen := os.environ.get(_VARIABLE):
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tvm-farm" / "real-kernel-board"


def find_image(board: str) -> Path:
    """Where the image of a board is or will be: its name says what it is made from."""
    kinds = ("image.py", "machine.py", "module/*", "boards/**/*", "guest/**/*")
    files = sorted(path for kind in kinds for path in _HERE.glob(kind) if path.is_file())
    digest = hashlib.sha256(f"{material.compute_key()} {board}".encode())
    for path in files:
        digest.update(f"{path.relative_to(_HERE)}\0".encode() + path.read_bytes())
    digest.update(debian.run(["qemu-system-aarch64", "--version"], "QEMU", debian.FETCH_TIMEOUT_S).encode())
    return find_cache() / f"{board}.{digest.hexdigest()[:16]}"


def require_image(board: str) -> Path:
    """The finished image of a board. Raises BuildError."""
    require_packages()
    if not (image := find_image(board)).exists():
        raise BuildError(f"the image {image} is not built; run deploy/real-kernel-board/build as root")
    return image


def require_packages() -> None:
    """Raise BuildError where programs are missing on this machine."""
    if missing := material.find_missing():
        packages = " ".join(missing)
        raise BuildError(
            f"missing packages: apt-get install {packages}, or as root "
            "deploy/real-kernel-board/build --install-packages"
        )
