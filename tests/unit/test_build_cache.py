"""Libraries that were built before: what is found is what was kept, after any damage to the folder."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest

from farm.search.codegen import build_pool
from farm.search.codegen.build_pool import BuildCache, build_key

TARGET = {"kind": "llvm", "num-cores": 4}


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: pathlib.Path, notes: list[str]) -> BuildCache:
    return BuildCache(tmp_path / "builds", notes.append, max_bytes=1000)


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_key_names_everything_that_a_library_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module, target, kind of build or compiler is another library; the order of a target's words is not."""
    key = build_key("module", TARGET, False)
    assert key == build_key("module", dict(reversed(TARGET.items())), False)
    others = {
        build_key("module2", TARGET, False),
        build_key("module", {**TARGET, "num-cores": 2}, False),
        build_key("module", TARGET, True),
    }
    monkeypatch.setattr(build_pool, "compiler_versions", lambda: "another compiler")
    others.add(build_key("module", TARGET, False))
    assert len(others | {key}) == 5


def test_what_was_kept_is_found_by_every_cache_of_the_folder(cache: BuildCache, tmp_path: pathlib.Path) -> None:
    """A library comes back as it was, also in a later process; an unknown one is None, and nothing else is left."""
    assert cache.find("ab12") is None
    cache.keep("ab12", b"library")
    assert BuildCache(tmp_path / "builds", print).find("ab12") == b"library"
    assert cache.find("ab13") is None
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 32, b"x" * 39], ids=["empty", "short", "no library", "other"])
def test_a_damaged_file_is_removed(cache: BuildCache, tmp_path: pathlib.Path, damage: bytes) -> None:
    """A file that was cut off or changed is no library, and gives its place to the next one."""
    cache.keep("ab12", b"library")
    [path] = files_of(tmp_path)
    path.write_bytes(damage)
    assert cache.find("ab12") is None
    assert files_of(tmp_path) == []
    cache.keep("ab12", b"library")
    assert cache.find("ab12") == b"library"


def test_the_longest_unused_goes_first(cache: BuildCache, tmp_path: pathlib.Path, notes: list[str]) -> None:
    """Past its bound the cache drops what was not asked for, and keeps what was, though it is older."""
    for index, key in enumerate(("aa", "bb", "cc", "dd")):
        cache.keep(key, bytes(300))
        os.utime(tmp_path / "builds" / key / key, (index, index))
    assert cache.find("aa") is not None  # used now
    cache.trim()
    assert {key for key in ("aa", "bb", "cc", "dd") if cache.find(key)} == {"aa", "dd"}
    assert notes == []


def test_the_longest_unused_goes_first_past_the_bound(cache: BuildCache, tmp_path: pathlib.Path) -> None:
    """Nothing is dropped before the bound is passed."""
    for key in ("aa", "bb", "cc"):
        cache.keep(key, bytes(300))
    cache.trim()
    assert len(files_of(tmp_path)) == 3


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: pathlib.Path, notes: list[str]) -> None:
    """A cache that cannot keep anything finds nothing, raises nothing and says so once."""
    (tmp_path / "builds").write_text("a file where the folder should be")
    cache = BuildCache(tmp_path / "builds", notes.append)
    for key in ("aa", "bb"):
        cache.keep(key, b"library")
        assert cache.find(key) is None
    [note] = notes
    assert note.startswith("cannot cache built libraries in ")


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="this machine has no /dev/full")
def test_a_full_disk_costs_only_the_file(cache: BuildCache, tmp_path: pathlib.Path, notes: list[str]) -> None:
    """Where the disk is full nothing is kept, nothing half-written is left, and it is said."""
    part = tmp_path / "builds" / "aa" / f".aa.{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    cache.keep("aa", bytes(1 << 16))
    assert cache.find("aa") is None
    assert list(part.parent.iterdir()) == []
    assert "No space left" in notes[0]
