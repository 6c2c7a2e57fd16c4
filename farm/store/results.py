"""Kept results of `farm model bench`, `run` and `evaluate`, a row for each model; `farm.report.results` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import sqlalchemy as sa

from farm.errors import UsageError
from farm.store import schema
from farm.store.session import StorePart

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_ID = 2**63 - 1


class StoredResult(NamedTuple):
    """One model measured once on a board; `document` is what the command prints with `--json`, for this model alone."""

    id: int
    kind: str
    model: str
    board: str
    board_type: str
    simulated: bool
    device: str
    document: Mapping[str, Any]
    by: str
    recorded_at: float


class AboutResult(TypedDict):
    """What a result is of, and who made it."""

    model: str
    board: str
    board_type: str
    simulated: bool
    device: str
    by: str


class Results(StorePart):
    """Queries on `results`."""

    def add(self, kind: str, document: Mapping[str, Any], **about: Unpack[AboutResult]) -> int:
        """Keep a result; return its number."""
        with self._db.writing() as connection:
            row = {"kind": kind, "document": dict(document), **about, "recorded_at": self._db.wall_clock()}
            return self._db.insert(connection, schema.results, **row)

    def fetch(
        self, *, kind: str = "", model: str = "", board_type: str = "", limit: int = 1000, offset: int = 0
    ) -> list[StoredResult]:
        """Return results, the newest first; "" chooses all."""
        table = schema.results
        query = sa.select(*(table.c[name] for name in StoredResult._fields)).order_by(table.c.id.desc())
        query = query.where(*_choose(kind, model, board_type))
        return self._db.read(query.limit(limit).offset(offset), StoredResult)

    def count(self, *, kind: str = "", model: str = "", board_type: str = "") -> int:
        """Return the number of results; "" counts all."""
        return self._db.count(schema.results, *_choose(kind, model, board_type))

    def require(self, result: int) -> StoredResult:
        """Return one result. Raises UsageError for an unknown one."""
        table = schema.results
        query = sa.select(*(table.c[name] for name in StoredResult._fields)).where(table.c.id == min(result, _MAX_ID))
        for found in self._db.read(query, StoredResult):
            return found
        raise UsageError(f"there is no result {result}", "`farm result list` shows those that there are.")


def _choose(kind: str, model: str, board_type: str) -> list[sa.ColumnElement[bool]]:
    wanted = {"kind": kind, "model": model, "board_type": board_type}
    return [schema.results.c[name] == value for name, value in wanted.items() if value]
