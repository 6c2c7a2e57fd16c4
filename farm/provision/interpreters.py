"""Pythons for boards whose own is too old: uv's managed builds, as published archives.

The coordinator's uv fetches an archive for the board's machine; the board's uv unpacks it offline.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import stat
import tempfile
import zipfile
from pathlib import Path

from farm.errors import FarmError, TransientError, UnavailableError, UsageError
from farm.provision.layout import read_resource
from farm.provision.wheels import choose_pins, fetch_wheels, pip_environment, run_tool

# The Python for boards without a usable one: the version that this project is tested with.
MANAGED_PYTHON = "3.11"
LEAST_PYTHON, LAST_PYTHON = (3, 10), (3, 14)
# For uv to fetch a Python of 30 MB.
FETCH_TIMEOUT_S = 600.0
# In a bundle's list of downloads, the placeholder of the unpacked folder.
FOLDER_MARK = "@FOLDER@"
# cpython-3.11.14+20251120-aarch64-unknown-linux-gnu-install_only_stripped.tar.gz; uv's cache writes + as %2B.
_NAME = re.compile(
    r"(?:[A-Za-z0-9._-]+-)?(?P<name>cpython-3\.(?P<minor>\d+)\.(?P<patch>\d+)(?:\+|%2B)(?P<build>\d+)-"
    r"(?P<arch>aarch64|x86_64)-unknown-linux-gnu-install_only(?:_stripped)?\.tar\.(?:gz|zst))"
)


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The parts of an archive's name: `version` such as `3.11.14`, `build` its date, `arch` the machine."""

    minor: int
    patch: int
    build: str
    arch: str
    file_name: str

    @property
    def version(self) -> str:
        """As printed by `python --version`."""
        return f"3.{self.minor}.{self.patch}"

    @property
    def series(self) -> str:
        """The version without its last part."""
        return f"3.{self.minor}"

    @property
    def key(self) -> str:
        """Its name in uv, and of its unpacked folder."""
        return f"cpython-{self.version}-linux-{self.arch}-gnu"

    def to_downloads(self, sha256: str) -> str:
        """A list of downloads for uv with this one alone, at `FOLDER_MARK`."""
        entry = {
            "name": "cpython",
            "arch": {"family": self.arch, "variant": None},
            "os": "linux",
            "libc": "gnu",
            "major": 3,
            "minor": self.minor,
            "patch": self.patch,
            "prerelease": "",
            "url": f"file://{FOLDER_MARK}/{self.file_name}",
            "sha256": sha256,
            "variant": None,
            "build": self.build,
        }
        return json.dumps({self.key: entry}, indent=1) + "\n"


def parse_interpreter(path: Path) -> Interpreter:
    """Parse an archive's name. Raises UsageError."""
    found = _NAME.fullmatch(path.name)
    if found is None or not LEAST_PYTHON <= (3, int(found["minor"])) <= LAST_PYTHON:
        raise UsageError(
            f"{path.name} does not name a Python that a board could use",
            "It is an archive of python-build-standalone for Linux with glibc, Python 3.10 to 3.14, by its own name: "
            "cpython-3.11.14+20251120-aarch64-unknown-linux-gnu-install_only.tar.gz.",
        )
    name = found["name"].replace("%2B", "+")
    return Interpreter(int(found["minor"]), int(found["patch"]), found["build"], found["arch"], name)


def fetch_uv(arch: str, folder: Path) -> Path:
    """Fetch uv's program for a machine into `folder`, by pip and its pinned hash. Raises as `fetch_wheels`."""
    pins = choose_pins(read_resource("board-tools.txt"), MANAGED_PYTHON, arch)
    (wheel,) = fetch_wheels(pins, MANAGED_PYTHON, arch, folder)
    program = folder / "uv"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/scripts/uv")]
        program.write_bytes(archive.read(name))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    wheel.unlink()
    return program


def fetch_interpreter(series: str, arch: str, folder: Path) -> Path:
    """Fetch the newest managed build of a Python for another machine with uv; return the archive in `folder`.

    The source is uv's own configuration (UV_PYTHON_INSTALL_MIRROR names a mirror, also a `file://` one). Raises
    UnavailableError if it is not available.
    """
    with tempfile.TemporaryDirectory(prefix="farm-python-") as text:
        scratch = Path(text)
        try:
            uv = fetch_uv(platform.machine(), scratch)
            environment = pip_environment() | {"UV_PYTHON_CACHE_DIR": str(scratch / "cache")}
            command = [str(uv), "python", "install", "--no-config", "--no-bin"]
            command += ["--install-dir", str(scratch / "installed"), f"cpython-{series}-linux-{arch}-gnu"]
            run_tool(command, f"uv, fetching Python {series} for {arch},", FETCH_TIMEOUT_S, environment)
        except FarmError as error:
            raise UnavailableError(
                f"no Python {series} for {arch} can be fetched: {error.message}",
                "Fetch an install_only archive of python-build-standalone elsewhere and give it to farm board bundle "
                "--python FILE, or name a mirror by UV_PYTHON_INSTALL_MIRROR.",
            ) from error
        for archive in (scratch / "cache").rglob("*"):
            if archive.is_file() and _NAME.fullmatch(archive.name):
                target = folder / parse_interpreter(archive).file_name
                target.write_bytes(archive.read_bytes())
                return target
    raise TransientError(f"uv fetched Python {series} for {arch} and kept no archive of it")
