"""The lines of the user's OpenSSH configuration and of what it includes, and which of them the farm refuses.

What a configuration says of a host is found in `ssh_config`.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from farm.errors import UsageError

# readconf.h of OpenSSH: READCONF_MAX_DEPTH.
_MOST_INCLUDES = 16
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')
# Match criteria that the farm's own reader decides as OpenSSH does.
_KNOWN_CRITERIA = frozenset({"all", "host", "originalhost", "localuser"})


@dataclasses.dataclass(frozen=True)
class ConfigLine:
    """One line that says something."""

    path: Path
    number: int
    text: str

    @property
    def words(self) -> list[str]:
        """The line's words in lower case, without what OpenSSH may take away: quotes, backslashes, `=`."""
        plain = re.sub(r"[\"'\\]", "", self.text).lower()
        return [word for word in re.split(r"[\s=,]+", plain) if word] or [""]

    @property
    def keyword(self) -> str:
        """What the line sets."""
        return self.words[0]

    @property
    def value(self) -> str:
        """The text after the keyword."""
        return re.sub(r"^[^\s=]+[\s=]*", "", self.text)

    def refuse(self, what: str, hint: str) -> UsageError:
        """The error that names this line."""
        return UsageError(f"{self.path}:{self.number}: {what}", hint)


def require_no_programs(path: Path) -> None:
    """Refuse a configuration with `Match exec`, in `path` or in what it includes: reading it would run a program.

    Raises UsageError naming the line, also for an Include that cannot be followed.
    """
    for line in _read(path, 0):
        _require_no_program(line)


def require_known(path: Path) -> None:
    """Refuse a file with a line that the farm's own reader does not read as OpenSSH does. Raises UsageError."""
    for line in _read_file(path):
        _require_no_program(line)
        if what := _find_unknown(line):
            raise line.refuse(f"{what} is read only by OpenSSH's own client", "Install ssh, or write the line out.")


def _require_no_program(line: ConfigLine) -> None:
    words = [word.lstrip("!") for word in line.words]
    if words[0] == "matchexec" or (words[0] == "match" and "exec" in words):
        what = "`Match exec` runs a program, which the farm does not do"
        raise line.refuse(what, "Write a Host section in its place.")


def _find_unknown(line: ConfigLine) -> str:
    keyword, value = line.keyword, line.value
    if keyword == "include":
        return "Include"
    if keyword == "canonicalizehostname" and line.words[1:] != ["no"]:
        return "CanonicalizeHostname"
    if keyword in {"identityfile", "identityagent"} and ("%" in value or "${" in value):
        return f"{value!r} with tokens or variables"
    if keyword == "hostname" and "%" in value.replace("%h", ""):
        return f"{value!r} with tokens"
    if keyword == "match":
        # A criterion has one value, but for `all`, which stands alone.
        words = re.findall(r'(?:"[^"]*"|[^\s"=])+', value)
        for word in words if "all" in line.words else words[::2]:
            if word.lower().lstrip("!") not in _KNOWN_CRITERIA:
                return f"`Match {word}`"
    return ""


def _read(path: Path, depth: int) -> Iterator[ConfigLine]:
    for line in _read_file(path):
        yield line
        if line.keyword == "include":
            if depth == _MOST_INCLUDES:
                raise line.refuse(f"files are included more than {_MOST_INCLUDES} deep", "An Include is a circle.")
            for included in _find_included(line):
                yield from _read(included, depth + 1)


def _read_file(path: Path) -> Iterator[ConfigLine]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                raise UsageError(f"{path} is not a file", "OpenSSH's configuration is read more than once.")
            return  # a folder or /dev/null, of which OpenSSH reads nothing
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return  # what cannot be opened OpenSSH passes over as well
    for number, line in enumerate(text.split("\n"), 1):
        if (bare := line.strip()) and not bare.startswith("#"):
            yield ConfigLine(path, number, bare)


def _find_included(line: ConfigLine) -> Iterator[Path]:
    """The files of an Include, as OpenSSH finds them: `~` is the home of the user database, whatever HOME says."""
    if not line.text.lower().startswith("include") or re.search(r"[%'\\]", line.value):
        what = "this Include cannot be followed by the farm"
        raise line.refuse(what, "Write its path out, without tokens and single quotes.")
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for quoted, plain in _PARTS.findall(line.value):
        named = quoted or plain
        for pattern in {named, os.path.expandvars(named)}:  # releases before 9.9 know no variables here
            whole = home / pattern[2:] if pattern.startswith("~/") else home / ".ssh" / pattern
            yield from map(Path, sorted(glob.glob(str(whole))))  # noqa: PTH207 - the pattern may be absolute
