"""The farm's user keys for boards: from private files, and from the running agent."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import paramiko
from paramiko.pkey import UnknownKeyType

from farm.errors import UsageError

_MAX_BYTES = 1 << 16
# sshd allows six attempts (MaxAuthTries), refused keys included.
MOST_KEYS = 5
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
