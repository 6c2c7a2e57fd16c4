"""What a board's agent needs for its GPU beside Python, built with zig: TVM's plug-in, and a virtual board's driver."""

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
    """Build the stand-in for the CUDA driver that virtual boards have."""
    linker.link_cpp(folder / DRIVER, [find_virtual_gpu() / "driver.cc"], triple)
    return folder / DRIVER


def read_files(triple: str | None, *, simulated: bool) -> dict[str, bytes]:
    """By name, what travels with code for a GPU to a system that zig calls `triple`; for simulated boards their driver,
    too. The first time for a system takes a minute; the linker's cache has it then.
    """
    builds = (build_plugin, build_driver) if simulated else (build_plugin,)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-") as folder:
        return {path.name: path.read_bytes() for path in (build(Path(folder), triple) for build in builds)}


def list_tools() -> list[str]:
    """What libraries are built with and against, with versions: others give other libraries."""
    return [f"{name} {importlib.metadata.version(name)}" for name in _TOOLS]


def find_folder(home: Path) -> Path:
    """Where what virtual boards of this home need is kept, named after what it is made of."""
    return home / "cache" / "gpu" / _digest()


def prepare(home: Path) -> None:
    """Build what virtual boards of this home need, unless it is there. Two processes may do so at once."""
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
    """The folder with what plays a GPU."""
    return _find_package("device_agent") / "virtual" / "gpu"


def _find_package(name: str) -> Path:
    """Where a package is installed, without importing it. Raises UnavailableError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))
