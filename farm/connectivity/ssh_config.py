"""What the user's own OpenSSH configuration says of a host: its address, user, port, keys and the hosts on the way.

Read with paramiko; nothing here connects. `Match exec` is refused, since it runs programs, and `ProxyCommand` too.
"""

from __future__ import annotations

import dataclasses
import functools
import getpass
import os
from pathlib import Path

import paramiko

from farm.errors import UsageError

# ssh_config(5): more hosts on the way than this are a circle.
_MOST_JUMPS = 8


@dataclasses.dataclass(frozen=True)
class HostConfig:
    """What holds for one alias; empty where the configuration does not say.

    `agent` is the path of the socket of the running agent. `jumps` are as OpenSSH writes them, `[user@]host[:port]`.
    """

    host: str
    user: str = ""
    port: int | None = None
    key_files: tuple[Path, ...] = ()
    only_these_keys: bool = False
    agent: str = ""
    jumps: tuple[str, ...] = ()


def find_host(alias: str, path: Path) -> HostConfig:
    """What the file at `path` says of a host; where there is no file, the alias is the host's name.

    Raises UsageError for a file that cannot be understood, and for what is not taken over.
    """
    config = _read(path)
    if config is None:
        return HostConfig(alias, agent=_find_agent(""))
    try:
        found = config.lookup(alias)
    except (paramiko.SSHException, ImportError) as error:
        raise UsageError(f"{path}: {error}", "The farm reads Host sections; `Match exec` it does not run.") from error
    if found.get("proxycommand", "none").lower() != "none":
        raise UsageError(
            f"{path} has a ProxyCommand for {alias}, which the farm does not run", "ProxyJump says the same for most."
        )
    jump = found.get("proxyjump", "none")
    try:
        port = int(found["port"]) if "port" in found else None
    except ValueError as error:
        raise UsageError(f"{path}: the port of {alias} is {found['port']!r}") from error
    return HostConfig(
        found.get("hostname", alias),
        found.get("user", ""),
        port,
        tuple(Path(text).expanduser() for text in found.get("identityfile", ())),
        found.get("identitiesonly", "no").lower() == "yes",
        _find_agent(found.get("identityagent", "")),
        () if jump.lower() == "none" else tuple(part.strip() for part in jump.split(",")),
    )


def split_jump(text: str) -> tuple[str, str, int | None]:
    """User, host and port of `[user@]host[:port]`; "" and None where it does not say. Raises UsageError."""
    user, _, where = text.removeprefix("ssh://").rpartition("@")
    host, colon, port = where.rpartition(":") if where.count(":") == 1 else (where.strip("[]"), "", "")
    if not host or (colon and not port.isdecimal()):
        raise UsageError(f"ProxyJump {text!r} is not [user@]host[:port]")
    return user, host, int(port) if port else None


def name_login() -> str:
    """Who logs in where nobody says: the user of this machine. Raises UsageError for one without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:
        raise UsageError("this user has no name here", "Say who logs in: USER@HOST.") from error


def require_depth(depth: int, alias: str) -> None:
    """Refuse a way that goes on and on. Raises UsageError."""
    if depth > _MOST_JUMPS:
        raise UsageError(f"the way to {alias} leads over more than {_MOST_JUMPS} hosts", "Its ProxyJump is a circle.")


def _find_agent(named: str) -> str:
    if named.lower() == "none":
        return ""
    if named and named != "SSH_AUTH_SOCK":
        return str(Path(os.path.expandvars(named)).expanduser())
    return os.environ.get("SSH_AUTH_SOCK", "")


def _read(path: Path) -> paramiko.SSHConfig | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return _parse(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _parse(path: Path, changed_ns: int, size: int) -> paramiko.SSHConfig:
    """The file as it is now; read again once it has changed."""
    del changed_ns, size
    try:
        return paramiko.SSHConfig.from_path(str(path))
    except (OSError, UnicodeDecodeError, paramiko.SSHException) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
