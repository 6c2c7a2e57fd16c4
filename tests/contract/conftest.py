"""The databases that a store's contract is tested on: a file, and a database of a server of the tests' own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from farm.settings import StoreLocation
from farm.store import Store
from tests.fleet_store import Clocks, open_fleet
from tests.places import Files, Places, ServerDatabases

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An empty store's file."""
    path = tmp_path_factory.mktemp("template") / "farm.db"
    Store(path).close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def places(database: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Places]:
    made: Places
    if database == "sqlite":
        made = Files(tmp_path, request.getfixturevalue("template"))
    else:
        made = ServerDatabases(request.getfixturevalue("cluster"))
    yield made
    made.close()


@pytest.fixture
def place(places: Places) -> StoreLocation:
    return places.make()


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(place: StoreLocation, clocks: Clocks) -> Iterator[Store]:
    with open_fleet(place, clocks) as store:
        yield store


def run_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that knows this checkout. It keeps no byte code: a limit of file size would cut it off."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
