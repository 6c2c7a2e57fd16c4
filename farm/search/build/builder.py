"""Compile one candidate into a linked shared library. Bytes out, no Ray, no store, nothing left on disk.

A compiler that is killed leaves its folder; the next one that starts removes it (`remove_left`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from device_agent.protocol import Status
from farm import linker
from farm.errors import CodeRefusedError, FarmError
from farm.search import tvm_env
from farm.search.build import lowering
from farm.search.target import make_code_target
from farm.search.tvm_errors import find_reason
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
import tvm

_PREFIX = "farm-build-"
_LOOK_S = 0.05


def build_candidate(module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False) -> bytes:
    """The shared library of a scheduled function, its entry being `main`.

    Weights that the schedule wants packed are taken as packed already, as they will be in the compiled model. With
    `standalone` the packing stays inside the function, so that it computes the right result from ordinary weights.
    Raises CodeRefusedError for code that a board's GPU cannot take, and what TVM raises.
    """

    module = tvm.ir.load_json(module_json)
    if not standalone:
        module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    with lowering.making(target_config):
        built = tvm.tirx.build(module, make_code_target(target_config), lowering.use_pipeline())
    with _folder() as folder:
        path = folder / "candidate.so"
        # Objects go there too: a folder of TVM's own would stay where this process is killed.
        built.export_library(str(path), fcompile=_link, workspace_dir=str(folder))
        return path.read_bytes()


def try_to_build(
    module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False
) -> tuple[Status, bytes | None, str]:
    """`build_candidate` at the edge of a process: whose fault it is where it fails, its library, the reason."""
    try:
        return Status.OK, build_candidate(module_json, target_config, standalone=standalone), ""
    except CodeRefusedError as error:  # of its code, by whoever assembles it for a GPU
        return Status.BUILD_FAILED, None, _one_line(error)
    except (OSError, FarmError) as error:  # a full disk, a linker that cannot run: no candidate's fault
        return Status.FARM_ERROR, None, _one_line(error)
    except Exception as error:  # noqa: BLE001 - edge of a process: what the compiler raises is the candidate's fault
        return Status.BUILD_FAILED, None, _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {find_reason(error)}"


def content_address(library: bytes) -> str:
    """SHA-256 of the library, hexadecimal: its name in every cache."""
    return hashlib.sha256(library).hexdigest()


def remove_left(timeout_s: float = 0.0) -> None:
    """Remove the folders of compilers that were killed in the middle of a build, which slow candidates bring about.

    With a time-out, those in use are waited for: a compiler that was killed just now may not be gone yet.
    """
    deadline = time.monotonic() + timeout_s
    while left := list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        for folder in left:
            with contextlib.suppress(OSError), _lock(folder):
                shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one build, known by its lock as one that is used: the kernel lets go of it however we die."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as text, _lock(Path(text)):
        yield Path(text)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError where somebody else does, or it is not ours."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} is somebody else's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
    files = [objects] if isinstance(objects, str) else list(objects)
    linker.link_candidate(Path(output), [Path(f) for f in files])
