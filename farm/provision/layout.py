"""Where an installation lies on a board, and what its parts are called. Paths only: nothing here connects.

Everything is below one prefix but what has to be elsewhere: two units, their runtime and state folders, and one user.
An installation under another prefix than the usual one has names of its own, so that one machine may have several.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import re

from farm.errors import UsageError

ROOT_PREFIX = "/opt/tvm-farm"
# Below the home of a login that may not become root.
HOME_PREFIX = ".local/share/tvm-farm-board"
UNIT_FOLDER = "/etc/systemd/system"
# What a board's shell, systemd and a units' specifiers take as it is.
_PREFIX = re.compile(r"(/(?!\.\.?(/|$))[A-Za-z0-9_.][A-Za-z0-9._-]*)+")
# sun_path of unix(7) has 108 bytes; the longest socket below a prefix takes 30.
_MAX_PREFIX = 75
# These are the system's own: an installation is a folder below them.
_TOO_SHORT = 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """One installation. `as_root`: with units, a user and the clock helper; `systemd`: it is the service manager."""

    prefix: str
    as_root: bool
    systemd: bool
    home: str = ""

    @property
    def suffix(self) -> str:
        """What tells names of this installation from those of the usual one."""
        if self.prefix in (ROOT_PREFIX, posixpath.join(self.home, HOME_PREFIX)):
            return ""
        return "-" + hashlib.sha256(self.prefix.encode()).hexdigest()[:8]

    @property
    def user(self) -> str:
        """Whom the agent runs as; empty for the login itself."""
        return f"tvm-farm{self.suffix}" if self.as_root else ""

    @property
    def units(self) -> tuple[str, ...]:
        """The clock helper's and the agent's, in the order of starting."""
        names = ("clock-helper", "agent") if self.systemd else ()
        return tuple(f"tvm-farm-{name}{self.suffix}.service" for name in names)

    @property
    def outside(self) -> tuple[str, ...]:
        """Folders that are not below the prefix, for the removal."""
        if not self.systemd:
            return ()
        states = (f"/var/lib/tvm-farm-{name}{self.suffix}" for name in ("clock-helper", "agent"))
        return (f"/run/tvm-farm{self.suffix}", *states)

    @property
    def program(self) -> str:
        """The supervisor's command, where there is no systemd."""
        return self.below("bin/tvm-farm-board")

    def below(self, name: str) -> str:
        """A path below the prefix."""
        return posixpath.join(self.prefix, name)

    def version(self, key: str) -> str:
        """The folder of a version."""
        return self.below(f"versions/{key}")


def plan_layout(prefix: str, uid: int, may_sudo: bool, systemd: bool, home: str) -> Layout:
    """The layout for a login; an empty `prefix` means the usual one. Raises UsageError for a prefix that cannot be."""
    as_root = uid == 0 or may_sudo
    prefix = prefix or (ROOT_PREFIX if as_root else posixpath.join(home, HOME_PREFIX))
    layout = Layout(prefix, as_root, systemd and as_root, home)
    if not _PREFIX.fullmatch(prefix) or prefix.count("/") < _TOO_SHORT or len(prefix) > _MAX_PREFIX:
        raise UsageError(
            f"{prefix!r} cannot be the folder of an installation",
            f"It is an absolute path of letters, digits, dots, dashes and underscores, two levels deep at least and "
            f"{_MAX_PREFIX} characters at most, such as {ROOT_PREFIX}.",
        )
    if layout.systemd and prefix.startswith(("/tmp/", "/var/tmp/", "/home/", "/root/", "/run/user/")):  # noqa: S108
        raise UsageError(
            f"services of systemd cannot run from {prefix}",
            "Its units see neither homes nor the temporary folder (ProtectHome, PrivateTmp). Give another prefix.",
        )
    return layout
