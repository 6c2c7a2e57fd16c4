"""The files that start an agent on one particular board, as text: filled-in units, or the supervisor's.

Pure; the units themselves are in `deploy/systemd/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re

from farm.provision.layout import ROOT_PREFIX, UNIT_FOLDER, Layout
from farm.provision.resources import read_resource

# Everything that units name after the project: services, folders in /run and /var/lib, the user and its group.
_OWN_NAME = re.compile(r"tvm-farm(?:-agent|-clock-helper)?(?![\w-])")
_MARK = "\0"
# The default of `device-agent metrics`; a second installation on one machine goes without.
METRICS_PORT = 9101


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """What one board's agent is told. Ports are on the board's loopback."""

    name: str
    board_type: str
    agent_port: int
    tracker_port: int

    def to_arguments(self) -> list[str]:
        """Options of `device-agent serve`, which listens on loopback by itself; the port is the one registered."""
        return [
            *("--name", self.name),
            *("--board-type", self.board_type),
            *("--port", str(self.agent_port)),
            *("--port-end", str(self.agent_port)),
            *("--tracker", f"127.0.0.1:{self.tracker_port}"),
            *("--metrics-port", str(METRICS_PORT)),
        ]


@dataclasses.dataclass(frozen=True)
class BoardFile:
    """One file on a board; `mode` as chmod takes it."""

    path: str
    text: str
    mode: int = 0o644

    @property
    def sha256(self) -> str:
        """Of its contents."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def render_files(layout: Layout, options: AgentOptions) -> tuple[BoardFile, ...]:
    """Every file that the services of one board need besides a version."""
    if layout.systemd:
        units = (
            BoardFile(posixpath.join(UNIT_FOLDER, unit), render_unit(read_resource(name), layout))
            for name, unit in zip(
                ("tvm-farm-clock-helper.service", "tvm-farm-agent.service"), layout.units, strict=True
            )
        )
        environment = f"AGENT_OPTIONS={' '.join(options.to_arguments())}\n"
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
    """A unit of `deploy/systemd/` for an installation under another prefix, with names of its own."""
    text = text.replace(ROOT_PREFIX + "/", _MARK)
    text = _OWN_NAME.sub(lambda found: found[0] + layout.suffix, text)
    return text.replace(_MARK, layout.prefix + "/")


def compute_digest(files: tuple[BoardFile, ...]) -> str:
    """A short hash over files, to tell whether services were started with these."""
    return hashlib.sha256("".join(f"{file.path}{file.mode}{file.sha256}" for file in files).encode()).hexdigest()[:12]
