"""A board's SSH address, with a host's settings in the user's OpenSSH configuration: user, port, keys and jump hosts.

OpenSSH's client (`ssh -G`) reads it. Connects to nothing.
"""

from __future__ import annotations

import dataclasses
import getpass
import glob
import os
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from farm import settings
from farm.connectivity import host_keys
from farm.connectivity.ssh_handshake import SshAddress
from farm.errors import DeadlineError, UsageError
from farm.values import Ssh

# readconf.h of OpenSSH: READCONF_MAX_DEPTH.
_MOST_INCLUDES = 16
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')

# ssh_config(5): more jump hosts than this are a loop.
_MOST_JUMPS = 8
# `ssh -G` answers within 10 ms; with CanonicalizeHostname it queries a name server.
_ASK_TIMEOUT_S = 20.0
_JUMP = re.compile(r"(?:(?P<user>.+)@)?(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^\[\]:@]+))(?::(?P<port>\d+))?")
_TOKEN = re.compile(r"%(.?)|\$\{(\w*)\}")
# The order of OpenSSH's own client (ssh_config(5), IdentityFile), without types that no board has.
_USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


@dataclasses.dataclass(frozen=True)
class ConfigLine:
    """One effective line."""

    path: Path
    number: int
    text: str

    @property
    def words(self) -> list[str]:
        """The line's words in lower case, without quotes, backslashes and `=`, which OpenSSH may strip."""
        plain = re.sub(r"[\"'\\]", "", self.text).lower()
        return [word for word in re.split(r"[\s=,]+", plain) if word] or [""]

    @property
    def keyword(self) -> str:
        """The option that the line sets."""
        return self.words[0]

    @property
    def value(self) -> str:
        """The text after the keyword."""
        return re.sub(r"^[^\s=]+[\s=]*", "", self.text)

    def refuse(self, what: str, hint: str) -> UsageError:
        """The error that names this line."""
        return UsageError(f"{self.path}:{self.number}: {what}", hint)


def copy_without_programs(path: Path, folder: Path, depth: int = 0) -> Path:
    """Copy `path` and its includes into a folder, for `ssh -G` to read what was searched; return the copy.

    Raises UsageError naming the line for `Match exec`, which would run a program, and for an Include that cannot be
    followed.
    """
    lines: list[str] = []
    for line in _read_file(path):
        words = [word.lstrip("!") for word in line.words]
        if words[0] == "matchexec" or (words[0] == "match" and "exec" in words):
            what = "`Match exec` runs a program, which the farm does not do"
            raise line.refuse(what, "Write a Host section in its place.")
        text = line.text
        if line.keyword == "include":
            if depth == _MOST_INCLUDES:
                raise line.refuse(f"files are included more than {_MOST_INCLUDES} deep", "An Include is a circle.")
            copies = [copy_without_programs(each, folder, depth + 1) for each in _find_included(line)]
            text = f"Include {' '.join(map(str, copies))}" if copies else ""
        lines += [""] * (line.number - 1 - len(lines)) + [text]
    number, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=folder)
    with open(number, "w", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 - an open file
        file.write("\n".join(lines) + "\n")
    return Path(name)


def _read_file(path: Path) -> Iterator[ConfigLine]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                raise UsageError(f"{path} is not a file", "OpenSSH's configuration is read more than once.")
            return  # a folder or /dev/null: OpenSSH reads nothing from it
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return  # OpenSSH skips unreadable files as well
    for number, line in enumerate(text.split("\n"), 1):
        if (bare := line.strip()) and not bare.startswith("#"):
            yield ConfigLine(path, number, bare)


def _find_included(line: ConfigLine) -> Iterator[Path]:
    """The files of an Include, as OpenSSH finds them."""
    if not line.text.lower().startswith("include") or re.search(r"[$%'\\]|\[[:=.^]", line.value):
        what = "this Include cannot be followed by the farm"
        raise line.refuse(what, "Write its path out, without variables, tokens, single quotes and classes.")
    for quoted, plain in _PARTS.findall(line.value):
        whole = Path("~/.ssh", quoted or plain) if (quoted or plain)[0] != "~" else Path(quoted or plain)
        yield from map(Path, sorted(glob.glob(os.path.expanduser(whole))))  # noqa: PTH111, PTH207 - may be absolute


@dataclasses.dataclass(frozen=True)
class HostConfig:
    """The settings for one alias; empty if not configured.

    `agent` is the socket path of the running agent. `jumps` are in OpenSSH's form, `[user@]host[:port]`.
    """

    host: str
    user: str = ""
    port: int | None = None
    key_files: tuple[Path, ...] = ()
    only_these_keys: bool = False
    agent: str = ""
    jumps: tuple[str, ...] = ()


def find_host(alias: str, path: Path, user: str = "", port: int | None = None) -> HostConfig:
    """The settings in the file at `path`, and its includes, for a host, with `user` and `port` if given.

    Without a file, the alias is the host's name. Raises UsageError for an invalid file, and for unsupported options:
    `Match exec` and `ProxyCommand` run programs. Raises DeadlineError.
    """
    if not path.exists():
        return HostConfig(alias, agent=_find_agent(""))
    with tempfile.TemporaryDirectory(prefix="farm-ssh-") as folder:
        said = _ask(str(copy_without_programs(path, Path(folder))), alias, user, port)
    return _from_openssh(alias, path, said, _ask("none", alias, "", None).get("identityfile", []))


def _ask(path: str, alias: str, user: str, port: int | None) -> dict[str, list[str]]:
    """The output of `ssh -G`, by keyword."""
    command = ["ssh", "-G", "-F", path, *(("-l", user) if user else ()), *(("-p", str(port)) if port else ())]
    try:
        done = subprocess.run(
            [*command, "--", alias],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"LC_ALL": "C"},
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        what = f"`ssh -G {alias}` did not answer within {_ASK_TIMEOUT_S:g} s"
        raise DeadlineError(what, "The configuration may ask a name server: CanonicalizeHostname.") from error
    except OSError as error:
        raise UsageError(f"OpenSSH's configuration cannot be read: {error}", "Install OpenSSH's client.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise UsageError(
            f"OpenSSH refuses its configuration for {alias}: {' '.join(said.split())}", "It read a copy, line by line."
        )
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword, []).append(value)
    return found


def _from_openssh(alias: str, path: Path, said: dict[str, list[str]], usual_keys: list[str]) -> HostConfig:
    def first(keyword: str) -> str:
        return said.get(keyword, [""])[0]

    if first("proxycommand").lower() not in ("", "none"):
        raise UsageError(
            f"{path} has a ProxyCommand for {alias}, which the farm does not run", "ProxyJump says the same for most."
        )
    jumps = first("proxyjump")
    tokens = {
        "%": "%",
        "h": first("hostname"),
        "n": alias,
        "p": first("port"),
        "r": first("user"),
        "d": str(Path.home()),
        "i": str(os.getuid()),
        "k": first("hostkeyalias") or alias,
        "l": socket.gethostname(),
        "L": socket.gethostname().partition(".")[0],
        "u": name_login(),
    }

    def replace(match: re.Match[str]) -> str:
        token, variable = match.groups()
        found = os.environ.get(variable) if variable is not None else tokens.get(token)
        if found is None:
            what = f"{path}: {alias}: {match[0]} in {match.string!r} is not known here"
            raise UsageError(what, "Write the path out.")
        return found

    def expand(text: str) -> str:  # tokens (`%d`) and variables (`${NAME}`), as OpenSSH does
        return _TOKEN.sub(replace, text)

    # OpenSSH's default keys are the farm's to choose.
    keys = said.get("identityfile", [])
    keys = [] if keys == usual_keys else [key for key in keys if key.lower() != "none"]
    return HostConfig(
        alias if first("hostname").lower() == alias.lower() else first("hostname"),
        first("user"),
        int(first("port")),
        tuple(Path(expand(key)).expanduser() for key in keys),
        first("identitiesonly") == "yes",
        _find_agent(expand(first("identityagent"))),
        () if jumps.lower() in ("", "none") else tuple(part.strip() for part in jumps.split(",")),
    )


def split_jump(text: str) -> tuple[str, str, int | None]:
    """User, host and port of `[user@]host[:port]`, an IPv6 address in brackets; "" and None if missing.

    Raises UsageError.
    """
    plain = text.removeprefix("ssh://").rstrip("/")
    # A bare IPv6 address has no port.
    match = _JUMP.fullmatch(re.sub(r"(^|@)([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[\w:.%]*)$", r"\1[\2]", plain))
    if match is None:
        raise UsageError(
            f"ProxyJump {text!r} is not [user@]host[:port]", "An IPv6 address is in brackets: [fe80::1]:22."
        )
    return match["user"] or "", match["bracketed"] or match["plain"], int(match["port"]) if match["port"] else None


def name_login() -> str:
    """The default login: the user of this machine. Raises UsageError for one without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:
        raise UsageError("this user has no name here", "Say who logs in: USER@HOST.") from error


def _find_agent(named: str) -> str:
    if named.lower() == "none":
        return ""
    if named and named != "SSH_AUTH_SOCK":
        return str(Path(os.path.expandvars(named)).expanduser())
    return os.environ.get("SSH_AUTH_SOCK", "")


def to_ssh_address(transport: Ssh, default_key_file: str | None = None) -> SshAddress:
    """The address of a board reached over SSH, with its pinned host key if registered.

    A board registered without a key gets `default_key_file` (None: the setting FARM_SSH_KEY). If that is empty too, it
    gets the agent's keys, and the OpenSSH configuration's file or else the first usual one present. Whether a file is
    usable is found on connecting. Raises UsageError for an unusable configuration, DeadlineError if `ssh -G` does not
    answer.
    """
    known = settings.load()
    key_file = transport.identity_file or (known.ssh_key if default_key_file is None else default_key_file)
    address = _resolve(transport.host, transport.user, transport.port, key_file, Path(known.ssh_config).expanduser())
    return dataclasses.replace(address, host_key=transport.host_key)


def _resolve(alias: str, user: str, port: int, key_file: str, path: Path, depth: int = 0) -> SshAddress:
    if depth > _MOST_JUMPS:
        raise UsageError(f"the way to {alias} leads over more than {_MOST_JUMPS} hosts", "Its ProxyJump is a circle.")
    found = find_host(alias, path, user, None if port == SshAddress.port else port)
    jumps = []
    for login, host, jump_port in map(split_jump, found.jumps):
        jump_key = settings.load().ssh_key
        jumps.append(_resolve(host, login, jump_port or SshAddress.port, jump_key, path, depth + 1))
    files, agent = _choose_keys(found, key_file)
    return SshAddress(
        alias,
        user or found.user or name_login(),
        files[0],
        # The configuration overrides the registration's default.
        port if port != SshAddress.port else found.port or port,
        more_keys=files[1:],
        agent=agent,
        only_these_keys=found.only_these_keys or bool(key_file),
        endpoint="" if found.host == alias else found.host,
        # A jump host's own jump hosts come first.
        jumps=tuple(each for jump in jumps for each in (*jump.jumps, dataclasses.replace(jump, jumps=()))),
    )


def _choose_keys(found: HostConfig, key_file: str) -> tuple[tuple[Path, ...], str]:
    """The key files, at least one, and the agent to use. A named file is used alone.

    The agent is used for a key whose file alone cannot sign.
    """
    if key_file:
        path = Path(key_file).expanduser()
        return (path,), found.agent if host_keys.needs_agent(path) else ""
    paths = found.key_files or tuple(Path(text).expanduser() for text in _USUAL_KEYS)
    there = tuple(path for path in paths if path.is_file())
    return (there if found.key_files else there[:1]) or paths[:1], found.agent
