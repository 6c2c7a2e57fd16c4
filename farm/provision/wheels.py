"""Wheels for a board of another machine: fetched by pip with pinned hashes, TVM's without its compiler.

The user's own pip configuration chooses the source. Builds and installs nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

from packaging.markers import Marker

from device_agent.protocol.interpreters import python_command
from farm import folders
from farm.errors import DeadlineError, InternalError, PermanentError, TransientError, UnavailableError

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;]+)(?: ; (?P<marker>.+))?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")

ARCHS = ("aarch64", "x86_64")
# The oldest supported glibc: TVM's wheels require it, and JetPack 4 has it.
LEAST_GLIBC_MINOR = 27
# For pip to fetch a board's wheels.
FETCH_TIMEOUT_S = 900.0
# The compiler (248 MB), which an agent never loads: it runs with TVM_USE_RUNTIME_LIB=1. The CUDA runtime needs a
# libcudart of release 13, which no supported board has. Headers and sources are for building against TVM.
_TVM = "apache_tvm-"
_LEFT_OUT = (
    "tvm/lib/libtvm_compiler",
    "tvm/lib/libtvm_runtime_cuda",
    "tvm/3rdparty/",
    "tvm/include/",
    "tvm/src/",
    "tvm/web/",
)
# The earliest date in a zip: repacking must be reproducible.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class PinnedPackage:
    """One package at one version; `sha256` lists its files' hashes, any of which may match."""

    name: str
    version: str
    sha256: tuple[str, ...]

    def to_text(self) -> str:
        """A line of a requirements file."""
        return f"{self.name}=={self.version}" + "".join(f" --hash=sha256:{digest}" for digest in self.sha256)


def choose_pins(text: str, python: str, arch: str) -> tuple[PinnedPackage, ...]:
    """The pins of a requirements file that apply on Linux with `python` (`3.11`) and `arch` (`aarch64`).

    Raises InternalError for a line that is neither a pin nor its hash.
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


def _environment(python: str, arch: str) -> dict[str, str]:
    """A board's environment in PEP 508's terms."""
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


_running: set[subprocess.Popen[str]] = set()


def fetch_wheels(pins: Collection[PinnedPackage], python: str, arch: str, folder: Path) -> tuple[Path, ...]:
    """Fetch the wheels of `pins` into `folder`, each checked against its pinned hash.

    Raises UnavailableError (no pip), TransientError (pip found or reached nothing), DeadlineError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{pin.to_text()}\n" for pin in sorted(pins, key=lambda pin: pin.name)))
    command = python_command("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input")
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp"]
    command += ["--python-version", python, "--dest", str(folder), "--requirement", str(wanted)]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in plan_platforms(arch):
        command += ["--platform", platform]
    run_tool(command, f"pip, fetching wheels for {arch} and Python {python},", FETCH_TIMEOUT_S)
    wanted.unlink()
    return tuple(sorted(folder.glob("*.whl")))


def plan_platforms(arch: str) -> tuple[str, ...]:
    """The platform tags that a board of `arch` with the oldest glibc accepts, newest first."""
    older = {"x86_64": ("manylinux2014", "manylinux2010", "manylinux1")}.get(arch, ("manylinux2014",))
    first = 5 if arch == "x86_64" else 17
    minors = range(LEAST_GLIBC_MINOR, first - 1, -1)
    return (*(f"manylinux_2_{minor}_{arch}" for minor in minors), *(f"{name}_{arch}" for name in older))


def slim_wheel(wheel: Path) -> None:
    """Remove from TVM's wheel what a board does not need, reproducibly; other wheels stay unchanged."""
    if not wheel.name.startswith(_TVM):
        return
    with zipfile.ZipFile(wheel) as archive:
        contents = {
            info.filename: archive.read(info)
            for info in archive.infolist()
            if not info.is_dir()
            and not info.filename.startswith(_LEFT_OUT)
            and not info.filename.endswith(".dist-info/RECORD")
        }
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    with folders.new_file(wheel) as part:
        pack_wheel(part, contents, record)


def pack_wheel(path: Path, contents: Mapping[str, bytes], record: str) -> None:
    """Write a wheel of `contents` (name -> bytes), with a RECORD of that name, reproducibly."""
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
            lines.append(f"{_quote(name)},sha256={digest},{len(contents[name])}\n")
            archive.writestr(_entry(name), contents[name])
        archive.writestr(_entry(record), "".join([*lines, f"{record},,\n"]))


def run_tool(command: list[str], what: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a tool and return its output. Raises DeadlineError, TransientError, UnavailableError."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment) if environment is not None else None,
        )
    except OSError as error:
        raise UnavailableError(f"{what} cannot be started: {error}") from error
    with process:
        _running.add(process)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{what} did not finish within {timeout_s:g} s") from error
        finally:
            _running.discard(process)
            process.kill()  # no effect after its end
    if process.returncode == 0:
        return out
    said = " | ".join(line for line in err.strip().splitlines()[-6:] if not line.startswith("WARNING"))
    if "No module named pip" in err:
        raise UnavailableError(f"{sys.executable} has no pip, to fetch a board's wheels", "Set up again: make setup.")
    if "DO NOT MATCH THE HASHES" in err:
        raise PermanentError(f"{what} got another wheel than the pinned one: {said}", "Look at where pip fetches from.")
    if "No space left" in err:
        raise UnavailableError(f"{what} ran out of disk space here", "Free some space, or set FARM_HOME elsewhere.")
    raise TransientError(
        f"{what} failed: {said or f'exit code {process.returncode}'}", "Can this machine reach its package index?"
    )


def end_tools() -> None:
    """End all running tools after an interruption; their callers get an error."""
    for process in list(_running):
        process.kill()


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (0o755 if name.endswith((".so", "/bin/uv")) or ".so." in name else 0o644) << 16
    info.create_system = 3  # Unix, on every host
    return info


def _quote(name: str) -> str:
    return f'"{name}"' if "," in name else name


def unpacked_bytes(wheel: Path) -> int:
    """A wheel's installed size."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(info.file_size for info in archive.infolist())


def pip_environment() -> dict[str, str]:
    """Return the environment without variables that would leak this interpreter into a tool's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
