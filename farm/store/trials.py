"""Trials: written once, counted, and read in the forms that a search and a resuming engine need.

`fetch_similar` chooses trials for another search; `totals` has sums.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import FaultSide, Status
from farm.errors import InternalError
from farm.store import database, expressions, schema
from farm.store.campaign_rows import CandidateKey, KnownCandidate, SimilarTrial, TrialOutcome
from farm.store.session import VALUES_AT_ONCE, Statement, StorePart
from farm.store.standing import note_seen
from farm.store.workloads import Workloads
from farm.values import SEARCH_TRIAL, UNTUNED, WINNER_TRIAL, Trial

# Rows in memory at once.
_CHUNK = 5_000
# A failure of the board or the farm is no sign of life of the board.
_NO_SIGN = frozenset({str(FaultSide.BOARD), str(FaultSide.FARM)})

_LATEST = Statement(sa.select(sa.func.max(schema.trials.c.id).label("id")))
# A trial's columns that are its own fields.
_OWN = (
    *("campaign", "board_type", "workload", "operating_point", "candidate", "purpose", "attempt"),
    *("median_s", "library_sha256", "build_s", "held_s", "trace_json"),
)
_CANDIDATE = ("campaign", "board_type", "workload", "operating_point", "candidate")


@functools.cache
def _make_count(make: Callable[[sa.Table], Any]) -> Statement:
    """An INSERT that adds to the trials of a status."""
    counts, insert = schema.trial_counts, make(schema.trial_counts)
    added = {"trials": counts.c.trials + insert.excluded.trials}
    return Statement(insert.on_conflict_do_update(index_elements=["status"], set_=added), ("status", "trials"))


class Trials(StorePart):
    """Queries on `trials`."""

    def add(self, trial: Trial) -> bool:
        """Write a trial once. Returns False, with nothing changed, for a repeated delivery.

        That is an identity already stored, or a second counted trial (`Trial.counts`) of a candidate on a board type at
        an operating point in a campaign. Raises InternalError for an unknown campaign or workload, and for a trial that
        does not say on which of its campaign's board types it ran.
        """
        return self.add_several([trial]) == 1

    def add_several(self, trials: Sequence[Trial]) -> int:
        """As `add`, in one transaction; return how many were new."""
        with self._db.writing() as connection:
            now = self._db.wall_clock()
            rows = [to_row(trial, now) for trial in trials]
            for row, trial in zip(rows, trials, strict=True):
                if not trial.board_type:
                    row["board_type"] = _require_type(connection, trial)
            answered = {row["board"] for row in rows if row["board"] and row["fault_side"] not in _NO_SIGN}
            note_seen(connection, answered, now)
            return self.insert(connection, rows)

    def insert(self, connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> int:
        """Insert new rows and update the counts; return how many there were."""
        total = 0
        # In order: of two that exclude each other, the first is kept.
        for status, alike in itertools.groupby(rows, key=lambda row: str(row["status"])):
            fresh = list(alike)
            number = self._db.insert_all_new(connection, schema.trials, fresh)
            if number < len(fresh):
                _require_same(connection, fresh)
            total += number
            if number:
                _make_count(self._db.database.insert).run(connection, [{"status": status, "trials": number}])
        return total

    def count(self, campaign: int, *, purpose: str | None = None) -> dict[str, int]:
        """Trials by side, for one purpose or any.

        The keys are `ok`, `candidate_faults`, `board_faults`, `farm_faults`, `sample_faults`.
        """
        table = schema.trials
        query = sa.select(table.c.fault_side, sa.func.count().label("n")).where(table.c.campaign == campaign)
        if purpose is not None:
            query = query.where(table.c.purpose == purpose)
        rows = self._db.rows(query.group_by(table.c.fault_side))
        by_side = {row["fault_side"]: row["n"] for row in rows}
        return {"ok": by_side.get(None, 0)} | {f"{side}_faults": by_side.get(str(side), 0) for side in FaultSide}

    def count_statuses(self) -> dict[str, int]:
        """All trials by status; statuses without any are missing. Reads a few maintained rows."""
        return {row["status"]: row["trials"] for row in self._db.rows(sa.select(schema.trial_counts))}

    def fetch_mark(self) -> int:
        """The number of the latest trial, 0 without any: later trials have greater ones."""
        [row] = self._db.rows(_LATEST)
        return int(row["id"] or 0)

    def fetch(
        self, campaign: int | None = None, *, purpose: str | None = None, columns: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Trials in order of writing, of one campaign or all, for one purpose or any.

        `columns` selects some; all of them, with traces and outcomes, may be gigabytes.
        """
        table = schema.trials
        sound = expressions.sound_median_s
        wanted = [sound if name == "median_s" else table.c[name] for name in columns or table.c.keys()]
        query = sa.select(*wanted).order_by(table.c.id)
        if campaign is not None:
            query = query.where(schema.trials.c.campaign == campaign)
        if purpose is not None:
            query = query.where(schema.trials.c.purpose == purpose)
        return self._db.rows(query)

    def fetch_counted(self, campaign: int, task: tuple[str, str, str] | None = None) -> list[KnownCandidate]:
        """The counted trials of a campaign, one for each candidate of a task, in order of writing.

        `task` (board type, workload, operating point) selects one.
        """
        table = schema.trials
        query = sa.select(table.c.candidate, table.c.trace_json, table.c.board, expressions.sound_median_s)
        query = query.where(table.c.campaign == campaign, table.c.counted.is_not(None)).order_by(table.c.id)
        if task is not None:
            of_task = zip((table.c.board_type, table.c.workload, table.c.operating_point), task, strict=True)
            query = query.where(*(column == value for column, value in of_task))
        return self._db.read(query, KnownCandidate)

    def fetch_attempts(self, campaign: int) -> dict[tuple[str, str, str, str], int]:
        """The last attempt's number of each uncounted candidate in the search, by board type, workload, operating point
        and candidate.
        """
        key = _candidate_key()
        rows = self._db.rows(
            sa.select(*key, sa.func.max(schema.trials.c.attempt).label("attempt"))
            .where(*_never_counted(campaign))
            .group_by(*key)
        )
        return {
            (row["board_type"], row["workload"], row["operating_point"], row["candidate"]): row["attempt"]
            for row in rows
        }

    def fetch_board_breakers(self, campaign: int, losses: int) -> list[CandidateKey]:
        """Uncounted candidates under which boards failed `losses` times or more."""
        key = _candidate_key()
        blamed = sa.func.count().filter(schema.trials.c.fault_side == str(FaultSide.BOARD))
        query = sa.select(*key).where(*_never_counted(campaign)).group_by(*key).having(blamed >= losses)
        return self._db.read(query, CandidateKey)

    def fetch_board_seconds(self, campaign: int) -> float:
        """The total time for which a campaign's trials held boards, in seconds."""
        table = schema.trials
        [row] = self._db.rows(
            sa.select(expressions.total(table.c.held_s).label("held_s")).where(table.c.campaign == campaign)
        )
        return float(row["held_s"])

    def add_doubt(self, board: str, after: int, reason: str) -> int:
        """Record that a board drifted from a mark (`fetch_mark`) until now; return the number of affected search
        trials.
        """
        trials = schema.trials
        with self._db.writing() as connection:
            until = int(connection.execute(sa.select(sa.func.max(trials.c.id))).scalar() or 0)
            now = self._db.wall_clock()
            since = connection.execute(sa.select(trials.c.recorded_at).where(trials.c.id == after)).scalar()
            times = {"since": now if since is None else since, "until": now}
            connection.execute(
                schema.doubts.insert().values(board=board, after_trial=after, until_trial=until, reason=reason, **times)
            )
            count = sa.select(sa.func.count()).where(
                trials.c.board == board,
                trials.c.id > after,
                trials.c.purpose == SEARCH_TRIAL,
                trials.c.median_s.is_not(None),
            )
            return int(connection.execute(count).scalar() or 0)

    def fetch_known_candidates(
        self, workload: str, board_type: str, operating_point: str, simulated: bool
    ) -> list[KnownCandidate]:
        """The known candidates of a workload on a board type.

        `median_s` is the lowest median of the candidate's good trials. For a finalist only the verification trials
        count, since its selection favours a lucky time. Failures of boards and the farm are left out, and all of other
        farms. `add_doubt` makes trials doubted.
        """
        trials, doubts = schema.trials, schema.doubts
        wrong = sa.func.max(sa.case((trials.c.status == str(Status.WRONG_RESULT), 1), else_=0))
        median_s = expressions.sound_median_s.element
        again = sa.func.min(sa.case((trials.c.purpose == WINNER_TRIAL, median_s)))
        lied = sa.exists().where(
            doubts.c.board == trials.c.board, trials.c.id > doubts.c.after_trial, trials.c.id <= doubts.c.until_trial
        )
        sound = sa.func.min(sa.case((~lied, median_s)))
        anyhow = sa.func.min(median_s)
        query = (
            sa.select(
                trials.c.candidate,
                sa.func.min(trials.c.trace_json).label("trace_json"),
                sa.func.min(trials.c.board).label("board"),
                sa.case((wrong == 1, None), else_=sa.func.coalesce(again, sound, anyhow)).label("median_s"),
                sa.case((again.is_(None) & sound.is_(None) & anyhow.is_not(None), 1), else_=0).label("doubted"),
            )
            .where(
                trials.c.workload == workload,
                trials.c.board_type == board_type,
                trials.c.operating_point == operating_point,
                trials.c.simulated == simulated,
                trials.c.candidate != UNTUNED,
                expressions.is_sound(trials.c.median_s)
                | ((trials.c.fault_side == str(FaultSide.CANDIDATE)) & expressions.is_own_trial()),
            )
            .group_by(trials.c.candidate)
            .order_by(sa.func.min(trials.c.id))
        )
        return self._db.read(query, KnownCandidate)

    def fetch_since(self, campaign: int, after: int) -> Iterator[Sequence[Any]]:
        """A campaign's trials after a number, in order, without the long columns: number, board type, workload,
        operating point, whether it counts, median (s), board, time of writing, time on the board (s).
        """
        table = schema.trials
        query = (
            sa.select(
                table.c.id, table.c.board_type, table.c.workload, table.c.operating_point, table.c.counted,
                table.c.median_s, table.c.board, table.c.recorded_at, table.c.held_s,
            )
            .where(table.c.campaign == campaign, table.c.id > after)
            .order_by(table.c.id)
        )  # fmt: skip
        with database.translated(self._db.database), self._db.engine.connect() as connection:
            result = connection.execution_options(stream_results=True, max_row_buffer=_CHUNK).execute(query)
            for chunk in result.partitions(_CHUNK):
                yield from chunk

    def fetch_newest_outcomes(self, after: int, limit: int) -> list[TrialOutcome]:
        """The newest trials of all campaigns on boards of this farm after a number, oldest first."""
        table = schema.trials
        query = sa.select(table.c.board, table.c.recorded_at, table.c.operating_point, table.c.outcome)
        query = query.where(table.c.id > after, expressions.is_own_trial()).order_by(table.c.id.desc()).limit(limit)
        return [row for row in reversed(self._db.read(query, TrialOutcome)) if row.board]

    # For another search
    def fetch_similar(
        self,
        workloads: Sequence[str],
        *,
        simulated: bool,
        exclude: tuple[str, str, str] | None = None,
        limit: int = 2000,
        per_task: int = 200,
    ) -> list[SimilarTrial]:
        """Good trials of these workloads (hashes) on any board type at any operating point, best of each first.

        A task is a workload on a board type at an operating point; `exclude` names one to leave out. A task contributes
        up to `per_task` candidates, and all tasks up to `limit`, shared evenly. Half are its best, the others spread
        over the rest, because a model trained on good candidates only cannot recognise bad ones. Candidates that ever
        computed a wrong result are left out. Ordered by rank in the task, so that a prefix is a fair choice too.
        """
        tasks = self._fetch_tasks(workloads, simulated)
        if exclude is not None:
            tasks.pop(exclude, None)
        share = min(per_task, max(1, limit // max(1, len(tasks))))
        ranked = sorted((rank, trial) for trials in tasks.values() for rank, trial in enumerate(_choose(trials, share)))
        chosen = [trial for _, trial in ranked[:limit]]
        table = schema.trials
        query = sa.select(table.c.id, table.c.workload, *(table.c[name] for name in SimilarTrial._fields[1:]))
        rows = {row.pop("id"): row for row in self._db.rows_among(query, table.c.id, chosen)}
        known = Workloads(self._db).fetch_by_hash(sorted({row["workload"] for row in rows.values()}))
        return [SimilarTrial(**row | {"workload": known[row["workload"]]}) for row in (rows[each] for each in chosen)]

    def _fetch_tasks(self, workloads: Sequence[str], simulated: bool) -> dict[tuple[str, str, str], list[int]]:
        """The good trials of each task by rising median, each candidate once. Reads only indexes."""
        table = schema.trials
        lies = sa.select(table.c.workload, table.c.candidate).where(expressions.is_wrong())
        key = (table.c.workload, table.c.board_type, table.c.operating_point)
        good = sa.select(*key, table.c.candidate, table.c.id).order_by(*key, table.c.median_s, table.c.candidate)
        is_sound = expressions.is_sound(table.c.median_s)
        good = good.where(is_sound, table.c.candidate != UNTUNED, table.c.simulated == simulated)
        tasks: dict[tuple[str, str, str], list[int]] = {}
        seen: set[tuple[str, str, str, str]] = set()
        for first in range(0, len(workloads), VALUES_AT_ONCE):
            some = list(workloads[first : first + VALUES_AT_ONCE])
            with database.translated(self._db.database), self._db.engine.connect() as connection:
                wrong = {tuple(row) for row in connection.execute(lies.where(table.c.workload.in_(some)))}
                found = connection.execute(good.where(table.c.workload.in_(some)))
                for workload, board_type, point, candidate, trial in found:
                    task = (workload, board_type, point)
                    if (*task, candidate) not in seen and (workload, candidate) not in wrong:
                        seen.add((*task, candidate))
                        tasks.setdefault(task, []).append(trial)
        return tasks


def to_row(trial: Trial, recorded_at: float) -> dict[str, Any]:
    """A trial as a row of `trials`."""
    outcome = trial.outcome
    side = outcome.status.fault_side
    return {name: getattr(trial, name) for name in _OWN} | {
        "counted": 1 if trial.counts else None,
        "status": str(outcome.status),
        "fault_side": None if side is None else str(side),
        "board": outcome.board or None,
        "simulated": outcome.simulated,
        "recorded_at": recorded_at,
        "outcome": outcome.to_dict(),
    }


def _require_type(connection: sa.Connection, trial: Trial) -> str:
    table = schema.campaigns
    board_type = connection.execute(sa.select(table.c.board_type).where(table.c.id == trial.campaign)).scalar()
    if board_type == "":
        raise InternalError(f"a trial of campaign {trial.campaign} does not say on which of its board types it ran")
    return board_type or ""  # an unknown campaign: the foreign key reports it


def _candidate_key() -> tuple[sa.Column[Any], ...]:
    table = schema.trials
    return (table.c.board_type, table.c.workload, table.c.operating_point, table.c.candidate)


def _never_counted(campaign: int) -> tuple[sa.ColumnElement[bool], ...]:
    """Trials of a campaign's search whose candidate has no counted one: few, found by two indexes."""
    table, other = schema.trials, schema.trials.alias()
    same = [other.c[column.name] == column for column in (table.c.campaign, *_candidate_key())]
    # Sides that cannot count (`Trial.counts`).
    faults = [str(side) for side in FaultSide if side is not FaultSide.CANDIDATE]
    uncounted = table.c.fault_side.in_(faults) | (table.c.status == str(Status.WRONG_RESULT))
    return (
        table.c.campaign == campaign,
        table.c.purpose == SEARCH_TRIAL,
        uncounted,
        ~sa.exists().where(*same, other.c.counted.is_not(None)),
    )


def _choose(trials: Sequence[int], share: int) -> list[int]:
    """At most `share` of a list sorted best first: the best half of the share, the rest evenly spaced."""
    if len(trials) <= share:
        return list(trials)
    best = (share + 1) // 2
    rest, more = trials[best:], share - best
    # The last step ends at the worst, which shows what bad looks like.
    return [*trials[:best], *(rest[(step + 1) * len(rest) // more - 1] for step in range(more))]


def _require_same(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise InternalError where a row is neither stored nor excluded by one that is: another index refused it."""
    table = schema.trials
    for row in rows:
        candidate = sa.and_(*(table.c[name] == row[name] for name in _CANDIDATE))
        same = sa.and_(table.c.purpose == row["purpose"], table.c.attempt == row["attempt"])
        other = sa.and_(table.c.counted.is_not(None), sa.literal(row["counted"] is not None))
        if connection.scalar(sa.select(sa.func.count()).where(candidate, sa.or_(same, other))) == 0:
            raise InternalError(
                f"a trial of candidate {row['candidate']} is not stored: the store has a rule that is none of a farm's",
                "`farm store check` names it.",
            )
