"""Marks every test by the folder it lies in, so that `-m unit` and `tests/unit` mean the same."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator

import pytest

from tests import postgresql

# Before anybody loads NumPy. What tests compute is small, and something runs beside them: threads that wait for each
# other would take longer than one. `farm` itself sets it, too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Most tests are not about what virtual boards cost: this machine's code runs at once, emulated code after a second.
# Those that are say so.
os.environ.setdefault("FARM_VIRTUAL_CODE", "native")

_HERE = pathlib.Path(__file__).parent
_KINDS = ("unit", "contract", "integration", "acceptance", "real_kernel", "gpu", "torch")


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgresql.Cluster]:
    """A PostgreSQL server of this run's own; see `tests/postgresql.py`."""
    with postgresql.running() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker that the first folder below `tests/` names."""
    for item in items:
        kind = item.path.relative_to(_HERE).parts[0]
        if kind in _KINDS:
            item.add_marker(kind)


def pytest_collection_finish() -> None:
    """Keep what is loaded by now out of the garbage collector's rounds: it is a lot, and stays until the end."""
    gc.freeze()
