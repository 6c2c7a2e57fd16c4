"""Libraries that the linker really makes, read back from their bytes."""

from __future__ import annotations

import ctypes
import pathlib
import re

import pytest

from farm import linker
from farm.errors import PermanentError

pytestmark = pytest.mark.core

_SOURCE = """
#include <math.h>
#include <string.h>
float grow(float x) { return expf(x); }
void clear(char *at, unsigned long size) { memset(at, 0, size); }
"""
_MACHINE = {62: "x86_64", 183: "aarch64"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("linker") / "source.c"
    path.write_text(_SOURCE)
    return str(path)


def machine(library: bytes) -> str:
    assert library.startswith(b"\x7fELF")
    return _MACHINE[int.from_bytes(library[18:20], "little")]


def needed_glibc(library: bytes) -> list[tuple[int, int]]:
    return [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]


def test_an_artifact_for_this_machine_loads_and_runs(source: str, tmp_path: pathlib.Path) -> None:
    """Linked without a triple, the library works here by itself."""
    output = tmp_path / "host.so"
    linker.link_artifact(str(output), [source])
    library = ctypes.CDLL(str(output))
    library.grow.restype = ctypes.c_float
    library.grow.argtypes = [ctypes.c_float]
    assert library.grow(1.0) == pytest.approx(2.7182818)


def test_an_artifact_for_jetpack_4(source: str, tmp_path: pathlib.Path) -> None:
    """For aarch64-linux-gnu.2.27 it is an aarch64 library that names its libraries and asks for no newer glibc."""
    output = tmp_path / "board.so"
    linker.link_artifact(str(output), [source], "aarch64-linux-gnu.2.27")
    library = output.read_bytes()
    assert machine(library) == "aarch64"
    assert b"libc.so.6" in library
    assert b"libm.so.6" in library
    versions = needed_glibc(library)
    assert versions
    assert max(versions) <= (2, 27)


def test_warming_leaves_a_usable_cache(tmp_path: pathlib.Path) -> None:
    """Warming links an empty library for the triple. What the linker complains about is in the error."""
    linker.warm(tmp_path, "aarch64-linux-gnu.2.27")
    assert machine((tmp_path / "warm.so").read_bytes()) == "aarch64"
    broken = tmp_path / "broken.o"
    broken.write_bytes(b"no object")
    with pytest.raises(PermanentError, match=r"zig ld\.lld.*broken\.o"):
        linker.link_candidate(tmp_path / "out.so", [broken])
    with pytest.raises(PermanentError, match="zig cc"):
        linker.link_artifact(str(tmp_path / "out.so"), [str(tmp_path / "missing.o")])
