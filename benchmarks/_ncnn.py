"""ncnn beside the farm: its wheels in an environment of their own, networks converted once, a process that is timed.

Everything is kept in a cache folder (`tvm-farm-benchmarks` in XDG_CACHE_HOME). Raises UnavailableError where it cannot
be had, so that a benchmark can say why and go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _farm
import _machine
import numpy as np

from farm.errors import UnavailableError

NCNN, PNNX = "1.0.20261020", "20261020"
_INSTALL_S, _CONVERT_S, _START_S, _RUN_S = 600.0, 300.0, 60.0, 300.0


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where the wheels are."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def pnnx(self) -> Path:
        """The converter itself; the wheel's Python around it would bring torch, which ONNX files do not need."""
        return next(self.folder.glob("lib/python*/site-packages/pnnx/pnnx"))


def require_environment() -> Environment:
    """Make the environment or find it. Raises UnavailableError."""
    numpy = importlib.metadata.version("numpy")
    folder = cache_folder() / f"ncnn-{NCNN}-{PNNX}-numpy-{numpy}-python-{sys.version_info[0]}.{sys.version_info[1]}"
    if not folder.exists():
        _machine.say(f"installing ncnn {NCNN} and pnnx {PNNX} into {folder}")
        with appearing(folder) as part:
            run_command([sys.executable, "-m", "venv", str(part)], _INSTALL_S)
            pip = [str(part / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            wheels = [f"ncnn=={NCNN}", f"pnnx=={PNNX}", f"numpy=={numpy}"]
            run_command([*pip, "--no-input", "--no-deps", "--only-binary=:all:", *wheels], _INSTALL_S)
    return Environment(folder)


def convert(environment: Environment, model: _farm.Model) -> Path:
    """The folder with the model as `model.ncnn.param` and `model.ncnn.bin`, in float32. Raises UnavailableError."""
    folder = cache_folder() / f"networks-{PNNX}" / model.source.sha256[:32]
    if not folder.exists():
        with appearing(folder) as part:
            part.mkdir()
            (part / "model.onnx").write_bytes(model.source.onnx_bytes)
            shapes = ",".join(str(list(spec.static_shape)).replace(" ", "") for spec in model.inputs)
            run_command([str(environment.pnnx), "model.onnx", f"inputshape={shapes}", "fp16=0"], _CONVERT_S, part)
            for kind in ("param", "bin"):
                if not (part / f"model.ncnn.{kind}").exists():
                    raise UnavailableError(f"pnnx left no model.ncnn.{kind} of {model.source.name}")
            for path in part.iterdir():
                if not path.name.startswith("model.ncnn."):
                    path.unlink()
    return folder


@contextlib.contextmanager
def running(environment: Environment, model: _farm.Model, image: Any, threads: int) -> Iterator[_farm.Elsewhere]:
    """Keep a process with the model; yields what times it. `image` is the only input, with a batch dimension of 1.

    Raises UnavailableError where the model does not load or run.
    """
    network = convert(environment, model)
    with tempfile.TemporaryDirectory(prefix="farm-bench-ncnn-") as name:
        source, result = Path(name) / "input.npy", Path(name) / "output.npz"
        np.save(source, image[0])
        files = [network / "model.ncnn.param", network / "model.ncnn.bin", source, result]
        script = Path(__file__).with_name("_ncnn_child.py")
        process = subprocess.Popen(
            [str(environment.python), str(script), *map(str, files), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            _answer(process, _START_S)
            with np.load(result) as arrays:
                outputs = [array[None] for array in arrays.values()]

            def turn(warmup: int, runs: int) -> _farm.Timing:
                assert process.stdin is not None
                process.stdin.write(f"run {warmup + runs}\n".encode())
                process.stdin.flush()
                return _farm.Timing(json.loads(_answer(process, _RUN_S))[warmup:], outputs)

            yield turn
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _answer(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """One line of the process. Raises UnavailableError where it ends or says nothing in time."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise UnavailableError(f"ncnn said nothing for {timeout_s:.0f} s")
        if not (part := os.read(process.stdout.fileno(), 65_536)):
            raise UnavailableError("ncnn's process ended")
        line += part
    return line.decode()


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


def run_command(command: Sequence[str], timeout_s: float, folder: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{Path(command[0]).name} did not end within {timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or b"nothing").decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"{Path(command[0]).name} failed: {said[-1] if said else 'it said nothing'}") from error
