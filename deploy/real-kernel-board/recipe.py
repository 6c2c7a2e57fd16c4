"""Make a board with a real kernel, unless it is there: `build` calls this.

Standard library only. `material.py` fetches, `image.py` makes, `guest.py` runs, `cache.py` says where things are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import cache
import foreign
import guest
import image
import machine
import material

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import debian
from debian import BuildError, UnreachableError

# 1.5 GB are fetched and unpacked for a moment, and the arm64 root is made beside them; 700 MB stay.
MATERIAL_BYTES = 3 << 30
# Each board takes 1 GB.
IMAGE_BYTES = 3 << 29


def build(board: str) -> Path:
    """Make a board's image, unless it is there already; return its folder. Raises BuildError, OSError."""
    cache.require_packages()
    place = cache.find_image(board)
    if not place.exists():
        fetched = fetch()
        _make_once(place, IMAGE_BYTES, lambda new, scratch: _make(board, fetched, new, scratch))
    return place


def fetch() -> Path:
    """Fetch what every board is made from, unless it is there; return its folder. Raises BuildError, OSError."""
    cache.require_packages()
    place = cache.find_cache() / f"material.{material.compute_key()}"
    _make_once(place, MATERIAL_BYTES, material.fetch)
    return place


def _make(board: str, fetched: Path, new: Path, scratch: Path) -> None:
    image.make(board, material.Material(fetched), machine.make_base(board), new, scratch)
    debian.say("booting it for the first time")
    try:
        with guest.Guest(board, new, scratch / "first") as first:
            first.start()
            # Nothing that systemd still has to do may end up in the snapshot.
            first.run("systemctl is-system-running --wait", check=False, timeout_s=guest.BOOT_TIMEOUT_S)
            first.run("sync; echo 3 >/proc/sys/vm/drop_caches")
            first.save(guest.FRESH)
    except (RuntimeError, TimeoutError) as error:
        raise BuildError(f"the new board does not work: {error}") from None
    first.disk.replace(new / "disk.qcow2")


def _try_namespaces() -> None:
    """Raise BuildError where this machine is a container that forbids them; not tried before the emulator is there."""
    if foreign.EMULATOR.exists():
        failure = "the arm64 root cannot be made here"
        debian.run([sys.executable, str(Path(foreign.__file__)), "true"], failure, guest.ANSWER_TIMEOUT_S)


def _make_once(folder: Path, needed_bytes: int, make: Callable[[Path, Path], object]) -> None:
    """Have `make` fill a folder, which gets its name only when that is complete; beside it, one for its own use."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        return
    if os.geteuid() != 0:
        raise BuildError("the image can be made by root only: its files belong to several users")
    with debian.locked(folder.parent / "build"):
        if (free := shutil.disk_usage(folder.parent).free) < needed_bytes:
            raise BuildError(f"{free >> 20} MiB free at {folder.parent}; {needed_bytes >> 20} MiB are needed")
        for left in folder.parent.glob(".*.building"):  # of a build that was killed: the lock is ours
            shutil.rmtree(left)
        if folder.exists():  # by who held the lock before
            return
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".building", dir=folder.parent) as name:
            new, scratch = Path(name) / "new", Path(name) / "scratch"
            new.mkdir()
            scratch.mkdir()
            make(new, scratch)
            new.rename(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage, 3 no packages to be had, 130 stopped."""
    parser = argparse.ArgumentParser(prog="build", description="Make boards with a real kernel; print their folders.")
    parser.add_argument("--board", choices=cache.BOARDS, help="this one alone (default: every one)")
    parser.add_argument("--install-packages", action="store_true", help="install what is missing here; as root")
    parser.add_argument("--fetch", action="store_true", help="only fetch what they are made from")
    parser.add_argument("--check", action="store_true", help="build nothing: print the folder, or say what is missing")
    parser.add_argument("--possible", action="store_true", help="build nothing: say whether it could be made here")
    options = parser.parse_args(argv)
    boards = (options.board,) if options.board else cache.BOARDS
    try:
        if options.possible:
            material.require_possible()
            _try_namespaces()
            return 0
        if options.check:
            for board in boards:
                print(cache.require_image(board))
            return 0
        if options.install_packages and (missing := material.find_missing()):
            debian.install_packages(missing)
        if options.fetch:
            print(fetch(), flush=True)
            return 0
        for board in boards:
            print(build(board), flush=True)
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, UnreachableError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
