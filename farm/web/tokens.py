"""Named tokens of people and scripts, each with a role. FARM_HOME keeps their digests.

The farm's own token, which `farm web token` prints, is in `access`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from device_agent.protocol import NAME_RULE, StrEnum, is_name
from farm import folders
from farm.errors import UnavailableError, UsageError

FILE = "web-tokens.json"
_BYTES = 24
MOST = 1000


class Role(StrEnum):
    """What a token's owner may do; each role includes those before it."""

    READER = "reader"  # read, where that needs a token
    USER = "user"  # order campaigns of the same name, reserve boards
    OPERATOR = "operator"  # order boards, and every user's campaigns

    def covers(self, other: Role) -> bool:
        """Return whether this role includes another."""
        roles = list(Role)
        return roles.index(self) >= roles.index(other)


@dataclasses.dataclass(frozen=True)
class Person:
    """The person behind a request."""

    name: str
    role: Role


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named token; `created_at` in seconds since the epoch, `by` who made it."""

    name: str
    role: Role
    digest: str
    created_at: float
    by: str

    @property
    def person(self) -> Person:
        """Return the entry's person."""
        return Person(self.name, self.role)


def read_entries(home: Path) -> tuple[Entry, ...]:
    """Return all entries by name. Raises UnavailableError where the file is not ours or cannot be read."""
    path = home / FILE
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return tuple(sorted((Entry(**(row | {"role": Role(row["role"])})) for row in rows), key=lambda each: each.name))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnavailableError(f"{path} cannot be read: {error}", "Named tokens are refused meanwhile.") from error


def find_by_token(home: Path, token: str) -> Entry | None:
    """Return a token's entry. Compares with all, so that its duration reveals nothing."""
    given, found = _digest(token), None
    for entry in read_entries(home):
        if hmac.compare_digest(entry.digest.encode(), given.encode()):
            found = entry
    return found


def add(home: Path, name: str, role: Role, by: str) -> str:
    """Make a person's token, in place of an older one of the name; return it, which is possible once.

    Raises UsageError for what is no name, UnavailableError where it cannot be kept.
    """
    if not is_name(name):
        raise UsageError(f"{name!r} cannot be a token's name", f"A name is {NAME_RULE}.")
    token = secrets.token_urlsafe(_BYTES)
    with _changing(home) as entries:
        entries.pop(name, None)
        if len(entries) >= MOST:
            raise UsageError(f"there are {MOST} tokens already", "`farm web token remove NAME` ends one.")
        entries[name] = Entry(name, role, _digest(token), time.time(), by)
    return token


def remove(home: Path, name: str) -> None:
    """End a person's token and sessions. Raises UsageError where there is none, UnavailableError."""
    with _changing(home) as entries:
        if entries.pop(name, None) is None:
            raise UsageError(f"there is no token of {name!r}", "`farm web token list` shows those there are.")


@contextlib.contextmanager
def _changing(home: Path) -> Iterator[dict[str, Entry]]:
    """Lend the entries for a change, and keep them when the block ends well. Two commands wait for each other."""
    path = home / FILE
    try:
        folders.require_private(home)
        with folders.open_private(home / f".{FILE}.lock", os.O_WRONLY, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = {entry.name: entry for entry in read_entries(home)}
            yield entries
            rows: list[dict[str, Any]] = [
                dataclasses.asdict(entry) | {"role": str(entry.role)} for entry in entries.values()
            ]
            folders.write_private(path, json.dumps(rows, indent=2))
    except OSError as error:
        raise UnavailableError(f"tokens cannot be kept in {path}: {error.strerror}") from error


def _digest(token: str) -> str:
    # 24 random bytes cannot be guessed, so a slow hash would add nothing.
    return hashlib.sha256(token.encode()).hexdigest()
