"""Count the instructions that Python programs execute on the emulated board: by `count`, or from inside while they run.

Standard library only. What counts is `counter.c`, a plug-in of QEMU, built here once; the root comes from `root.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import root
from start import CPU

SOURCE = Path(__file__).with_name("counter.c")
COMPILE_TIMEOUT_S = 120.0

# As in counter.c.
_THREADS, _LINE = 256, 64
SIZE = _THREADS * _LINE
# Names the file with the counts to the program that is counted.
VARIABLE = "EMULATED_BOARD_COUNTS"


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a process over all threads: `vector_fmas` are FMAs of four float32 values each."""

    instructions: int
    vector_fmas: int
    loads_stores: int

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.instructions - earlier.instructions,
            self.vector_fmas - earlier.vector_fmas,
            self.loads_stores - earlier.loads_stores,
        )


class Reader:
    """Reads the counts of a process from its file; the process may be the caller's own."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._counts = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)

    def read(self) -> Counts:
        """Return the counts until now."""
        lines = (struct.unpack_from("=3Q", self._counts, at) for at in range(0, SIZE, _LINE))
        return Counts(*map(sum, zip(*lines, strict=True)))


def make_counts(path: Path) -> None:
    """Write an empty file of counts; each process needs one of its own."""
    path.write_bytes(bytes(SIZE))


def make_command(folder: Path, counts: Path) -> list[str]:
    """Return the command that runs the root's Python with its instructions counted; Python's arguments follow.

    Raises root.BuildError where the emulator or a compiler is missing.
    """
    plugin = require_plugin()
    python = folder / "usr" / "bin" / f"python{root.PYTHON_VERSION}"
    return [root.COUNTING_QEMU, "-plugin", f"file={plugin},counts={counts}", "-L", str(folder), str(python)]


def make_environment(counts: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of such a command: the board's core, and nothing that makes two runs differ."""
    kept = {k: v for k, v in environment.items() if not k.startswith(("LD_", "PYTHON"))}
    # One thread each: waiting threads spin, and spinning is counted.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"), "1")
    chosen = {"QEMU_CPU": CPU, "PYTHONHASHSEED": "0", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **single, **chosen, "TVM_USE_RUNTIME_LIB": "1", VARIABLE: str(counts)}


def require_plugin(source: Path = SOURCE, also: Sequence[Path] = ()) -> Path:
    """Return a plug-in, compiled the first time; `also` are files that its source includes.

    Raises root.BuildError where the emulator or a compiler is missing.
    """
    if shutil.which(root.COUNTING_QEMU) is None:
        hint = f"{root.QEMU} takes no plug-ins: apt-get install {root.COUNTING_QEMU_PACKAGE}"
        raise root.BuildError(f"{root.COUNTING_QEMU} is not installed, and {hint}")
    compiler = find_compiler()
    texts = b"".join(path.read_bytes() for path in (source, *also))
    key = hashlib.sha256(texts + "\0".join(compiler).encode()).hexdigest()[:16]
    plugin = root.default_root(f"{source.stem}-{key}.so")
    if not plugin.exists():
        plugin.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".plugin.", dir=plugin.parent) as name:
            part = Path(name) / plugin.name
            _compile([*compiler, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-o", str(part), str(source)])
            part.rename(plugin)
    return plugin


def find_compiler() -> list[str]:
    """Return gcc, or the C compiler that comes with `make setup`. Raises root.BuildError."""
    if (gcc := shutil.which("gcc")) is not None:
        return [gcc]
    zig = next((root.CHECKOUT / ".venv").glob("lib/python*/site-packages/ziglang/zig"), None)
    if zig is None:
        raise root.BuildError("no C compiler for the instruction counter: run `make setup`, or apt-get install gcc")
    return [str(zig), "cc"]


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired:
        raise root.BuildError(f"the counter was not compiled within {COMPILE_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise root.BuildError(f"the counter does not compile:\n{error.stderr.strip()[-1000:]}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a Python program on the emulated board, print its counts on stderr as JSON, return its exit code."""
    parser = argparse.ArgumentParser(
        prog="count", description="Run the emulated board's Python and say how many instructions it executed."
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="the board's root (default: what `build` makes)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of Python: a script, or -c")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="emulated-counts-") as name:
        counts = Path(name) / "counts"
        try:
            make_counts(counts)
            command = make_command(root.require_root(options.root), counts)
        except root.BuildError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        arguments = options.arguments[options.arguments[:1] == ["--"] :]
        done = subprocess.run([*command, *arguments], env=make_environment(counts), check=False)
        print(json.dumps(dataclasses.asdict(Reader(counts).read())), file=sys.stderr)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
