"""Paths and names of an installation on a board. Connects to nothing.

Everything is below one prefix, except two units, their runtime and state folders, and one user. An installation under
another prefix has its own names, so that a machine may have several.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
import shlex
from pathlib import Path

from farm.errors import UnavailableError, UsageError

# Name -> its path in a checkout; a wheel has all of them in `data/` beside this module (`tool.hatch`).
_PLACES = {
    "agent.txt": "requirements/agent.txt",
    "board-tools.txt": "requirements/board-tools.txt",
    "tvm-farm-agent.service": "deploy/systemd/tvm-farm-agent.service",
    "tvm-farm-clock-helper.service": "deploy/systemd/tvm-farm-clock-helper.service",
    "supervisor.py": "deploy/board/supervisor.py",
}

ROOT_PREFIX = "/opt/tvm-farm"
# Below the home of a login without root's rights.
HOME_PREFIX = ".local/share/tvm-farm-board"
# Of `farm model deploy`: below the login's home, or below FARM_HOME for boards on this machine.
MODELS_FOLDER = "tvm-farm-models"
UNIT_FOLDER = "/etc/systemd/system"
# Accepted unquoted by a shell, by systemd and in unit specifiers.
_PREFIX = re.compile(r"(/(?!\.\.?(/|$))[A-Za-z0-9_.][A-Za-z0-9._-]*)+")
# sun_path of unix(7) has 108 bytes; the longest socket below a prefix takes 30.
_MAX_PREFIX = 75
# Shorter paths are the system's: an installation is a folder below them.
_TOO_SHORT = 2
# Names in units after the project: services, folders in /run and /var/lib, the user and its group.
_OWN_NAME = re.compile(r"tvm-farm(?:-agent|-clock-helper)?(?![\w-])")
_MARK = "\0"
# The default of `device-agent metrics`; a second installation on one machine has none.
METRICS_PORT = 9101


def read_resource(name: str) -> str:
    """The text of one of these files. Raises UnavailableError if it is missing."""
    here = Path(__file__).resolve().parent
    for path in (here / "data" / name, here.parents[1] / _PLACES[name]):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise UnavailableError(f"the farm's own file {name} is missing", "Install tvm-farm again, or use a whole checkout.")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One installation. `as_root`: with units, a user and the clock helper; `systemd`: the service manager."""

    prefix: str
    as_root: bool
    systemd: bool
    home: str = ""

    @property
    def suffix(self) -> str:
        """The suffix of this installation's names, if it is not at the usual prefix."""
        if self.prefix in (ROOT_PREFIX, posixpath.join(self.home, HOME_PREFIX)):
            return ""
        return "-" + hashlib.sha256(self.prefix.encode()).hexdigest()[:8]

    @property
    def user(self) -> str:
        """The agent's user; empty for the login itself."""
        return f"tvm-farm{self.suffix}" if self.as_root else ""

    @property
    def units(self) -> tuple[str, ...]:
        """The clock helper's and the agent's units, in starting order."""
        names = ("clock-helper", "agent") if self.systemd else ()
        return tuple(f"tvm-farm-{name}{self.suffix}.service" for name in names)

    @property
    def outside(self) -> tuple[str, ...]:
        """Folders outside the prefix, for removal."""
        if not self.systemd:
            return ()
        states = (f"/var/lib/tvm-farm-{name}{self.suffix}" for name in ("clock-helper", "agent"))
        return (f"/run/tvm-farm{self.suffix}", *states)

    @property
    def program(self) -> str:
        """The supervisor's command, without systemd."""
        return self.below("bin/tvm-farm-board")

    @property
    def models(self) -> str:
        """The login's folder of deployed models, which outlives the installation."""
        return posixpath.join(self.home, MODELS_FOLDER)

    def below(self, name: str) -> str:
        """A path below the prefix."""
        return posixpath.join(self.prefix, name)

    def version(self, key: str) -> str:
        """The folder of a version."""
        return self.below(f"versions/{key}")


def plan_layout(prefix: str, uid: int, may_sudo: bool, systemd: bool, home: str) -> Layout:
    """The layout for a login; an empty `prefix` means the usual one. Raises UsageError for an invalid prefix."""
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


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """Options of one board's agent. Ports are on the board's loopback."""

    name: str
    board_type: str
    agent_port: int
    tracker_port: int
    meter: str = ""

    def to_arguments(self) -> list[str]:
        """Options of `device-agent serve`, which listens on loopback by default; the port is the registered one."""
        return [
            *("--name", self.name),
            *("--board-type", self.board_type),
            *("--port", str(self.agent_port)),
            *("--port-end", str(self.agent_port)),
            *("--tracker", f"127.0.0.1:{self.tracker_port}"),
            *("--metrics-port", str(METRICS_PORT)),
            *(("--meter", self.meter) if self.meter else ()),
        ]


@dataclasses.dataclass(frozen=True)
class BoardFile:
    """One file on a board; `mode` as for chmod."""

    path: str
    text: str
    mode: int = 0o644

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def render_files(layout: Layout, options: AgentOptions) -> tuple[BoardFile, ...]:
    """Every file of a board's services, beside a version."""
    if layout.systemd:
        units = (
            BoardFile(posixpath.join(UNIT_FOLDER, unit), render_unit(read_resource(name), layout))
            for name, unit in zip(
                ("tvm-farm-clock-helper.service", "tvm-farm-agent.service"), layout.units, strict=True
            )
        )
        environment = f"AGENT_OPTIONS={shlex.join(options.to_arguments())}\n"  # systemd splits it as a shell does
        return (BoardFile(layout.below("etc/agent.env"), environment), *units)
    config = {"agent": options.to_arguments(), "helper": layout.as_root, "user": layout.user}
    current = layout.below("current")
    program = (
        "#!/bin/sh\n# Keeps the agent of the TVM tuning farm running: tvm-farm-board start|stop|status|run\n"
        f'exec {current}/bin/python -I {current}/supervisor.py --prefix {layout.prefix} "$@"\n'
    )
    return (
        BoardFile(layout.below("etc/board.json"), json.dumps(config, indent=1, sort_keys=True) + "\n"),
        BoardFile(layout.program, program, 0o755),
    )


def render_unit(text: str, layout: Layout) -> str:
    """Adapt a unit of `deploy/systemd/` to an installation under another prefix, with its own names."""
    text = text.replace(ROOT_PREFIX + "/", _MARK)
    text = _OWN_NAME.sub(lambda found: found[0] + layout.suffix, text)
    return text.replace(_MARK, layout.prefix + "/")


def compute_digest(files: tuple[BoardFile, ...]) -> str:
    """A short hash over files, which tells whether services were started with them."""
    return hashlib.sha256("".join(f"{file.path}{file.mode}{file.sha256}" for file in files).encode()).hexdigest()[:12]
