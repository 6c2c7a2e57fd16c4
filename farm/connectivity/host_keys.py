"""Host keys of boards: fingerprints, the farm's own known-hosts file, errors for a mismatch; and the user's own keys.

The caller asks a person about a new key. Connects to nothing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import paramiko
from paramiko.pkey import UnknownKeyType

from farm import folders
from farm.errors import PermanentError, UsageError

FILE_NAME = "known_hosts"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%:-]*")
_MAX_BYTES = 1 << 16
# sshd allows six attempts (MaxAuthTries), refused keys included.
MOST_KEYS = 5


class HostKeyError(PermanentError):
    """A board's host key is not the pinned one. Never connected to: another machine may have its address."""


class UnknownHostKeyError(HostKeyError):
    """First contact: no key is pinned for this board. `key` is the one shown, for a person to confirm."""

    def __init__(self, message: str, hint: str = "", key: HostKey | None = None) -> None:
        super().__init__(message, hint)
        self.key = key


@dataclasses.dataclass(frozen=True)
class HostKey:
    """A public host key: its SSH type, and its wire encoding (RFC 4253, section 6.6)."""

    kind: str
    blob: bytes = dataclasses.field(repr=False)

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it: `SHA256:` and 43 characters of base64."""
        return fingerprint(self.blob)

    @classmethod
    def from_text(cls, text: str) -> HostKey:
        """Parse `ssh-ed25519 AAAA…`, as in a `.pub` file. Raises ValueError."""
        kind, _, rest = text.strip().partition(" ")
        encoded = rest.split(" ")[0]
        try:
            blob = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise ValueError("the key is not base64") from None
        # The encoding begins with the type's length and the type.
        name = kind.encode()
        if not name or blob[: 4 + len(name)] != len(name).to_bytes(4, "big") + name:
            raise ValueError(f"the key is not one of type {kind!r}")
        return cls(kind, blob)

    def to_text(self) -> str:
        """The inverse of `from_text`."""
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"


def fingerprint(blob: bytes) -> str:
    """The SHA-256 fingerprint of a key's wire encoding, as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def require_fingerprint(text: str) -> str:
    """Normalise a fingerprint to OpenSSH's spelling. Raises UsageError."""
    if not _FINGERPRINT.fullmatch(text):
        raise UsageError(
            f"{text!r} is no fingerprint of a host key",
            "On the board: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints one, SHA256: and 43 characters.",
        )
    return text.rstrip("=")


def unknown(where: str, shown: HostKey) -> UnknownHostKeyError:
    """The error for a board without a pinned key."""
    return UnknownHostKeyError(
        f"no host key is pinned for {where}; it shows {shown.fingerprint} ({shown.kind})",
        "Compare with what ssh-keygen -lf prints on the board itself, then confirm it or name it in the inventory.",
        shown,
    )


def changed(where: str, shown: list[HostKey], pinned: list[str]) -> HostKeyError:
    """The error for a board whose keys are not the pinned ones. Names both."""
    seen = ", ".join(f"{key.fingerprint} ({key.kind})" for key in shown)
    return HostKeyError(
        f"THE HOST KEY OF {where} HAS CHANGED: pinned is {', '.join(pinned)}, it shows {seen}",
        "Either the board was installed anew, or something else answers at its address. Nothing was sent to it. "
        "If you know why the key changed, remove the old pin and confirm the new key.",
    )


class KnownHosts:
    """The farm's known-hosts file, in OpenSSH's format with plain names. Safe for concurrent processes."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist; the first key creates it."""
        self.path = path

    def find(self, host: str, port: int) -> tuple[HostKey, ...]:
        """The keys pinned for an address. Raises UsageError for an unreadable or invalid file."""
        name = _name(host, port)
        return tuple(key for names, key in self._entries() if name in names)

    def add(self, host: str, port: int, key: HostKey) -> None:
        """Pin a key beside those that the address already has."""
        if key in self.find(host, port):
            return
        with self._rewriting() as lines:
            lines.append(f"{_name(host, port)} {key.to_text()}")

    def remove(self, host: str, port: int) -> bool:
        """Remove every key of an address; False if none was pinned."""
        name = _name(host, port)
        if not self.find(host, port):
            return False
        with self._rewriting() as lines:
            lines[:] = [line for line in lines if line.startswith("#") or name not in line.split(" ")[0].split(",")]
        return True

    def _entries(self) -> Iterator[tuple[list[str], HostKey]]:
        for number, line in enumerate(self._read(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            names, _, rest = line.strip().partition(" ")
            try:
                # Markers such as @revoked and hashed names must not be skipped silently.
                if names.startswith(("@", "|")):
                    raise ValueError("markers and hashed names are not taken here")
                yield names.split(","), HostKey.from_text(rest)
            except ValueError as error:
                raise UsageError(
                    f"{self.path}:{number}: {error}", "Correct the line or delete it; the key is asked for again."
                ) from None

    def _read(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the pinned host keys cannot be read: {self.path}: {error}") from error

    @contextlib.contextmanager
    def _rewriting(self) -> Iterator[list[str]]:
        """The lines, to be changed in place; written atomically under a lock."""
        folders.require_private(self.path.parent)
        with folders.open_private(Path(f"{self.path}.lock"), os.O_RDWR, "r+b") as lock:
            # Held for one small write, so waiting needs no deadline.
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = self._read()
            yield lines
            folders.write_private(self.path, "".join(f"{line}\n" for line in lines), durably=True)


def _name(host: str, port: int) -> str:
    """An address in known-hosts spelling: `host`, or `[host]:port` for a port other than 22."""
    if not _HOST.fullmatch(host):
        raise UsageError(f"{host!r} is no host name or address")
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


_environment = threading.Lock()


class UserKey(NamedTuple):
    """A key with its origin, for people."""

    key: paramiko.PKey
    name: str


def load_user_keys(files: Sequence[Path], agent: str = "", only_these: bool = False) -> list[UserKey]:
    """The keys of the files, then those of the agent at socket `agent`, if any; at least one.

    `only_these` restricts the agent's to those whose public half a file has. An unusable file, as one with a
    passphrase, is skipped if there is another key. Raises UsageError without any.
    """
    found: list[UserKey] = []
    error: UsageError | None = None
    for path in files:
        try:
            found.append(UserKey(load_user_key(path), str(path)))
        except UsageError as refusal:
            error = error or refusal
    public = {_read_public(path) for path in files}
    known = {each.key.asbytes() for each in found}
    for key in _ask_agent(agent):
        blob = key.asbytes()
        if blob not in known and (blob in public or not only_these):
            found.append(UserKey(key, f"of the agent {agent}"))
    if not found:
        raise error or UsageError("there is no SSH key to show", "Name one with --key-file or FARM_SSH_KEY.")
    return found


def _ask_agent(path: str) -> list[paramiko.PKey]:
    """The agent's keys; none without an answer."""
    if not path:
        return []
    # paramiko finds it only through the variable.
    before = os.environ.get("SSH_AUTH_SOCK")
    with _environment:
        os.environ["SSH_AUTH_SOCK"] = path
        try:
            return list(paramiko.Agent().get_keys())
        except (paramiko.SSHException, OSError):
            return []
        finally:
            if before is None:
                del os.environ["SSH_AUTH_SOCK"]
            else:
                os.environ["SSH_AUTH_SOCK"] = before


def _read_public(path: Path) -> bytes:
    """The public half in a file, or beside a private key; empty if missing."""
    for each in (path.expanduser(), path.expanduser().with_name(f"{path.name}.pub")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = each.read_bytes()[:_MAX_BYTES]
            if _is_public(text):
                return base64.b64decode(text.split()[1])
    return b""


def needs_agent(path: Path) -> bool:
    """Whether only an agent can sign with the key in `path`: a public half, or a key on a hardware token."""
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(_MAX_BYTES)
    except OSError:
        return False
    return _is_public(text) or bool(_find_token_type(text))


def _is_public(text: bytes) -> bool:
    return text.startswith((b"ssh-", b"ecdsa-", b"sk-"))


def _find_token_type(text: bytes) -> str:
    """The type of a private key on a hardware token, which its file names in clear; else empty."""
    lines = text.replace(b"\r", b"").strip().split(b"\n")
    if not lines[0].startswith(b"-----BEGIN OPENSSH PRIVATE KEY"):
        return ""
    try:
        data = base64.b64decode(b"".join(lines[1:-1]))
    except ValueError:
        return ""
    match = re.search(rb"sk-(?:ssh|ecdsa)-[a-z0-9-]+@openssh\.com", data)
    return match[0].decode() if match else ""


def load_user_key(path: Path) -> paramiko.PKey:
    """Load the key in `path`, in any format of ssh-keygen. Raises UsageError naming the file and the remedy.

    Permissions are as for OpenSSH's own client: only the owner, who is this user or root, may read it.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"the SSH key {path} is not a file")
            text = file.read(_MAX_BYTES)
            if _is_public(text):
                raise UsageError(
                    f"{path} is the public half of a key, and no agent holds the private half",
                    f"Load it into the agent: ssh-add FILE. Or name the file without .pub, as {path.with_suffix('')}.",
                )
            if status.st_mode & 0o077:
                raise UsageError(
                    f"the SSH key {path} may be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
                    f"chmod 600 {path}",
                )
            if status.st_uid not in {os.geteuid(), 0}:
                raise UsageError(f"the SSH key {path} belongs to another user (uid {status.st_uid})")
    except OSError as error:
        raise UsageError(
            f"the SSH key {path} cannot be read: {error.strerror}",
            "Make one with ssh-keygen -t ed25519 -N '' -f FILE, and give the board its .pub with ssh-copy-id.",
        ) from error
    if kind := _find_token_type(text):
        raise UsageError(
            f"the SSH key {path} is on a hardware token ({kind}), and no agent holds it",
            f"The agent can use it: ssh-add {path}. Or give the farm a key of its own in a file.",
        )
    try:
        return paramiko.PKey.from_path(path)
    except paramiko.PasswordRequiredException:
        raise _encrypted(path) from None
    except (paramiko.SSHException, ValueError, TypeError, OSError, UnknownKeyType) as error:
        # cryptography reports an encrypted key as a missing password.
        if "password" in str(error).lower() or b"ENCRYPTED" in text:
            raise _encrypted(path) from None
        raise UsageError(f"{path} holds no private SSH key that can be used here: {error}") from None


def _encrypted(path: Path) -> UsageError:
    return UsageError(
        f"the SSH key {path} has a passphrase, which the farm cannot type",
        "Give the farm a key of its own without one: ssh-keygen -t ed25519 -N '' -f FILE.",
    )
