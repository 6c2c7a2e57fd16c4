"""Build the native libraries of a board's GPU with zig: TVM's plug-in and a virtual board's CUDA driver."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import tempfile
from pathlib import Path

from farm import folders, linker
from farm.errors import UnavailableError

PLUGIN = "libtvm_farm_cuda.so"
DRIVER = "libcuda_virtual.so"
_TOOLS = ("apache-tvm", "apache-tvm-ffi", "ziglang")


def build_plugin(folder: Path, triple: str | None) -> Path:
    """Build TVM's device "cuda" over the CUDA driver, for a system that zig calls `triple` (None: this machine)."""
    sources = _find_package("device_agent") / "native"
    includes = [_find_package(name) / "include" for name in ("tvm", "tvm_ffi")]
    options = [word for path in includes for word in ("-I", str(path), f"-ffile-prefix-map={path}=include")]
    linker.link_cpp(folder / PLUGIN, sorted(sources.glob("*.cc")), triple, options)
    return folder / PLUGIN


def build_driver(folder: Path, triple: str | None) -> Path:
    """Build the substitute for the CUDA driver of virtual boards."""
    linker.link_cpp(folder / DRIVER, [find_virtual_gpu() / "driver.cc"], triple)
    return folder / DRIVER


def read_files(triple: str | None, *, simulated: bool) -> dict[str, bytes]:
    """Return the files that accompany GPU code to a system that zig calls `triple`, with the driver if `simulated`.

    The first build for a system takes a minute; then the linker's cache has it.
    """
    builds = (build_plugin, build_driver) if simulated else (build_plugin,)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-") as folder:
        return {path.name: path.read_bytes() for path in (build(Path(folder), triple) for build in builds)}


def list_tools() -> list[str]:
    """List the tools that the libraries are built with, with versions that identify the result."""
    return [f"{name} {importlib.metadata.version(name)}" for name in _TOOLS]


def find_folder(home: Path) -> Path:
    """Return the folder of this home's libraries, named by a hash of their sources and tools."""
    return home / "cache" / "gpu" / _digest()


def prepare(home: Path) -> None:
    """Build the missing libraries of this home. Safe in concurrent processes."""
    folder = find_folder(home)
    folders.make_private(folder)
    for name, build in ((PLUGIN, build_plugin), (DRIVER, build_driver)):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
                build(Path(partial), None).replace(folder / name)


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(repr(list_tools()).encode())
    for path in sorted([*(_find_package("device_agent") / "native").iterdir(), *find_virtual_gpu().iterdir()]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_virtual_gpu() -> Path:
    """Return the folder of the virtual GPU's sources."""
    return _find_package("device_agent") / "virtual" / "gpu"


def _find_package(name: str) -> Path:
    """Return the folder of an installed package without importing it. Raises UnavailableError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))
