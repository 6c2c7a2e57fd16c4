"""The private key that the farm shows to boards: read from a file that only its owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import paramiko
from paramiko.pkey import UnknownKeyType

from farm.errors import UsageError

_MAX_BYTES = 1 << 16


def load_user_key(path: Path) -> paramiko.PKey:
    """The key in `path`, in any format that ssh-keygen writes. Raises UsageError naming the file and the way out.

    The permissions are those that OpenSSH's own client asks for: nobody but the owner, who is us or root.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"the SSH key {path} is not a file")
            if status.st_mode & 0o077:
                raise UsageError(
                    f"the SSH key {path} may be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
                    f"chmod 600 {path}",
                )
            if status.st_uid not in {os.geteuid(), 0}:
                raise UsageError(f"the SSH key {path} belongs to another user (uid {status.st_uid})")
            text = file.read(_MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"the SSH key {path} cannot be read: {error.strerror}",
            "Make one with ssh-keygen -t ed25519 -N '' -f FILE, and give the board its .pub with ssh-copy-id.",
        ) from error
    try:
        return paramiko.PKey.from_path(path)
    except paramiko.PasswordRequiredException:
        raise _encrypted(path) from None
    except (paramiko.SSHException, ValueError, TypeError, OSError, UnknownKeyType) as error:
        # cryptography says of an encrypted key that no password was given.
        if "password" in str(error).lower() or b"ENCRYPTED" in text:
            raise _encrypted(path) from None
        hint = "This is the public half; name the file without .pub." if text.startswith((b"ssh-", b"ecdsa-")) else ""
        raise UsageError(f"{path} holds no private SSH key that can be used here: {error}", hint) from None


def _encrypted(path: Path) -> UsageError:
    return UsageError(
        f"the SSH key {path} has a passphrase, and nobody is there to type it",
        "Give the farm a key of its own without one: ssh-keygen -t ed25519 -N '' -f FILE.",
    )
