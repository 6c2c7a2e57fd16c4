"""TVM behind one adapter: import, graph pipeline, workloads, search, cost model, build.

Nothing outside this package (and `farm.artifacts`, `farm.metaschedule`, `farm.measure.session`) imports tvm. Which
workload gets the next trial, and where it runs, is decided in `farm.campaign`.

`FarmBuilder`, `FarmRunner` and `FarmDatabase`, for stock MetaSchedule scripts, are found here too, and so are
`import_model` and `farm_pipeline`; they live in `farm.metaschedule` and are loaded with TVM when they are first
asked for.
"""

import importlib
from typing import Any

_FOR_SCRIPTS = {
    "FarmBuilder": "farm.metaschedule.builder",
    "FarmRunner": "farm.metaschedule.runner",
    "FarmDatabase": "farm.metaschedule.database",
    "farm_pipeline": "farm.metaschedule.models",
    "import_model": "farm.metaschedule.models",
}
# What docs/stability.md promises.
__all__ = ["FarmBuilder", "FarmDatabase", "FarmRunner", "farm_pipeline", "import_model"]


def __getattr__(name: str) -> Any:
    """What scripts ask for; this package itself must not depend on it, nor load TVM."""
    if name not in _FOR_SCRIPTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FOR_SCRIPTS[name]), name)
