"""docs/tutorial.md, followed as it is written, with virtual boards that run their own aarch64 code."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import zipfile

import pytest

from tests import release_scripts
from tests.acceptance.conftest import new_home

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_tutorial_ends_with_a_wheel() -> None:
    """Every command works in its order, and the campaign ends with a verified aarch64 wheel."""
    tutorial = release_scripts.load("tutorial")
    steps = tutorial.read_steps(tutorial.PAGE.read_text(encoding="utf-8"))
    assert sum(isinstance(step, tutorial.Command) for step in steps) > 8
    with new_home() as home:
        for step in steps:
            if isinstance(step, tutorial.File):
                (home.path / step.path).write_text(step.text)
                continue
            assert not step.picture or (ROOT / "docs" / "images" / step.picture).is_file(), step.picture
            done = home.run(*step.words, timeout_s=400.0)
            assert done.code == 0, f"{step.words}: {done.err}"
        manifest = json.loads((home.path / "packages" / "mlp-jetson-nano" / "manifest.json").read_text())
        assert manifest["verified"]["matches"]
        assert {one["source"] for one in manifest["workloads"]} <= {"record", "rule"}
        (wheel,) = (home.path / "packages").glob("mlp-*aarch64.whl")
        assert any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
        _run_the_wheel(tutorial.PAGE.read_text(encoding="utf-8"), home.path)
        assert home.count_trials() >= 12
        home.expect_no_processes()


def _run_the_wheel(page: str, folder: pathlib.Path) -> None:
    """Follow the block that runs the wheel in an emulated board, where there is one; CI requires it."""
    build = ROOT / "deploy" / "emulated-board" / "build"
    checked = subprocess.run([build, "--check"], capture_output=True, text=True, timeout=60, check=False)
    if checked.returncode != 0 and os.environ.get("FARM_REQUIRE_EMULATED_BOARD") != "1":
        return
    [block] = [text for text in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "board-python" in text]
    script = block.replace("deploy/emulated-board/build", str(build))
    # The home's own folder holds modules that shadow NumPy's name, for commands of the farm.
    own = folder / "wheel"
    own.mkdir()
    (own / "packages").symlink_to(folder / "packages")
    done = subprocess.run(["bash", "-euc", script], cwd=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "'shape': [1, 64]" in done.stdout, done.stdout


def test_a_block_that_is_no_step_is_refused() -> None:
    """A page with blocks that cannot be run does not count as run."""
    tutorial = release_scripts.load("tutorial")
    for block in ("```sh\nls\n```\n", "```yaml\nname: first\n```\n"):
        with pytest.raises(ValueError, match="no"):
            tutorial.read_steps(block)
