"""Link shared libraries with the `ziglang` wheel, for the host and for boards.

`link_candidate` calls the wheel's LLD, `link_artifact` its C driver. No system compiler is needed, and every machine
produces the same bytes.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ziglang

from farm.errors import DeadlineError, PermanentError, UnavailableError

# Linking takes 0.1 s; the first use of ziglang builds its C library.
LINK_TIMEOUT_S = 60.0
# The C driver builds its libc stubs and compiler runtime on first use: 4.7 s measured on one core.
WARM_TIMEOUT_S = 300.0
# Without this the driver also builds a runtime for its undefined-behaviour checks (17 s), which no library here uses.
_NO_CHECKS = "-fno-sanitize=undefined"


def link_candidate(output: Path, objects: list[Path]) -> None:
    """Link a library for one measurement inside a TVM runtime process.

    LLD alone takes a quarter of the C driver's time. The dynamic loader resolves the rest
    (memset, expf) from the libc and libm of the runtime process.
    """
    _run(["ld.lld", "-shared", "-O0", "-o", str(output), *map(str, objects)], LINK_TIMEOUT_S)


def link_artifact(output: str, objects: list[str], triple: str | None = None, options: list[str] | None = None) -> None:
    """Link a library to ship, with all its dependencies named, for the glibc of `triple`.

    `triple` is Zig's form, such as `aarch64-linux-gnu.2.27`; None is this machine's.
    """
    command = ["cc", "-shared", _NO_CHECKS, "-o", str(output), *map(str, objects), *(options or []), "-lm"]
    if triple:
        command += ["-target", triple]
    _run(command, WARM_TIMEOUT_S)


def link_program(output: Path, sources: list[Path], triple: str | None, options: list[str]) -> None:
    """Compile and link a C program for the glibc of `triple`; None is this machine's."""
    command = ["cc", "-std=c11", "-O2", _NO_CHECKS, "-o", str(output), *map(str, sources), *options]
    _run([*command, "-target", triple] if triple else command, WARM_TIMEOUT_S)


def link_cpp(output: Path, sources: Sequence[Path], triple: str | None, options: Sequence[str] = ()) -> None:
    """Compile and link a C++ library that uses the libstdc++ of the process that loads it.

    Zig's own libc++ is excluded: exceptions cannot cross between the two, and its first use builds for a minute.
    """
    target = ["-target", triple] if triple else []
    with tempfile.TemporaryDirectory(prefix="farm-cpp-") as folder:
        objects = [Path(folder) / f"{index}.o" for index, _ in enumerate(sources)]
        compile_one = ["c++", "-c", "-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", _NO_CHECKS]
        for source, item in zip(sources, objects, strict=True):
            _run([*compile_one, *options, str(source), "-o", str(item), *target], WARM_TIMEOUT_S)
        libraries = ["-lm", "-ldl", "-lpthread"]
        _run(
            ["cc", "-shared", "-s", _NO_CHECKS, "-o", str(output), *map(str, objects), *libraries, *target],
            WARM_TIMEOUT_S,
        )


def find_package(name: str) -> Path:
    """Return the folder of an installed package without importing it. Raises UnavailableError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def warm(folder: Path, triple: str | None) -> None:
    """Fill the C driver's cache for `triple` by linking an empty library in `folder`."""
    source = folder / "warm.c"
    source.write_text("int farm_warm(void) { return 0; }\n")
    link_artifact(str(folder / "warm.so"), [str(source)], triple)


def _run(arguments: list[str], timeout_s: float) -> None:
    command = [_zig(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=_environment())
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the linker (zig {arguments[0]}) did not finish within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise PermanentError(f"the linker (zig {arguments[0]}) failed: {done.stderr.strip()[-2000:]}")


@functools.cache
def _zig() -> str:
    """Return the wheel's binary; `python -m ziglang` would start an interpreter per link."""
    return str(Path(str(ziglang.__file__)).with_name("zig"))


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    cache = environment.get("FARM_ZIG_CACHE")
    if cache:
        environment["ZIG_GLOBAL_CACHE_DIR"] = cache
        environment["ZIG_LOCAL_CACHE_DIR"] = cache
    return environment
