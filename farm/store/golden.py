"""The golden-kernel history of boards. What it says of a board is worked out elsewhere (`farm.crew.calibration`)."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from farm.store import schema
from farm.store.boards import BoardQueries
from farm.store.standing import note_seen, require_row
from farm.values import GoldenSample

# Weeks of idle probes; what is older says nothing about the board of today.
GOLDEN_KEPT = 1000


class GoldenQueries(BoardQueries):
    """Queries on `golden_samples`."""

    def add_golden_sample(self, sample: GoldenSample) -> None:
        """Keep a run of the golden kernel; of each board, kernel and point the last `GOLDEN_KEPT` are kept.

        Raises UsageError for an unknown board.
        """
        table = schema.golden_samples
        with self._writing() as connection:
            require_row(connection, sample.board)
            values = dataclasses.asdict(sample) | {"at": sample.at or self._wall_clock()}
            connection.execute(table.insert().values(**values | {"samples_s": list(sample.samples_s)}))
            note_seen(connection, [sample.board], float(values["at"]))
            same = (
                (table.c.board == sample.board)
                & (table.c.kernel == sample.kernel)
                & (table.c.operating_point == sample.operating_point)
            )
            newest = sa.select(table.c.id).where(same).order_by(table.c.id.desc()).limit(GOLDEN_KEPT)
            connection.execute(table.delete().where(same & table.c.id.not_in(newest)))

    def fetch_golden_samples(
        self,
        board_type: str,
        kernel: str,
        operating_point: str,
        *,
        simulated: bool,
        newest: int = 100,
        board: str | None = None,
    ) -> dict[str, list[GoldenSample]]:
        """By board of a type, its `newest` runs of a golden kernel at an operating point, oldest first.

        With `board` that one alone.
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
                schema.is_sound(table.c.median_s),
                sa.true() if board is None else table.c.board == board,
            )
            .subquery()
        )
        columns = [ranked.c[field.name] for field in dataclasses.fields(GoldenSample)]
        query = sa.select(*columns).where(ranked.c.age <= newest).order_by(ranked.c.board, ranked.c.id)
        result: dict[str, list[GoldenSample]] = {}
        for row in self._rows(query):
            sample = GoldenSample(**row | {"samples_s": tuple(row["samples_s"])})
            result.setdefault(sample.board, []).append(sample)
        return result

    def find_golden_sample(self, board: str) -> GoldenSample | None:
        """The latest run of whichever golden kernel on a board; None where there was none."""
        table = schema.golden_samples
        columns = [table.c[field.name] for field in dataclasses.fields(GoldenSample)]
        query = sa.select(*columns).where(table.c.board == board).order_by(table.c.id.desc()).limit(1)
        for row in self._rows(query):
            return GoldenSample(**row | {"samples_s": tuple(row["samples_s"])})
        return None
