"""What a wheel of this project carries, built without a network as an installer would."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120)
    (path,) = folder.glob("tvm_farm-*.whl")
    return path


def test_carries_code_and_data_only(wheel: pathlib.Path) -> None:
    """Both packages, the board types beside their reader and the licence are in; tests and benchmarks are not."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"farm", "device_agent", "tvm_farm"}
    assert "farm/inventory/data/board_types/local.yaml" in names
    assert "farm/inventory/data/schemas/fleet.schema.json" in names
    assert {"farm/py.typed", "device_agent/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_finds_its_data_when_installed(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An installed copy reads its own board types, not those of a checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "from farm.inventory import board_types, documents; board_types.load_board_types(); print(documents.__file__)"
    )
    # The unpacked wheel comes before the editable checkout on the path.
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(str(tmp_path))


def test_console_scripts(wheel: pathlib.Path) -> None:
    """The two commands of the README are there."""
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(entry_points).decode()
    assert "farm = farm.cli.entry:main" in text
    assert "device-agent = device_agent.agent:main" in text


def test_the_same_bytes_from_the_source_archive(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Built in another folder, at another time, by another user's umask, from the archive instead of the checkout."""

    def build(source: pathlib.Path, target: str) -> pathlib.Path:
        folder = tmp_path / target
        command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
        [path] = folder.iterdir()
        return path

    before = os.umask(0o077)
    try:
        shutil.unpack_archive(build(ROOT, "sdist"), tmp_path / "source", filter="data")
        [source] = (tmp_path / "source").iterdir()
        for path in source.rglob("*"):
            os.utime(path, (1e9, 1e9))
        again = build(source, "wheel")
    finally:
        os.umask(before)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_it_needs_what_it_imports(wheel: pathlib.Path) -> None:
    """The wheel installs what the farm needs, with extras for optional parts."""
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:")]
    assert "Requires-Dist: apache-tvm==0.27.0.post1" in needed
    assert any(line.startswith("Requires-Dist: typer") and "extra" not in line for line in needed)
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra:")}
    assert {"postgresql", "torch", "gpu", "emulator"} <= extras
