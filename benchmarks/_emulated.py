"""Programs on the emulated board with their instructions counted, and the other engines' aarch64 wheels for them.

The counter is in `deploy/emulated-board`, the board's side in `_emulated_child.py`. Raises UnavailableError if a part
is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _farm
import _machine

from farm.errors import UnavailableError

sys.path.insert(0, str(_machine.ROOT / "deploy" / "emulated-board"))
import counter
import root

BOARD_TYPE = "jetson-nano"
NCNN = "1.0.20261020"
_RUN_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One program and what it is given.

    `engine` is one of the agent's, or `ncnn half` (precision). Inputs are an npz, or (shape, dtype) of each, filled
    with random numbers.
    """

    engine: str
    files: tuple[Path, ...]
    inputs: Path | tuple[tuple[tuple[int, ...], str], ...]
    outputs: Path | None = None


@dataclasses.dataclass(frozen=True)
class Executed:
    """For one run, what is done once left out."""

    instructions: float
    vector_fmas: float
    loads_stores: float


def require_board() -> Path:
    """The board's root, counter and emulator being there too."""
    try:
        counter.require_plugin()
        return Path(root.require_root())
    except root.BuildError as error:
        raise UnavailableError(str(error)) from error


def require_wheels() -> Path:
    """A folder with ONNX Runtime, of the version that is here, and ncnn for the board's Python."""
    wheels = {"onnxruntime": importlib.metadata.version("onnxruntime"), "ncnn": NCNN}
    folder = cache_folder() / "-".join(["aarch64", *(f"{k}-{v}" for k, v in wheels.items()), root.PYTHON_VERSION])
    if not folder.exists():
        _machine.say(f"installing ONNX Runtime and ncnn for aarch64 into {folder}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        pip += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={root.PYTHON_VERSION}"]
        pip += [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(root.GLIBC_MINOR, 16, -1)]
        pip += ["--platform=manylinux2014_aarch64"]
        with appearing(folder) as part:
            _farm.run_command([*pip, "--target", str(part), *(f"{k}=={v}" for k, v in wheels.items())], 600.0)
    return folder


def count(jobs: Sequence[Job], wheels: Path | None = None, runs: int = 1) -> list[Executed]:
    """Run programs in one process, each once, then `runs` times and twice that; the difference counts."""
    board = require_board()
    with tempfile.TemporaryDirectory(prefix="farm-bench-emulated-") as name:
        order, counts = Path(name) / "order.json", Path(name) / "counts"
        paths = [Path(counter.__file__).parent, Path(__file__).parent, _machine.ROOT, *([wheels] if wheels else [])]
        document = {"paths": paths, "runs": runs, "jobs": [dataclasses.asdict(job) for job in jobs]}
        order.write_text(json.dumps(document, default=str))
        counter.make_counts(counts)
        command = [*counter.make_command(board, counts), str(Path(__file__).with_name("_emulated_child.py"))]
        environment = counter.make_environment(counts)
        try:
            done = subprocess.run(
                [*command, str(order)], env=environment, capture_output=True, timeout=_RUN_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"the emulated board did not end within {_RUN_S:.0f} s") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-1000:]
            raise UnavailableError(f"the emulated board ended with {done.returncode}: {said}")
        results = json.loads(order.with_suffix(".results").read_text())
    return [Executed(*((twice - once) / runs for once, twice in zip(*pair, strict=True))) for pair in results]


def describe(executed: Executed, flop: float) -> dict[str, Any]:
    """The figures of one run that takes so many FLOP as a direct computation."""
    return {
        "million_instructions": _machine.round_to(executed.instructions / 1e6),
        "vector_fma_share": _machine.round_to(executed.vector_fmas / executed.instructions, 3),
        "load_store_share": _machine.round_to(executed.loads_stores / executed.instructions, 3),
        "flop_per_instruction": _machine.round_to(flop / executed.instructions, 3),
    }


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tvm-farm-benchmarks"


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete. Raises UnavailableError for what the system refuses."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.rename(folder)
    except OSError as error:
        if folder.exists():  # another process was faster
            return
        raise UnavailableError(f"{folder} cannot be made: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
