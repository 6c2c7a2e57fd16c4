"""The wheel, where nothing of the checkout is in reach."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.acceptance.conftest import Home

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_an_installed_wheel_tunes(home: Home) -> None:
    """In an environment of its own it makes first files, registers boards and tunes a model on one of them."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(home.path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = (home.path / "dist").iterdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "release" / "check.py"), str(wheel), "--quick"],
        cwd=home.path,
        env=os.environ | home.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "works where it is installed" in done.stdout
    home.expect_no_processes()
