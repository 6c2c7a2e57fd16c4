"""Bundles: reproducible, checked file by file, refused when damaged; pins chosen for a Python that is not ours."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import pathlib
import tarfile
import zipfile

import pytest

from farm.errors import InternalError, UsageError
from farm.provision import interpreters
from farm.provision.bundle import Bundle, BundleManifest, open_bundle, write_bundle
from farm.provision.bundle_build import BundleCache, BundleRecipe, find_agent_source, pack_agent, serves_gpus
from farm.provision.layout import read_resource
from farm.provision.wheels import choose_pins, pack_wheel, plan_platforms, slim_wheel
from farm.version import __version__

CONTENTS = {"requirements-3.11.txt": b"a==1\n", "wheels/a-1-py3-none-any.whl": b"wheel" * 1000}


def make(folder: pathlib.Path, name: str = "x.tar", managed: str = "", unpacked: int = 5000, **more: bytes) -> Bundle:
    contents = CONTENTS | more
    for path, data in contents.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_bytes(data)
    files = {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}
    return write_bundle(folder, BundleManifest("1.0", "aarch64", ("3.11",), managed, unpacked, files), folder / name)


def test_contents_decide_bytes_and_key(tmp_path: pathlib.Path) -> None:
    """Whenever it was made; and it reads back as it was written. The folder of a version is named after all that is in
    it.
    """
    first, second = make(tmp_path, "a.tar"), make(tmp_path, "b.tar")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert open_bundle(first.path).manifest == first.manifest
    assert first.manifest.key.startswith("1.0-")
    assert make(tmp_path).manifest.key != make(tmp_path, managed="cpython-3.11.9-linux-aarch64-gnu").manifest.key


@pytest.mark.parametrize("at", [0, 100, 700, 3000, 6000, -11000])
def test_a_truncated_bundle_is_refused(tmp_path: pathlib.Path, at: int) -> None:
    """Wherever the copy ended."""
    bundle = make(tmp_path)
    bundle.path.write_bytes(bundle.path.read_bytes()[:at])
    with pytest.raises(UsageError, match="not taken for a bundle"):
        open_bundle(bundle.path)


@pytest.mark.parametrize("old", [b"a==1", b"wheelwheel", b'"3.11"', b"aarch64"])
def test_a_changed_bundle_is_refused(tmp_path: pathlib.Path, old: bytes) -> None:
    """One byte of a file, or of the manifest's sums."""
    bundle = make(tmp_path)
    data = bundle.path.read_bytes()
    changed = data.replace(hashlib.sha256(CONTENTS["requirements-3.11.txt"]).hexdigest().encode(), b"0" * 64)
    assert changed != data
    bundle.path.write_bytes(changed)
    with pytest.raises(UsageError, match="was changed"):
        open_bundle(bundle.path)
    if old in (b"a==1", b"wheelwheel"):
        bundle.path.write_bytes(data.replace(old, old[::-1], 1))
        with pytest.raises(UsageError, match="was changed"):
            open_bundle(bundle.path)


@pytest.mark.parametrize(("unpacked", "name"), [(-5, ""), (True, ""), (1 << 60, ""), (5000, "manifest.json")])
def test_a_bundle_that_farms_do_not_write_is_refused(tmp_path: pathlib.Path, unpacked: int, name: str) -> None:
    """An impossible size, and a second manifest, even one that the first lists."""
    path = make(tmp_path, unpacked=unpacked, **{name: b"{}"} if name else {}).path
    with pytest.raises(UsageError, match=r"no (manifest|bundle) does"):
        open_bundle(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a b", "-rf", ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    """A bundle's files stay below the folder that it is unpacked to."""
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo(name)
        archive.addfile(entry, io.BytesIO())
    with pytest.raises(UsageError, match="which no bundle does"):
        open_bundle(path)


def test_what_is_no_bundle_is_refused(tmp_path: pathlib.Path) -> None:
    """A file of another kind, none at all, and a tar file without a manifest."""
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(UsageError, match="no whole tar file"):
        open_bundle(tmp_path / "text")
    with pytest.raises(UsageError, match="cannot be read"):
        open_bundle(tmp_path / "missing")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("file"), io.BytesIO())
    with pytest.raises(UsageError, match="does not begin with a manifest"):
        open_bundle(tmp_path / "other.tar")


def test_a_bundle_for_another_board_is_refused(tmp_path: pathlib.Path) -> None:
    """Another machine, or no Python that it has wheels for and none in it."""
    cache = BundleCache(tmp_path, make(tmp_path).path)
    assert cache.require("aarch64", ("3.12", "3.11")).manifest.arch == "aarch64"
    with pytest.raises(UsageError, match="is for aarch64, the board is x86_64"):
        cache.require("x86_64", ("3.11",))
    with pytest.raises(UsageError, match=r"has no Python >= 3\.10"):
        cache.require("aarch64", ())
    managed = make(tmp_path, "m.tar", "cpython-3.11.9-linux-aarch64-gnu")
    assert BundleCache(tmp_path, managed.path).require("aarch64", ()).manifest.managed_python


@pytest.mark.parametrize(("python", "numpy"), [("3.10", "2.2.6"), ("3.11", "2.4.6"), ("3.14", "2.5.5")])
def test_pins_are_chosen_for_the_boards_python(python: str, numpy: str) -> None:
    """Not for the one that runs this; each package once, with its hashes."""
    pins = choose_pins(read_resource("agent.txt"), python, "aarch64")
    assert [pin.version for pin in pins if pin.name == "numpy"] == [numpy]
    assert len({pin.name for pin in pins}) == len(pins) >= 10
    assert all(pin.sha256 for pin in pins)
    assert " ; " not in "".join(pin.to_text() for pin in pins)


def test_pins_and_wheels_are_what_boards_take() -> None:
    """A range, or a pin without its hash, is never installed. 2.27 is what JetPack 4 has."""
    for text in ("numpy>=2\n", "numpy==2.0\n"):
        with pytest.raises(InternalError, match="no pin"):
            choose_pins(text, "3.11", "x86_64")
    tags = plan_platforms("aarch64")
    assert tags[0] == "manylinux_2_27_aarch64"
    assert "manylinux_2_28_aarch64" not in tags
    assert "manylinux2014_aarch64" in tags


def test_tvm_is_shipped_without_its_compiler(tmp_path: pathlib.Path) -> None:
    """The rest stays, and the record names what is there; other wheels stay as they are."""
    wheel = tmp_path / "apache_tvm-1-py3-none-any.whl"
    contents = {"tvm/lib/libtvm_compiler.so": b"big", "tvm/lib/libtvm_runtime.so": b"small", "tvm/__init__.py": b""}
    pack_wheel(wheel, contents, "apache_tvm-1.dist-info/RECORD")
    slim_wheel(wheel)
    archive = zipfile.ZipFile(wheel)
    assert archive.namelist() == ["tvm/__init__.py", "tvm/lib/libtvm_runtime.so", "apache_tvm-1.dist-info/RECORD"]
    assert b"libtvm_compiler" not in archive.read("apache_tvm-1.dist-info/RECORD")
    other = tmp_path / "other-1-py3-none-any.whl"
    other.write_bytes(b"anything")
    slim_wheel(other)
    assert other.read_bytes() == b"anything"


def test_the_agents_wheel_is_the_boards_half(tmp_path: pathlib.Path) -> None:
    """The agent and the board types, no simulator and nothing else of the farm's code; equal sources, equal bytes."""
    first = pack_agent(find_agent_source(), tmp_path).read_bytes()
    wheel = pack_agent(find_agent_source(), tmp_path)
    assert wheel.read_bytes() == first
    assert wheel.stat().st_size <= 350_000
    rooms: dict[str, set[str]] = {}
    for name in map(pathlib.PurePosixPath, zipfile.ZipFile(wheel).namelist()):
        rooms.setdefault(str(name.parent), set()).add(name.suffix)
    parts = ("clocks", "listener", "platforms", "power", "protocol", "session", "worker")
    assert rooms == {
        "device_agent": {".py", ".typed"},
        "device_agent/native": {".cc", ".h"},  # the GPU's plug-in
        **{f"device_agent/{part}": {".py"} for part in parts},
        "farm/inventory/data/board_types": {".yaml"},
        f"tvm_farm-{__version__}.dist-info": {"", ".txt"},
    }


def test_what_an_agent_for_gpus_brings_is_for_one_machine(tmp_path: pathlib.Path) -> None:
    """The plug-in lies beside its sources, and the wheel says where it may be installed; boards without a GPU, which is
    what all of x86-64 are, are given none.
    """
    added = {"device_agent/native/plugin.so": b"\x7fELF"}
    wheel = pack_agent(find_agent_source(), tmp_path, added, "manylinux_2_27_aarch64")
    assert wheel.name.endswith("-py3-none-manylinux_2_27_aarch64.whl")
    archive = zipfile.ZipFile(wheel)
    assert archive.read("device_agent/native/plugin.so") == b"\x7fELF"
    (about,) = [name for name in archive.namelist() if name.endswith("/WHEEL")]
    assert "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_27_aarch64\n" in archive.read(about).decode()
    assert serves_gpus("aarch64")
    assert not serves_gpus("x86_64")


@pytest.mark.parametrize(("arch", "tool"), [("aarch64", "ziglang"), ("aarch64", "apache-tvm"), ("x86_64", "")])
def test_another_tool_makes_another_bundle(arch: str, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle with a GPU plug-in that an older compiler built, or for an older TVM, is not taken; one without is."""
    recipe = BundleRecipe(arch, ("3.11",))
    before, version = recipe.compute_key(), importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if not tool or name == tool else version(name)
    )
    assert (recipe.compute_key() == before) == (tool == "")


@pytest.mark.parametrize(
    "name",
    [
        "python.tar.gz",
        "cpython-3.9.1+20240101-aarch64-unknown-linux-gnu-install_only.tar.gz",
        "cpython-3.11.1+20240101-aarch64-unknown-linux-musl-install_only.tar.gz",
        "cpython-3.11.1+20240101-aarch64-apple-darwin-install_only.tar.gz",
    ],
)
def test_an_archive_that_no_board_could_use_is_refused(name: str) -> None:
    """Too old, for musl, for another system, or of an unknown kind."""
    with pytest.raises(UsageError, match="does not name a Python"):
        interpreters.parse_interpreter(pathlib.Path(name))


def test_an_archive_says_what_it_is() -> None:
    """As published, and as a cache of uv's names it."""
    name = "cpython-3.11.14+20251120-aarch64-unknown-linux-gnu-install_only_stripped.tar.gz"
    for text in (name, "24b287191-" + name.replace("+", "%2B")):
        found = interpreters.parse_interpreter(pathlib.Path(text))
        assert (found.version, found.series, found.file_name) == ("3.11.14", "3.11", name)
        assert found.key == "cpython-3.11.14-linux-aarch64-gnu"
