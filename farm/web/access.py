"""Who may read and who may change: the token, where requests may come from, and what a browser may do with a page.

Reading on this machine needs nothing. Changing needs the token: in a header, or as the strict same-site cookie that
`/sign-in` sets, and then only from a page of ours. A name that is not this server's is refused, so that no page
elsewhere reaches the farm under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from farm.errors import UnavailableError
from farm.web.problems import Refused

COOKIE = "farm_session"
TOKEN_FILE = "web.token"  # noqa: S105 - a file's name
_BYTES = 24
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Nothing but our own files, no frame around us, no code or style within a page.
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def read_token(home: Path, *, renew: bool = False) -> str:
    """The token of this FARM_HOME, made where there is none, or anew. Raises UnavailableError."""
    path = home / TOKEN_FILE
    try:
        if not renew:
            with contextlib.suppress(FileNotFoundError):
                if text := path.read_text().strip():
                    return text
        home.mkdir(parents=True, exist_ok=True)
        token, part = secrets.token_urlsafe(_BYTES), path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(token + "\n")
        part.replace(path)
    except OSError as error:
        raise UnavailableError(f"the token cannot be kept in {path}: {error.strerror}") from error
    return token


class Access:
    """The rules of one server. `names` are those that it answers to besides addresses and `localhost`."""

    def __init__(self, home: Path, *, private: bool, secure: bool, names: Collection[str] = ()) -> None:
        """`private`: only this machine reaches it, so that reading is free. `secure`: over TLS."""
        self._home, self._private = home, private
        self.secure = secure
        self._names = {"localhost", *(name.lower() for name in names)}

    def check_host(self, host: str) -> None:
        """Refuse a name that is not ours."""
        name = urlsplit(f"//{host}").hostname or "" if host.isprintable() else ""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return
        if name not in self._names:
            raise Refused(421, "this server does not answer to that name", "farm web --name NAME has it do so.")

    def may_read(self, headers: Mapping[str, str], cookie: str) -> bool:
        """Whether whoever asks may see what there is."""
        return self._private or self._knows(headers, cookie)

    def may_change(self, headers: Mapping[str, str], cookie: str) -> bool:
        """Whether whoever asks has the token, from wherever."""
        return self._knows(headers, cookie)

    def check_change(self, headers: Mapping[str, str], cookie: str) -> None:
        """Refuse what must not change anything: no token, a wrong one, a page of somebody else's."""
        if (given := headers.get("authorization")) is not None:
            if not self._is_token(given):
                raise Refused(401, "the token is wrong", "`farm web token` on the farm's machine prints it.")
            return
        self.check_origin(headers)
        if not cookie:
            raise Refused(401, "changing anything needs the token", "Sign in, or send it: Authorization: Bearer TOKEN.")
        if not self._is_session(cookie):
            raise Refused(401, "the token has changed since you signed in", "`farm web token` prints it.")

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what a page of another origin had a browser send."""
        origin, host = headers.get("origin"), headers.get("host", "")
        site = headers.get("sec-fetch-site")
        ours = f"{'https' if self.secure else 'http'}://{host}"
        # A browser says at least one of them with every POST; what says none is no browser, and has no cookie.
        if (origin is not None and origin != ours) or site not in (None, "same-origin", "none") or not (origin or site):
            raise Refused(403, "this came from a page of another site", "Send the token in a header instead.")

    def open_session(self, token: str) -> str:
        """The cookie for whoever has the token. Refuses another one."""
        if not self._is_token(f"Bearer {token}"):
            raise Refused(401, "the token is wrong", "`farm web token` on the farm's machine prints it.")
        return self._session()

    def _knows(self, headers: Mapping[str, str], cookie: str) -> bool:
        given = headers.get("authorization")
        return self._is_token(given) if given is not None else self._is_session(cookie)

    def _is_token(self, given: str) -> bool:
        kind, _, token = given.partition(" ")
        wanted = read_token(self._home)
        return kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), wanted.encode())

    def _is_session(self, cookie: str) -> bool:
        return bool(cookie) and hmac.compare_digest(cookie.encode(), self._session().encode())

    def _session(self) -> str:
        """Made of the token, which cannot be found from it: another token ends every session."""
        return hmac.new(read_token(self._home).encode(), b"tvm-farm web session", hashlib.sha256).hexdigest()
