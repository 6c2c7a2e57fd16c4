"""The scripts of `deploy/release`, which is no package, as modules."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "deploy" / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
