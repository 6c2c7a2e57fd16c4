"""File transfer by SFTP: verified by SHA-256, atomic, and skipped if the file is already there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import posixpath
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import paramiko

from farm import folders
from farm.connectivity.ssh import SshConnection
from farm.errors import BoardLostError, DeadlineError, FarmError, PermanentError, TransientError, UsageError

# A transfer's time beyond its bytes: start SFTP, hash on both sides on a slow SD card.
_GRACE_S = 30.0
_SLOWEST_BYTES_PER_S = 1e6
# A board that flushes its cache is silent for long; keepalives notice a dead one.
_REPLY_TIMEOUT_S = 60.0
# For a short command on the board; hashing adds time by size.
_HASH_TIMEOUT_S = 10.0
_HASH_BYTES_PER_S = 20e6


class Transfer(NamedTuple):
    """The result of a transfer: `moved` is False if an equal file was there. `size` in bytes."""

    moved: bool
    size: int
    sha256: str
    seconds: float


def put(
    connection: SshConnection, local: Path, remote: str, mode: int = 0o644, timeout_s: float | None = None
) -> Transfer:
    """Make `remote` on the board equal to `local`, atomically.

    `remote` is absolute or below the login's home; its folder must exist. Raises UsageError (no such local file),
    PermanentError (board full, no permission, no folder), TransientError (arrived changed), DeadlineError,
    BoardLostError. An aborted transfer leaves a hidden part file, which the next one overwrites.
    """
    began = time.monotonic()
    try:
        size, digest = local.stat().st_size, hash_file(local)
    except OSError as error:
        raise UsageError(f"{local} cannot be read: {error.strerror}") from error
    timeout_s = _GRACE_S + size / _SLOWEST_BYTES_PER_S if timeout_s is None else timeout_s
    watch = _Watch(f"sending {local.name} to {connection.address}", began + timeout_s, timeout_s)
    folder, name = posixpath.split(remote)
    part = posixpath.join(folder, f".{name}.{digest[:16]}.part")
    with _sftp(connection, watch) as sftp:
        with watch.naming(connection, remote, size):
            found = _find_size(sftp, remote)
            if found == size and fetch_sha256(connection, remote, size) == digest:
                sftp.chmod(remote, mode)
                return Transfer(False, size, digest, time.monotonic() - began)
        _require_room(connection, folder or ".", size)
        try:
            with watch.naming(connection, remote, size), local.open("rb") as file:
                sftp.putfo(file, part, size, watch.tick)
                watch.tick(size, size)
                got = fetch_sha256(connection, part, size)
                if got != digest:
                    raise TransientError(f"{remote} arrived changed on {connection.address}: sha256 {got}")
                sftp.chmod(part, mode)
                sftp.posix_rename(part, remote)
        except BaseException:
            with contextlib.suppress(Exception):
                sftp.remove(part)
            raise
    return Transfer(True, size, digest, time.monotonic() - began)


def get(connection: SshConnection, remote: str, local: Path) -> Transfer:
    """Make `local` equal to `remote` on the board, atomically. Raises as `put`."""
    began = time.monotonic()
    watch = _Watch(f"fetching {remote} from {connection.address}", began + _GRACE_S, _GRACE_S)
    with _sftp(connection, watch) as sftp:
        with watch.naming(connection, remote, 0):
            size = int(sftp.stat(remote).st_size or 0)
            digest = fetch_sha256(connection, remote, size)
        watch.extend(size / _SLOWEST_BYTES_PER_S)
        if local.is_file() and local.stat().st_size == size and hash_file(local) == digest:
            return Transfer(False, size, digest, time.monotonic() - began)
        with folders.new_file(local) as part:
            try:
                file = part.open("wb")
            except OSError as error:
                raise UsageError(f"{local} cannot be written: {error.strerror}") from error
            with file, watch.naming(connection, remote, 0):
                sftp.getfo(remote, _Disk(file), watch.tick)  # type: ignore[arg-type]  # only `write` is used
            if hash_file(part) != digest:
                raise TransientError(f"{remote} changed while it was fetched from {connection.address}")
    return Transfer(True, size, digest, time.monotonic() - began)


def fetch_sha256(connection: SshConnection, remote: str, size: int) -> str:
    """The SHA-256 of a file of `size` bytes, hashed on the board, in hexadecimal. Raises PermanentError."""
    command = f"sha256sum {_quote(remote)}"
    code, out, err = connection.exec(command, _HASH_TIMEOUT_S + size / _HASH_BYTES_PER_S)
    # GNU's sha256sum writes a backslash before the sum of an escaped name.
    digest = out.decode("utf-8", "replace").lstrip("\\").partition(" ")[0]
    if code or len(digest) != 64:
        said = err.decode("utf-8", "replace").strip() or f"exit code {code}"
        raise PermanentError(f"{remote} cannot be hashed on {connection.address}: {said}")
    return digest


def hash_file(path: Path) -> str:
    """The SHA-256 of a file here, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Watch:
    """The deadline of one transfer, and the translation of SFTP's errors."""

    def __init__(self, what: str, deadline: float, timeout_s: float) -> None:
        self.what = what
        self._deadline = deadline
        self._timeout_s = timeout_s

    def extend(self, seconds: float) -> None:
        self._deadline += seconds
        self._timeout_s += seconds

    def tick(self, done: int, size: int) -> None:
        """Check the deadline; paramiko calls it after each piece."""
        if time.monotonic() > self._deadline:
            raise DeadlineError(f"{self.what} took more than {self._timeout_s:.0f} s ({done} of {size} bytes)")

    @contextlib.contextmanager
    def naming(self, connection: SshConnection, remote: str, size: int) -> Iterator[None]:
        """Translate errors; `size` is the number of bytes for the board."""
        try:
            yield
        except (FarmError, _LocalDiskError):
            raise
        except TimeoutError as error:
            self._require_connected(connection, error)
            raise DeadlineError(f"{self.what}: no answer for {_REPLY_TIMEOUT_S:g} s") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            # A lost connection explains any other failure.
            self._require_connected(connection, error)
            self._raise_named(connection, remote, size, error)

    def _require_connected(self, connection: SshConnection, error: Exception) -> None:
        if connection.lost.wait(0.2):
            raise BoardLostError(f"{self.what}: the connection ended: {connection.reason}") from error

    def _raise_named(self, connection: SshConnection, remote: str, size: int, error: Exception) -> None:
        code = getattr(error, "errno", None)
        where = f"{remote} on {connection.address}"
        if code == errno.ENOENT:
            raise PermanentError(f"there is no {where}, or no folder for it") from error
        if code == errno.EACCES:
            raise PermanentError(f"no permission for {where}", "Log in as another user than it or chown it.") from error
        # SFTP reports a full disk and much else as "Failure" (draft-ietf-secsh-filexfer-02, section 7).
        if size:
            _require_room(connection, posixpath.dirname(remote) or ".", size)
        raise PermanentError(f"{self.what} failed: {error}") from error


class _LocalDiskError(PermanentError):
    """The local disk is full."""


class _Disk:
    """A local file whose errors are distinct from the board's."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            raise _LocalDiskError(f"{self._file.name} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _sftp(connection: SshConnection, watch: _Watch) -> Iterator[paramiko.SFTPClient]:
    with connection.session(watch.what, _REPLY_TIMEOUT_S) as channel:
        with watch.naming(connection, "sftp", 0):
            channel.settimeout(_REPLY_TIMEOUT_S)
            channel.invoke_subsystem("sftp")
            sftp = paramiko.SFTPClient(channel)
        try:
            yield sftp
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                sftp.close()


def _find_size(sftp: paramiko.SFTPClient, remote: str) -> int | None:
    """The size of a file on the board; None if missing. Raises PermanentError for a folder."""
    try:
        status = sftp.stat(remote)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode or 0):
        raise PermanentError(f"{remote} is a folder on the board")
    return int(status.st_size or 0)


def _require_room(connection: SshConnection, folder: str, size: int) -> None:
    """Raise PermanentError if the file system of `folder` has less than `size` bytes, or no file, left."""
    name = _quote(folder)
    code, out, _ = connection.exec(f"df -Pk {name} && df -Pi {name}", _HASH_TIMEOUT_S)
    rows = [line.split() for line in out.decode("utf-8", "replace").splitlines()[1::2]]
    for fields, need, unit in zip(rows, (size / 1024, 1), ("KiB", "files"), strict=False):
        # A file system with dynamic inodes has none in total and none left.
        if code or len(fields) < 6 or not fields[3].isdigit() or (unit == "files" and fields[1] == "0"):
            continue
        if int(fields[3]) < need:
            raise PermanentError(
                f"the disk of {connection.address} is full: {folder} has {fields[3]} {unit} left of {need:.0f} needed",
                "Free some space on the board.",
            )


def _quote(remote: str) -> str:
    """Quote a path for the board's shell; never an option."""
    return shlex.quote(remote if remote.startswith("/") else f"./{remote}")
