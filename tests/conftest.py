"""Marks every test by the folder it lies in, so that `-m unit` and `tests/unit` mean the same; long ones are first."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

from tests import postgresql

pytest_plugins = ["tests.together", "tests.durations", "tests.children"]

# Containers often forbid it, and then each of the processes that tests start would compile the farm again: two seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test needs a fast machine: an example may take as long as it takes.
hypothesis.settings.register_profile("farm", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("farm")

# As it is loaded, which pytest does, GNU's readline writes the width of a terminal into the environment of children.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)

# Before NumPy is loaded. What tests compute is small, and something runs beside them: threads that wait for each
# other would take longer than one. `farm` itself sets it, too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What Zig makes on first use, ten seconds of a core, is the same for all tests: no home of theirs needs its own.
os.environ.setdefault("FARM_ZIG_CACHE", str(pathlib.Path(tempfile.gettempdir()) / "farm-test-zig"))

_HERE = pathlib.Path(__file__).parent
_KINDS = ("unit", "contract", "integration", "acceptance", "real_kernel", "torch")
# They are cheap: `make test` runs them all. Of the others it runs what is marked.
_ALWAYS_CORE = ("unit", "contract")
# The files that take longest, longest first, and then the folders by what their files take: a process that begins a
# long one at the end would leave the others idle.
_LONGEST = (
    "acceptance/test_artifacts.py", "acceptance/test_campaign_faults.py", "acceptance/test_campaign_chaos.py",
    "acceptance/test_fleet_faults.py", "acceptance/test_sweep.py", "acceptance/test_quickstart.py",
    "acceptance/test_interrupt.py", "acceptance/test_campaign_run.py", "integration/test_provision.py",
    "acceptance/test_readme.py", "acceptance/test_services.py",
)  # fmt: skip
_FOLDERS = ("acceptance", "integration", "contract", "unit")


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgresql.Cluster]:
    """A PostgreSQL server of this run's own; see `tests/postgresql.py`."""
    with postgresql.running() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker that the first folder below `tests/` names; put what takes long first."""
    for item in items:
        kind = item.path.relative_to(_HERE).parts[0]
        if kind in _KINDS:
            item.add_marker(kind)
        if kind in _ALWAYS_CORE:
            item.add_marker("core")
    items.sort(key=_place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load TVM's compiler where tests of candidates come beside others: it cannot follow the runtime alone."""
    kinds = {item.path.relative_to(_HERE).parts[0] for item in session.items}
    if "integration" in kinds and len(kinds) > 1 and not session.config.option.collectonly:
        from farm.search import tvm_env

        tvm_env.load_compiler()
    # What is loaded by now is kept out of the garbage collector's rounds: it is a lot, and stays until the end.
    gc.freeze()


def _place(item: pytest.Item) -> tuple[int, int]:
    name = item.path.relative_to(_HERE)
    first = _LONGEST.index(str(name)) if str(name) in _LONGEST else len(_LONGEST)
    return first, _FOLDERS.index(name.parts[0]) if name.parts[0] in _FOLDERS else len(_FOLDERS)
