"""TVM behind one adapter: import, graph pipeline, workloads, search, cost model, build.

Only this package, `farm.artifacts`, `farm.metaschedule` and `farm.measure.session` import tvm. `farm.campaign` decides
which workload gets the next trial and where it runs.

MetaSchedule scripts find `FarmBuilder`, `FarmRunner`, `FarmDatabase`, `import_model` and `farm_pipeline` here; these
live in `farm.metaschedule` and load on first use.
"""

import importlib
from typing import Any

_FOR_SCRIPTS = {
    "FarmBuilder": "farm.metaschedule.builder",
    "FarmRunner": "farm.metaschedule.runner",
    "FarmDatabase": "farm.metaschedule.database",
    "farm_pipeline": "farm.metaschedule.tvm_objects",
    "import_model": "farm.metaschedule.tvm_objects",
}
# Stable names, see docs/commands.md.
__all__ = ["FarmBuilder", "FarmDatabase", "FarmRunner", "farm_pipeline", "import_model"]


def __getattr__(name: str) -> Any:
    """Load the names for scripts lazily, so that this package does not depend on `farm.metaschedule`."""
    if name not in _FOR_SCRIPTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FOR_SCRIPTS[name]), name)
