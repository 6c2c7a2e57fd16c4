"""Samples of the golden kernel: kept for each board, the newest first."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from farm.store import expressions, schema
from farm.store.session import StorePart
from farm.store.standing import note_seen, require_row
from farm.values import GoldenSample

# Weeks of idle probes; older samples say nothing about the board today.
GOLDEN_KEPT = 1000


class GoldenSamples(StorePart):
    """Queries on `golden_samples`."""

    def add(self, sample: GoldenSample) -> None:
        """Store a run of the golden kernel; the last `GOLDEN_KEPT` of each board, kernel and point are kept.

        Raises UsageError for an unknown board.
        """
        table = schema.golden_samples
        with self._db.writing() as connection:
            require_row(connection, sample.board)
            values = dataclasses.asdict(sample) | {"at": sample.at or self._db.wall_clock()}
            connection.execute(table.insert().values(**values | {"samples_s": list(sample.samples_s)}))
            note_seen(connection, [sample.board], float(values["at"]))
            same = (
                (table.c.board == sample.board)
                & (table.c.kernel == sample.kernel)
                & (table.c.operating_point == sample.operating_point)
            )
            newest = sa.select(table.c.id).where(same).order_by(table.c.id.desc()).limit(GOLDEN_KEPT)
            connection.execute(table.delete().where(same & table.c.id.not_in(newest)))

    def fetch(
        self,
        board_type: str,
        kernel: str,
        operating_point: str,
        *,
        simulated: bool,
        newest: int = 100,
        board: str | None = None,
    ) -> dict[str, list[GoldenSample]]:
        """The `newest` runs of a golden kernel at an operating point, by board of a type, oldest first.

        `board` restricts it to one.
        """
        table, boards = schema.golden_samples, schema.boards
        age = sa.func.row_number().over(partition_by=table.c.board, order_by=table.c.id.desc())
        ranked = (
            sa.select(table, age.label("age"))
            .join(boards, boards.c.name == table.c.board)
            .where(
                boards.c.board_type == board_type,
                table.c.kernel == kernel,
                table.c.operating_point == operating_point,
                table.c.simulated == simulated,
                expressions.is_sound(table.c.median_s),
                sa.true() if board is None else table.c.board == board,
            )
            .subquery()
        )
        columns = [ranked.c[field.name] for field in dataclasses.fields(GoldenSample)]
        query = sa.select(*columns).where(ranked.c.age <= newest).order_by(ranked.c.board, ranked.c.id)
        result: dict[str, list[GoldenSample]] = {}
        for row in self._db.rows(query):
            sample = GoldenSample(**row | {"samples_s": tuple(row["samples_s"])})
            result.setdefault(sample.board, []).append(sample)
        return result

    def find_last(self, board: str) -> GoldenSample | None:
        """The latest run of any golden kernel on a board; None without one."""
        table = schema.golden_samples
        columns = [table.c[field.name] for field in dataclasses.fields(GoldenSample)]
        query = sa.select(*columns).where(table.c.board == board).order_by(table.c.id.desc()).limit(1)
        for row in self._db.rows(query):
            return GoldenSample(**row | {"samples_s": tuple(row["samples_s"])})
        return None

    def fetch_since(self, after: int, newest: int) -> list[tuple[int, GoldenSample]]:
        """Golden-kernel runs after a number, with their own, oldest first; at most the `newest` of each board."""
        table = schema.golden_samples
        age = sa.func.row_number().over(partition_by=table.c.board, order_by=table.c.id.desc())
        ranked = sa.select(table, age.label("age")).where(table.c.id > after).subquery()
        fields = [field.name for field in dataclasses.fields(GoldenSample) if field.name != "samples_s"]
        query = sa.select(ranked.c.id, *(ranked.c[name] for name in fields))
        query = query.where(ranked.c.age <= newest, expressions.is_sound(ranked.c.median_s)).order_by(ranked.c.id)
        return [
            (row["id"], GoldenSample(**{name: row[name] for name in fields}, samples_s=()))
            for row in self._db.rows(query)
        ]
