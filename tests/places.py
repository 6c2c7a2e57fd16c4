"""Places for stores, in files and on a PostgreSQL server, and direct access to them."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import sqlalchemy as sa

from farm.settings import StoreLocation
from farm.store.sqlite import copy_store
from tests.postgresql import Cluster


class Files:
    """Stores in files. Most begin as a copy of an empty one, since a migration takes longer than a test."""

    def __init__(self, folder: pathlib.Path, template: pathlib.Path) -> None:
        self._folder, self._template, self._made = folder, template, 0

    def make(self, *, empty: bool = False) -> StoreLocation:
        self._made += 1
        place = self._folder / f"home{self._made}" / "farm.db"
        if not empty:
            place.parent.mkdir()
            shutil.copy(self._template, place)
            execute(place, "UPDATE identity SET id = lower(hex(randomblob(16)))")
        return place

    def copy(self, place: StoreLocation) -> StoreLocation:
        copy = self.make(empty=True)
        assert isinstance(place, pathlib.Path)
        assert isinstance(copy, pathlib.Path)
        copy.parent.mkdir()
        copy_store(place, copy)
        return copy

    def close(self) -> None:
        """Nothing: pytest removes the folder."""


class ServerDatabases:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: list[str] = []

    def make(self, *, empty: bool = False) -> StoreLocation:
        self._made.append(self._cluster.make(empty=empty))
        return self._made[-1]

    def copy(self, place: StoreLocation) -> StoreLocation:
        self._made.append(self._cluster.copy(str(place)))
        return self._made[-1]

    def close(self) -> None:
        for url in self._made:
            self._cluster.drop(url)


def connect(place: StoreLocation) -> sa.Engine:
    if isinstance(place, pathlib.Path):
        return sa.create_engine(f"sqlite:///{place}")
    return sa.create_engine(sa.make_url(place).set(drivername="postgresql+psycopg"))


def execute(place: StoreLocation, *statements: str) -> list[tuple[Any, ...]]:
    """Statements by a program that is none of ours, in one transaction; the rows that the last one gives."""
    engine = connect(place)
    try:
        with engine.begin() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []
    finally:
        engine.dispose()


Places = Files | ServerDatabases
