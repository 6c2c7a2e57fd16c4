"""The order of a program: its command, files, settings, metrics and limits, all as typed, so that it can be stored.

A board runs it as `device_agent.protocol.Command`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import platform
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from device_agent.protocol import Command, ProtocolError
from farm.errors import UsageError
from farm.programs.metrics import TIME, Limit, ProgramMetric
from farm.units import format_bytes

_MOST_BYTES = 512 << 20
_MOST_SERIES = 64
# A variant without settings.
PROGRAM = "program"
# {threads}; not ${HOME}, and {{threads}} for these very characters without one pair of braces.
_PLACE = re.compile(r"\{(\{\w+\})\}|(?<![${])\{([A-Za-z]\w*)\}")
# ELF's e_machine, as `uname -m` names it.
_MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64"}

Settings = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProgramOrder:
    """A program as ordered, all as typed; `files` are paths here. Raises UsageError for what no board could run."""

    command: str
    files: tuple[str, ...] = ()
    in_shell: bool = False
    begin: str = ""
    end: str = ""
    metrics: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    at_most: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(str(pathlib.Path(path).absolute()) for path in self.files))
        self._require_names()
        self.read_limits()
        for settings in self.list_settings().values():
            self._read_arguments(settings)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ProgramOrder:
        """Read an order that `dataclasses.asdict` wrote; its files may be gone since."""
        kept: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in document.items()
        }
        return cls(**kept)

    @property
    def name(self) -> str:
        """The command as typed, on one line."""
        return " ".join(self.command.split())

    origin = name  # a model's is its file

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the command and the files' contents."""
        return hashlib.sha256(repr([self.command, self.in_shell, sorted(self.digests.items())]).encode()).hexdigest()

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file, by its name. Raises what `contents` raises."""
        return {name: hashlib.sha256(content.data).hexdigest() for name, content in self.contents.items()}

    @functools.cached_property
    def contents(self) -> dict[str, npt.NDArray[np.uint8]]:
        """The files, mapped into memory, by name. Raises UsageError for one that cannot be sent."""
        found: dict[str, npt.NDArray[np.uint8]] = {}
        for path in map(pathlib.Path, self.files):
            try:
                if not path.is_file():
                    raise UsageError(f"--file {path}: there is no such file")
                if path.name in found:
                    raise UsageError(f"--file {path}: two files have this name", "They lie in one folder on the board.")
                if (size := path.stat().st_size) > _MOST_BYTES:
                    raise UsageError(
                        f"--file {path} has {format_bytes(size)}; at most {format_bytes(_MOST_BYTES)} are sent",
                        "Copy it to the board, and give its path there in --program.",
                    )
                found[path.name] = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
            except OSError as error:
                raise UsageError(f"--file {path}: {error.strerror}") from error
        return found

    def read_metrics(self) -> tuple[ProgramMetric, ...]:
        """Return the metrics, the objective first."""
        found = tuple(ProgramMetric.parse(text) for text in self.metrics)
        if len({metric.name for metric in found}) < len(found):
            raise UsageError("--metric names two metrics alike", "Each needs a name of its own.")
        (found or (TIME,))[0].require_objective()
        return found or (TIME,)

    def read_limits(self) -> tuple[list[Limit], float | None]:
        """Return the limits on metrics other than the objective, and the objective's in s. Raises UsageError."""
        objective = (metrics := self.read_metrics())[0]
        limits = [Limit.parse(text, metrics, at_least=True) for text in self.at_least]
        limits += [Limit.parse(text, metrics, at_least=False) for text in self.at_most]
        own = [limit for limit in limits if limit.metric == objective.name]
        if wrong := [limit for limit in own if limit.at_least is not bool(objective.counted)]:
            raise UsageError(f"{wrong[0]} is no limit: {objective.better} of the objective is better")
        deadline_s = min((objective.to_seconds(limit.value) for limit in own), default=None)
        return [limit for limit in limits if limit not in own], deadline_s

    def list_settings(self) -> dict[str, Settings]:
        """Return the settings of each series by its name, as `threads=1 quant=q4`; their product."""
        axes: dict[str, list[str]] = {}
        for text in self.vary:
            name, equals, values = text.partition("=")
            listed = list(dict.fromkeys(value.strip() for value in values.split(",")))
            if not re.fullmatch(r"[A-Za-z]\w*", name) or not equals or not all(listed) or name in axes:
                raise UsageError(f"--vary {text[:80]!r} is not NAME=VALUE,VALUE, each name once", "threads=1,2,4")
            axes[name] = listed
        if (count := math.prod(map(len, axes.values()))) > _MOST_SERIES:
            raise UsageError(f"--vary makes {count} series of settings, and {_MOST_SERIES} is the most")
        chosen = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return {" ".join(f"{name}={value}" for name, value in each.items()) or PROGRAM: each for each in chosen}

    def to_command(self, settings: Settings) -> Command:
        """Return what a board runs with these settings. Raises UsageError."""
        try:
            return Command(tuple(self._read_arguments(settings)), self.digests, self.begin, self.end)
        except ProtocolError as error:
            raise UsageError(f"--program: {error}") from error

    def require_fit(self, about: Mapping[str, Any]) -> None:
        """Refuse files that a board with this description does not run; a simulated one also runs this machine's."""
        self.require_architecture({about["architecture"], *([platform.machine()] if about["simulated"] else [])})

    def require_architecture(self, architectures: Collection[str]) -> None:
        """Refuse files for processors other than these (as `uname -m`). Raises UsageError, and as `contents`."""
        for name, content in self.contents.items():
            head = content[:20].tobytes()
            number = int.from_bytes(head[18:20], "little" if head[5:6] == b"\1" else "big")
            machine = _MACHINES.get(number) if head[:4] == b"\x7fELF" else None
            if machine is not None and machine not in architectures:
                raise UsageError(
                    f"--file {name} is for {machine}, and the board is {' or '.join(sorted(architectures))}",
                    "Build it for the board, or give the path of a program that stands there.",
                )

    def _require_names(self) -> None:
        given = {name for settings in self.list_settings().values() for name in settings}
        used = {match[2] for match in _PLACE.finditer(self.command) if match[2]}
        if unknown := sorted(used - given):
            hint = f"{{{{{unknown[0]}}}}} stands for the text {{{unknown[0]}}} itself."
            raise UsageError(f"--program has {{{unknown[0]}}}, which no --vary gives", hint)
        if unused := sorted(given - used):
            raise UsageError(f"--vary {unused[0]}: --program does not use {{{unused[0]}}}")

    def _read_arguments(self, settings: Settings) -> list[str]:
        """Return the argument list. Raises UsageError for one that cannot run on any board."""

        def fill(text: str) -> str:
            return _PLACE.sub(lambda match: match[1] or settings[match[2]], text)

        if self.in_shell:
            return ["/bin/sh", "-c", fill(self.command)]
        try:
            arguments = [fill(word) for word in shlex.split(self.command)]
        except ValueError as error:
            raise UsageError(f"--program {self.name[:80]!r}: {error}", "Quote it as for a shell.") from error
        if not arguments or not arguments[0]:
            raise UsageError("--program names no program")
        name = arguments[0].removeprefix("./")
        if name in {pathlib.Path(path).name for path in self.files}:
            arguments[0] = f"./{name}"
        elif "/" in arguments[0] and not arguments[0].startswith("/"):
            raise UsageError(
                f"--program: {arguments[0]} would not be there: each run starts in a new folder",
                f"--file {arguments[0]} sends it; a program that stands on the board needs its absolute path.",
            )
        return arguments
