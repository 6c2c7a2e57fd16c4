"""The farm's store kept safe: copied while everything runs, put back while nothing does, looked over."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from farm.campaign.engine.state import engine_lock
from farm.connectivity.services_state import services_lock
from farm.errors import PermanentError, TransientError, UnavailableError, UsageError
from farm.processes.machine import machine_lock
from farm.search import proof
from farm.settings import STORE_FILE, Settings, StoreLocation
from farm.store import Store, database, soundness, sqlite

SCHEMA = database.HEAD
# What was there before the last restore.
REPLACED_FILE = "farm.db.replaced"
# Their modules take some 20 to 200 KB each.
_WORKLOADS_AT_ONCE = 200
_BACKUP_HINT = "Give a file that `farm backup` wrote."


def back_up(home: Path, target: Path, replace: bool = False) -> None:
    """Copy the store of a FARM_HOME into one file, as it stands at a moment; running processes go on.

    The copy has been read back and found whole. Raises UsageError where there is no store, or `target` exists and is
    not to be replaced; UnavailableError where it cannot be written; PermanentError where the store is damaged.
    """
    store = home / STORE_FILE
    if not store.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    if target.exists() and target.samefile(store):
        raise UsageError(f"{target} is the store itself", "Name another file.")
    if target.exists() and not replace:
        raise UsageError(f"{target} exists already", "Name another file, or replace it with --force.")
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise UsageError(f"{target} is not a file in a folder that exists")
    with _translated(f"the store cannot be copied to {target}"):
        part = target.with_name(f".{target.name}.checked-{os.getpid()}")
        try:
            sqlite.copy_store(store, part)
            if problems := soundness.find_damage(part):
                raise PermanentError(
                    f"the store {store} is damaged: {problems[0]}",
                    "`farm db check` says more. A damaged copy is not kept; restore an earlier one.",
                )
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def put_back(home: Path, source: Path) -> None:
    """Make a backup the store of a FARM_HOME; the store that was there stays beside it as `REPLACED_FILE`.

    Either all of it happens or nothing. Raises UsageError where `source` is no backup of a store, PermanentError where
    it is damaged, UnavailableError where it is of a newer farm or cannot be read or written, and where the services,
    the engine of campaigns or a measuring command runs; TransientError where another command uses the store just now.
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
            for kept in home.glob(f"{part.name}.*"):  # the copy that its migration made
                kept.unlink(missing_ok=True)


@contextlib.contextmanager
def reading_other(source: Path) -> Iterator[Store]:
    """Another farm's store to read for the block: a copy of it, found whole; nothing is written where it lies.

    Raises UsageError where it is no store, PermanentError where it is damaged, UnavailableError where it is of a newer
    farm or cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tvm-farm-store-") as folder:
        part = Path(folder) / STORE_FILE
        with _translated(f"the store {source} cannot be read"):
            _prepare(source, part, "Its farm's `farm db check` says more.")
        with Store(part) as store:
            yield store


def shrink(home: Path) -> None:
    """Give free room in the store of a FARM_HOME back to the disk; its size is needed once more meanwhile.

    Raises UsageError where there is none, UnavailableError where something of the farm runs or the disk is full;
    TransientError where another command uses the store just now.
    """
    store = home / STORE_FILE
    if not store.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    with _nothing_running(home), _translated(f"the store {store} cannot be made smaller"):
        _close_down(store)
        with contextlib.closing(sqlite3.connect(store, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("VACUUM")


def check(home: Path) -> list[str]:
    """What is wrong with the store of a FARM_HOME, in words; empty where nothing is.

    Raises UsageError where there is none, UnavailableError where it is none of ours or cannot be read.
    """
    path = home / STORE_FILE
    if not path.is_file():
        raise UsageError(f"there is no store in {home} yet", "Nothing has been measured or registered there.")
    with _translated(f"the store {path} cannot be read"):
        if problems := soundness.find_damage(path):
            return problems
        Store(path).close()  # of an older schema: migrated, as by any command
        problems = soundness.find_problems(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o007:
            problems.append(f"other users may read {path}: chmod o-rwx {path}")
        return problems


def check_any(settings: Settings) -> list[str]:
    """What is wrong with the farm's store, wherever it is; see `check` and `soundness.find_server_problems`."""
    if isinstance(location := settings.store_location, str):
        return soundness.find_server_problems(location)
    return check(settings.home_path)


def find_impostors(settings: Settings, say: Callable[[int, int], None]) -> dict[str, str]:
    """What is wrong with workloads whose module is not the function that their hash says, by hash; "name: what".

    `say` receives how many of how many were checked. Records of such a workload are those of another function.
    """
    with Store(settings.store_location) as store:
        hashes = store.fetch_workload_hashes()
        found: dict[str, str] = {}
        for first in range(0, len(hashes), _WORKLOADS_AT_ONCE):
            rows = store.fetch_workload_rows(hashes[first : first + _WORKLOADS_AT_ONCE])
            wrong = proof.find_impostors(list(rows.values()))
            found |= {key: f"{rows[key]['name']}: {problem}" for key, problem in wrong.items()}
            say(min(first + _WORKLOADS_AT_ONCE, len(hashes)), len(hashes))
        return found


def upgrade(location: StoreLocation) -> str | None:
    """Make a store, or bring it to `SCHEMA`; returns what it had, None for nothing. Raises what `Store` does.

    No process may use it: one that did gets errors at best.
    """
    opened = database.connect(location)
    try:
        return database.migrate(opened)
    finally:
        opened.close()


@contextlib.contextmanager
def _nothing_running(home: Path) -> Iterator[None]:
    """Keep services, the engine and measuring commands from starting; raises UnavailableError where one runs."""
    with contextlib.ExitStack() as stack:
        for lock, hint in (
            (services_lock(home), "End them first: farm down"),
            (engine_lock(home), "End it first: farm down --force"),
        ):
            try:
                stack.enter_context(lock)
            except UnavailableError as error:
                raise UnavailableError(f"the store is in use: {error.message}", hint) from error
        stack.enter_context(machine_lock())
        yield


def _prepare(source: Path, part: Path, hint: str = "Give an earlier backup.") -> None:
    """Copy a store that others may have made to `part`, and bring it to the current schema there.

    Nothing of it is run before its objects are found to be a farm's; what is wrong with it shows now.
    """
    try:
        sqlite.copy_others_store(source, part)
        damage = soundness.find_damage(part)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # no room, no permission: nothing is said of the file
            raise
        raise UsageError(f"{source} is no store: {error}", _BACKUP_HINT) from error
    if damage:
        raise PermanentError(f"{source} is damaged: {damage[0]}", hint)
    with contextlib.closing(sqlite3.connect(part)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
            raise UsageError(f"{source} is no store of a farm", _BACKUP_HINT)
    Store(part).close()
    if problems := soundness.find_problems(part):
        raise PermanentError(f"{source} is no whole store: {problems[0]}", hint)
    with contextlib.closing(sqlite3.connect(part)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")  # one file, so that one step puts it in place


def _close_down(store: Path) -> int:
    """Bring a store into one file, which works only while no process uses it; return its greatest lease token.

    One that is too damaged for that stays as it is. Raises TransientError where another command uses it, sqlite3.Error.
    """
    if not store.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(store, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchone()
            row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'leases'").fetchone()
            # A counter that is used up must not outlive the store that it spoilt; boards report the tokens they know.
            return int(row[0]) if row and soundness.is_token(row[0]) else 0
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise TransientError(
                f"another command uses the store {store} just now", "Try again when it has ended."
            ) from error
        if "no such table" not in str(error):
            raise
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # damaged: why it is being replaced
        pass
    return 0


def _keep(store: Path, replaced: Path) -> None:
    """Keep a store under another name too, and what lies beside a damaged one: it must not meet the new file."""
    if not store.exists():
        return
    replaced.unlink(missing_ok=True)
    os.link(store, replaced)
    for suffix in ("-wal", "-shm"):
        beside = store.with_name(store.name + suffix)
        if beside.exists():
            beside.replace(replaced.with_name(replaced.name + suffix))


def _raise_token(part: Path, greatest: int) -> None:
    """Have the restored store give greater tokens than the one before it: boards know those."""
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
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter in what SQLite says of a damaged file
        raise UnavailableError(f"{what}: {error}", "Is the disk full, or the file damaged?") from error
    except OSError as error:
        text = error.strerror or str(error)
        raise UnavailableError(f"{what}: {text}", "Is there room, and may you write there?") from error
