"""Compile one candidate into a linked shared library: no Ray, no store, no files left.

A killed compiler leaves its folder; the next one to start removes it (`remove_left`).
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

import tvm
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from device_agent.protocol import Status
from farm import linker
from farm.errors import CodeRefusedError, FarmError
from farm.search.codegen import lowering
from farm.search.tvm_env import make_code_target
from farm.search.tvm_errors import find_reason

_PREFIX = "farm-build-"
_LOOK_S = 0.05


def build_candidate(module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False) -> bytes:
    """Build the shared library of a scheduled function with the entry `main`.

    Weights that the schedule packs are expected packed, as in the compiled model. With `standalone` the function packs
    them itself and so accepts ordinary weights. Raises CodeRefusedError for code that the board's GPU cannot run, and
    TVM's own errors.
    """
    module = tvm.ir.load_json(module_json)
    if not standalone:
        module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    with lowering.making(target_config):
        built = tvm.tirx.build(module, make_code_target(target_config), lowering.use_pipeline())
    return link_candidate(built)


def link_candidate(built: Any) -> bytes:
    """Link a built module of TVM's as a shared library."""
    with _folder() as folder:
        path = folder / "candidate.so"
        # TVM's own folder for objects would be left behind if this process were killed.
        built.export_library(str(path), fcompile=_link, workspace_dir=str(folder))
        return path.read_bytes()


def try_to_build(
    module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False
) -> tuple[Status, bytes | None, str]:
    """Call `build_candidate` and classify its errors; return the status, the library and the reason."""
    try:
        return Status.OK, build_candidate(module_json, target_config, standalone=standalone), ""
    except CodeRefusedError as error:  # the GPU assembler refused the code
        return Status.BUILD_FAILED, None, _one_line(error)
    except (OSError, FarmError) as error:  # a full disk or a broken linker is not the candidate's fault
        return Status.FARM_ERROR, None, _one_line(error)
    except Exception as error:  # noqa: BLE001 - edge of a process: a compiler error is the candidate's fault
        return Status.BUILD_FAILED, None, _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {find_reason(error)}"


def content_address(library: bytes) -> str:
    """Return the SHA-256 of the library as hexadecimal: its name in every cache."""
    return hashlib.sha256(library).hexdigest()


def remove_left(timeout_s: float = 0.0) -> None:
    """Remove the folders of compilers killed during a build.

    Wait up to `timeout_s` for folders in use: a compiler killed just now may still hold its lock.
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
    """Make a locked folder for one build; the kernel releases the lock when this process ends."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as text, _lock(Path(text)):
        yield Path(text)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError where another process holds it or another user owns the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
    files = [objects] if isinstance(objects, str) else list(objects)
    linker.link_candidate(Path(output), [Path(f) for f in files])
