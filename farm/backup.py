"""Back up the farm's store while it is in use, restore it while it is not, and check it."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from farm.campaign.engine.state import ENGINE
from farm.connectivity.services import SERVICES
from farm.errors import PermanentError, TransientError, UnavailableError, UsageError
from farm.processes.machine import machine_lock
from farm.report import results
from farm.search import traces
from farm.settings import STORE_FILE, Settings, StoreLocation
from farm.store import Store, soundness, sqlite
from farm.sweep import stored

# The store before the last restore.
REPLACED_FILE = "farm.db.replaced"
# Their modules take some 20 to 200 KB each.
_WORKLOADS_AT_ONCE = 200
_BACKUP_HINT = "Give a file that `farm store backup` wrote."


def back_up(home: Path, target: Path) -> None:
    """Copy the store of a FARM_HOME into one file, as of one moment, while the farm runs.

    The copy is verified. Raises UsageError without a store, or if `target` exists;
    UnavailableError if it cannot be written; PermanentError for a damaged store.
    """
    store = home / STORE_FILE
    if not store.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    if target.exists() and target.samefile(store):
        raise UsageError(f"{target} is the store itself", "Name another file.")
    if target.exists():
        raise UsageError(f"{target} exists already", "Name another file, or remove it first.")
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise UsageError(f"{target} is not a file in a folder that exists")
    with _translated(f"the store cannot be copied to {target}"):
        part = target.with_name(f".{target.name}.checked-{os.getpid()}")
        try:
            sqlite.copy_store(store, part)
            if problems := soundness.find_damage(part):
                raise PermanentError(
                    f"the store {store} is damaged: {problems[0]}",
                    "`farm store check` says more. A damaged copy is not kept; restore an earlier one.",
                )
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def put_back(home: Path, source: Path) -> None:
    """Restore a backup as the store of a FARM_HOME; the previous store stays beside it as `REPLACED_FILE`.

    All or nothing. Raises UsageError if `source` is no backup, PermanentError if it is damaged, UnavailableError if it
    is of a newer farm, unreadable or not writable, or while services, the campaigns' engine or a measuring command
    runs; TransientError while another command uses the store.
    """
    if not source.is_file():
        raise UsageError(f"there is no file {source}", _BACKUP_HINT)
    store = home / STORE_FILE
    if store.exists() and source.samefile(store):
        raise UsageError(f"{source} is the store itself", _BACKUP_HINT)
    with _nothing_running(home), _translated(f"{source} cannot be put back"):
        part = home / f".{STORE_FILE}.restored-{os.getpid()}"
        try:
            _prepare(source, part)
            _raise_token(part, _close_down(store))
            _keep(store, home / REPLACED_FILE)
            part.replace(store)
        finally:
            for suffix in ("", "-journal", "-wal", "-shm"):
                part.with_name(part.name + suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def reading_other(source: Path) -> Iterator[Store]:
    """Read another farm's store for the block, through a verified copy; nothing is written beside it.

    Raises UsageError if it is no store, PermanentError if it is damaged, UnavailableError if it is of a newer farm or
    unreadable.
    """
    with tempfile.TemporaryDirectory(prefix="tvm-farm-store-") as folder:
        part = Path(folder) / STORE_FILE
        with _translated(f"the store {source} cannot be read"):
            _prepare(source, part, "Its farm's `farm store check` says more.")
        with Store(part) as store:
            yield store


def shrink(home: Path) -> None:
    """Return free space in the store of a FARM_HOME to the disk; needs its size once more meanwhile.

    Raises UsageError without a store, UnavailableError while the farm runs or if the disk is full; TransientError while
    another command uses the store.
    """
    store = home / STORE_FILE
    if not store.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    with _nothing_running(home), _translated(f"the store {store} cannot be made smaller"):
        _close_down(store)
        with contextlib.closing(sqlite3.connect(store, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("VACUUM")


def check(home: Path) -> list[str]:
    """Describe what is wrong with the store of a FARM_HOME; empty if nothing is.

    Raises UsageError without a store, UnavailableError if it is foreign or unreadable.
    """
    path = home / STORE_FILE
    if not path.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    with _translated(f"the store {path} cannot be read"):
        if problems := soundness.find_damage(path):
            return problems
        Store(path).close()
        problems = soundness.find_problems(path) or _find_unreadable(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o007:
            problems.append(f"other users may read {path}: chmod o-rwx {path}")
        return problems


def check_any(settings: Settings) -> list[str]:
    """Check the farm's store of either kind; see `check` and `soundness.find_server_problems`."""
    if isinstance(location := settings.store_location, str):
        return soundness.find_server_problems(location) or _find_unreadable(location)
    return check(settings.home_path)


def _find_unreadable(location: StoreLocation) -> list[str]:
    """Describe rows that the readers of commands and pages refuse."""
    logging.getLogger("farm.store.session").setLevel(logging.ERROR)  # the result says it
    with Store(location) as store:
        each, sweeps = store.session.read_each, store.sweeps.fetch()
        store.boards.fetch()
        store.campaigns.fetch()
        store.imports.fetch_bundle(store.records.fetch(simulated=None))
        each("the sweep", sweeps, lambda sweep: (stored.summarise(sweep), stored.grid_from_dict(sweep.grid)))
        each("the goal of sweep", sweeps, lambda sweep: stored.goal_from_dict(sweep.goal))
        each("the visits of sweep", sweeps, lambda sweep: stored.read_visits(store.sweeps.fetch_points(sweep.id)))
        each("the result", store.results.fetch(limit=store.results.count()), results.read_figures)
        return [*store.session.unreadable][: soundness.MOST_PROBLEMS]


def find_mismatched(settings: Settings, say: Callable[[int, int], None]) -> dict[str, str]:
    """Workloads whose module does not match their hash, by hash; "name: problem". Their records belong to another
    function.

    `say` gets the number checked so far, and the total.
    """
    with Store(settings.store_location) as store:
        hashes = sorted(key for key, _ in store.workloads.fetch_names())
        found: dict[str, str] = {}
        for first in range(0, len(hashes), _WORKLOADS_AT_ONCE):
            rows = store.workloads.fetch_by_hash(hashes[first : first + _WORKLOADS_AT_ONCE])
            wrong = traces.find_mismatched(list(rows.values()))
            found |= {key: f"{rows[key].name}: {problem}" for key, problem in wrong.items()}
            say(min(first + _WORKLOADS_AT_ONCE, len(hashes)), len(hashes))
        return found


@contextlib.contextmanager
def _nothing_running(home: Path) -> Iterator[None]:
    """Keep services, the engine and measuring commands from starting. Raises UnavailableError if one runs."""
    with contextlib.ExitStack() as stack:
        for lock, hint in (
            (SERVICES.hold(home), "End them first: farm down"),
            (ENGINE.hold(home), "End it first: farm down --force"),
        ):
            try:
                stack.enter_context(lock)
            except UnavailableError as error:
                raise UnavailableError(f"the store is in use: {error.message}", hint) from error
        stack.enter_context(machine_lock())
        yield


def _prepare(source: Path, part: Path, hint: str = "Give an earlier backup.") -> None:
    """Copy a foreign store to `part`. Its objects are verified before SQLite runs any of them."""
    try:
        sqlite.copy_others_store(source, part)
        damage = soundness.find_damage(part)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # no space, no permission: says nothing about the file
            raise
        raise UsageError(f"{source} is no store: {error}", _BACKUP_HINT) from error
    if damage:
        raise PermanentError(f"{source} is damaged: {damage[0]}", hint)
    with contextlib.closing(sqlite3.connect(part)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
            raise UsageError(f"{source} is no store of a farm", _BACKUP_HINT)
    Store(part).close()
    if problems := soundness.find_problems(part) or _find_unreadable(part):
        raise PermanentError(f"{source} is no whole store: {problems[0]}", hint)
    with contextlib.closing(sqlite3.connect(part)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")  # one file, so that one rename puts it in place


def _close_down(store: Path) -> int:
    """Bring a store into one file, which works only while no process uses it; return its greatest lease token.

    A store too damaged for that stays as it is. Raises TransientError while another command uses it, sqlite3.Error.
    """
    if not store.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(store, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchone()
            row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'leases'").fetchone()
            # An exhausted counter must not outlive its damaged store; boards report the tokens that they know.
            return int(row[0]) if row and soundness.is_token(row[0]) else 0
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise TransientError(
                f"another command uses the store {store} just now", "Try again when it has ended."
            ) from error
        if "no such table" not in str(error):
            raise
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # damaged: the reason for the restore
        pass
    return 0


def _keep(store: Path, replaced: Path) -> None:
    """Keep a store under another name too, with the side files of a damaged one, which must not meet the new file."""
    if not store.exists():
        return
    replaced.unlink(missing_ok=True)
    os.link(store, replaced)
    for suffix in ("-wal", "-shm"):
        beside = store.with_name(store.name + suffix)
        if beside.exists():
            beside.replace(replaced.with_name(replaced.name + suffix))


def _raise_token(part: Path, greatest: int) -> None:
    """Make the restored store issue greater tokens than its predecessor, whose tokens boards know."""
    with contextlib.closing(sqlite3.connect(part)) as connection, connection:
        row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'leases'").fetchone()
        if row is None:
            connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('leases', ?)", (greatest,))
        elif row[0] < greatest:
            connection.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'leases'", (greatest,))


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from SQLite's message about a damaged file
        raise UnavailableError(f"{what}: {error}", "Is the disk full, or the file damaged?") from error
    except OSError as error:
        text = error.strerror or str(error)
        raise UnavailableError(f"{what}: {text}", "Is there room, and may you write there?") from error
