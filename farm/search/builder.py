"""Compile one candidate into a linked shared library. Pure: bytes out, no Ray, no store, nothing left on disk."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.search import linker, tvm_env
from farm.search.target import make_target


def build_candidate(module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False) -> bytes:
    """The shared library of a scheduled function, its entry being `main`.

    Weights that the schedule wants packed are taken as packed already, as they will be in the compiled model. With
    `standalone` the packing stays inside the function, so that it computes the right result from ordinary weights.
    """
    tvm = tvm_env.load()
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    module = tvm.ir.load_json(module_json)
    if not standalone:
        module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    built = tvm.tirx.build(module, target=make_target(target_config))
    with tempfile.TemporaryDirectory(prefix="farm-build-") as folder:
        path = Path(folder) / "candidate.so"
        built.export_library(str(path), fcompile=_link)
        return path.read_bytes()


def content_address(library: bytes) -> str:
    """SHA-256 of the library, hexadecimal: its name in every cache."""
    return hashlib.sha256(library).hexdigest()


def _link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
    files = [objects] if isinstance(objects, str) else list(objects)
    linker.link_candidate(Path(output), [Path(f) for f in files])
