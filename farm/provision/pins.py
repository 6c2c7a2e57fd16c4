"""The pinned packages of a board: read from `requirements/agent.txt` and chosen for one version of Python.

pip judges markers by the interpreter that runs it, not by the one asked for; so they are judged here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from packaging.markers import Marker

from farm.errors import InternalError

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;]+)(?: ; (?P<marker>.+))?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True)
class PinnedPackage:
    """One package at one version; `sha256` are those of its files, any of which may be taken."""

    name: str
    version: str
    sha256: tuple[str, ...]

    def to_text(self) -> str:
        """As pip reads it in a requirements file."""
        return f"{self.name}=={self.version}" + "".join(f" --hash=sha256:{digest}" for digest in self.sha256)


def choose_pins(text: str, python: str, arch: str) -> tuple[PinnedPackage, ...]:
    """The pins of a requirements file that apply on Linux with `python` (`3.11`) and `arch` (`aarch64`).

    Raises InternalError where a line is neither a pin nor its hash.
    """
    chosen = []
    for logical in text.replace("\\\n", " ").splitlines():
        head, *_ = logical.partition(" --hash")
        if not head.strip() or head.lstrip().startswith("#"):
            continue
        found = _PIN.fullmatch(head.strip())
        digests = tuple(_HASH.findall(logical))
        if found is None or not digests:
            raise InternalError(f"the pins hold a line that is no pin: {logical.strip()[:80]!r}")
        marker = found["marker"]
        if marker is None or Marker(marker.strip()).evaluate(_environment(python, arch)):
            chosen.append(PinnedPackage(found["name"], found["version"], digests))
    return tuple(chosen)


def to_requirements(pins: Iterable[PinnedPackage]) -> str:
    """A requirements file of pins with hashes and without markers."""
    return "".join(f"{pin.to_text()}\n" for pin in sorted(pins, key=lambda pin: pin.name))


def _environment(python: str, arch: str) -> dict[str, str]:
    """What PEP 508 calls the environment of a board."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": arch,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
