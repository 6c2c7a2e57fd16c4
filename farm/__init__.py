"""The coordinator: boards, campaigns, search, store and reports. The board's side is `device_agent`.

`farm.optimize`, `farm.Campaign` and `farm.campaigns` are what Python programs use; they are loaded when they are first
asked for.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from farm import lazy
from farm.version import __version__ as __version__

lazy.install()
# A user's setting, or that of the process which started this one: it would leave TVM without its compiler.
os.environ.pop("TVM_USE_RUNTIME_LIB", None)

_API = {"Campaign": "farm.api", "campaigns": "farm.api", "optimize": "farm.optimization"}
# What docs/commands.md promises.
__all__ = ["Campaign", "__version__", "campaigns", "optimize"]


def __getattr__(name: str) -> Any:
    # Not an import statement: everything imports this package, and must not wait for campaigns.
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'farm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
