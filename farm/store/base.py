"""What every group of queries stands on: one file, one transaction per write, and the two clocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from farm.store import database
from farm.store.clock import Instant, read_clock

_Self = TypeVar("_Self", bound="Base")


class Base:
    """An open store. Safe for several processes; one thread per instance."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], Instant] = read_clock,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open, make or migrate the file. Raises UnavailableError (see `database.open_engine`).

        `clock` is what leases and cool-downs are judged on, `wall_clock` what people are shown.
        """
        self.path = path
        self._clock = clock
        self._wall_clock = wall_clock
        self._engine = database.open_engine(path)

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self, durably: bool = False) -> Iterator[sa.Connection]:
        """`durably`: what is written is on the disk, power cut or not, before this returns."""
        with database.translated(self.path), database.writing(self._engine, durably) as connection:
            yield connection

    def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with database.translated(self.path), self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]
