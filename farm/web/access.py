"""Who may read and who may change: the token, where requests may come from, and what a browser may do with a page.

Reading on this machine needs nothing. Changing needs a token (the farm's own, or a named one of a role that is enough,
of which FARM_HOME keeps the digest): in a header, or as the strict same-site cookie that `/sign-in` sets, and then only
from a page of ours. A name that is not this server's is refused, so that no page elsewhere reaches the farm under a
name of its own (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from device_agent.protocol import NAME_RULE, StrEnum, is_name
from farm import folders, foreign
from farm.errors import FarmError, TransientError, UnavailableError, UsageError
from farm.processes.machine import name_user

MEDIA_TYPE = "application/problem+json"
# The longest text that a reply repeats.
_LONGEST = 600
COOKIE = "farm_session"
TOKEN_FILE = "web.token"  # noqa: S105 - a file's name
_BYTES = 24
# RFC 9110, 7.2: a name or an address, in brackets where it has colons, and a port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
_HOW = "Scripts send it: Authorization: Bearer TOKEN, as `farm web token` prints it. In a browser, sign in."
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Only our own files, no framing, no inline code or style.
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
FILE = "web-json"
MOST = 1000


class Refused(Exception):
    """A request that is refused; `hint` says what can be done."""

    def __init__(self, status: int, detail: str, hint: str = "") -> None:
        super().__init__(status, detail, hint)
        self.problem = ProblemDetails(status, detail, hint)


@dataclasses.dataclass(frozen=True)
class ProblemDetails:
    """The answer to a request that failed."""

    status: int
    detail: str
    hint: str = ""

    @property
    def title(self) -> str:
        """Return the status in words."""
        return HTTPStatus(self.status).phrase

    def to_document(self) -> dict[str, Any]:
        """Return the document of RFC 9457; `hint` is an extension."""
        about = {"type": "about:blank", "title": self.title, "status": self.status}
        return about | {"detail": shorten(self.detail), "hint": shorten(self.hint)}


def shorten(text: str) -> str:
    """Make a text fit for a reply: controls are shown, and its length is limited."""
    text = foreign.show_controls(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def from_error(error: FarmError) -> ProblemDetails:
    """Return the problem for an error of the farm."""
    if isinstance(error, UsageError):
        status = 404 if error.message.startswith(("there is no ", "no workload is called")) else 422
    elif isinstance(error, TransientError | UnavailableError):
        status = 503
    else:
        status = 500
    return ProblemDetails(status, error.message, error.hint)


def read_token(home: Path, *, renew: bool = False) -> str:
    """Return the token of this FARM_HOME; make it where there is none, or anew. Raises UnavailableError."""
    path = home / TOKEN_FILE
    try:
        if not renew:
            with contextlib.suppress(FileNotFoundError):
                if text := path.read_text().strip():
                    return text
        folders.require_private(home)
        token = secrets.token_urlsafe(_BYTES)
        folders.write_private(path, token + "\n")
    except OSError as error:
        raise UnavailableError(f"the token cannot be kept in {path}: {error.strerror}") from error
    return token


class Access:
    """The rules of one server. It answers to `names`, to addresses and to `localhost`."""

    def __init__(self, home: Path, *, private: bool, secure: bool, names: Collection[str] = ()) -> None:
        """`private`: only this machine reaches it, so that reading is free. `secure`: over TLS."""
        self._home, self.private, self.secure = home, private, secure
        self._names = {"localhost", *(name.lower() for name in names)}

    def check_host(self, host: str) -> None:
        """Refuse a name that is not ours."""
        match = _HOST.fullmatch(host)
        name = (match[1] or match[2]).lower() if match else ""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return
        if name not in self._names:
            raise Refused(421, "this server does not answer to that name", "farm web --name NAME has it do so.")

    def find_person(self, headers: Mapping[str, str], cookie: str) -> Person | None:
        """Return who asks, by a token in a header or else by the cookie; None for a foreign client."""
        given = headers.get("authorization")
        return self._find_by_token(given) if given is not None else self._find_by_session(cookie)

    def check_change(self, headers: Mapping[str, str], cookie: str, path: str) -> Person:
        """Return who changes a path. Refuses no token, a wrong one, too low a role, and requests that another
        site's page sends.
        """
        if "authorization" in headers:
            person = self.find_person(headers, cookie)
            if person is None:
                raise Refused(401, "the token is wrong", "`farm web token` on the farm's machine prints it.")
        else:
            if not cookie:
                raise Refused(401, "changing anything needs the token", _HOW)
            self.check_origin(headers)
            person = self.find_person(headers, cookie)
            if person is None:
                raise Refused(401, "the token has changed since you signed in", "`farm web token` prints it.")
        needed = find_role(path)
        if not person.role.covers(needed):
            raise Refused(
                403,
                f"{person.name} is a {person.role}; this needs the role {needed}",
                f"`farm web token {person.name} --role {needed}` on the farm's machine gives it.",
            )
        return person

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse a request that a page of another origin sent."""
        origin, host = headers.get("origin"), headers.get("host", "")
        site = headers.get("sec-fetch-site")
        ours = f"{'https' if self.secure else 'http'}://{host}"
        if origin is None and site is None:  # a browser sends at least one of them with every POST
            raise Refused(403, "a cookie counts only from a browser, which says what page it shows", _HOW)
        if origin not in (None, ours) or site not in (None, "same-origin", "none"):
            raise Refused(403, "this came from a page of another site", "Send the token in a header instead.")

    def open_session(self, token: str) -> str:
        """Return the cookie for the holder of a token. Refuses a wrong one."""
        entry = None if self._is_own(token) else find_by_token(self._home, token)
        if entry is None and not self._is_own(token):
            raise Refused(401, "the token is wrong", "`farm web token` on the farm's machine prints it.")
        return self._session(entry)

    def _find_by_token(self, given: str) -> Person | None:
        kind, _, token = given.partition(" ")
        if kind.lower() != "bearer":
            return None
        if self._is_own(token.strip()):
            return _owner()
        entry = find_by_token(self._home, token.strip())
        return entry.person if entry else None

    def _find_by_session(self, cookie: str) -> Person | None:
        if not cookie:
            return None
        name, dot, _ = cookie.rpartition(".")
        entry = next((each for each in read_entries(self._home) if each.name == name), None) if dot else None
        if dot and entry is None:
            return None
        if not hmac.compare_digest(cookie.encode(), self._session(entry).encode()):
            return None
        return entry.person if entry else _owner()

    def _is_own(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), read_token(self._home).encode())

    def _session(self, entry: Entry | None) -> str:
        """Derive the cookie from the token, one way: a new token ends every session."""
        key = entry.digest if entry else read_token(self._home)
        code = hmac.new(key.encode(), b"tvm-farm web session", hashlib.sha256).hexdigest()
        return f"{entry.name}.{code}" if entry else code


def find_role(path: str) -> Role:
    """Return the least role that may change something at a path. `orders` checks the owner."""
    parts = path.removeprefix("/api/v1").strip("/").split("/")
    if parts == ["sign-out"]:
        return Role.READER
    return Role.USER if parts[0] == "campaigns" or parts[2:] == ["reservation"] else Role.OPERATOR


def _owner() -> Person:
    """Return the holder of the farm's own token: the user that runs it."""
    return Person(name_user(), Role.OPERATOR)


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
