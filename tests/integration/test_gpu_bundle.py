"""`make gpu-bundle` and `gpu-bundle/run`, small and over the stand-in for the CUDA driver."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# In the place of compute-sanitizer: a write past the end ends the process that it examines.
SANITIZER = '#!/bin/sh\nwhile [ "${1%python*}" = "$1" ]; do shift; done\n"$@" || exit 9\n'


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("gpu") / "gpu-bundle"
    command = [sys.executable, "-m", "tests.gpu.bundle", "--quick", "--virtual", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return folder


def run(bundle: pathlib.Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the figures of the report, and the table."""
    report = bundle.parent / "report.json"
    command = [sys.executable, str(bundle / "run"), "--json", str(report), *options]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert report.exists(), done.stderr
    return done.returncode, json.loads(report.read_text())["figures"], done.stdout


def test_a_bundle_checks_kernels_models_and_faults(bundle: pathlib.Path) -> None:
    """All is right in both precisions, timed beside an estimate, and examined; the agent survives every fault."""
    sanitizer = bundle.parent / "compute-sanitizer"
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    status, figures, table = run(bundle, "--sanitizer", str(sanitizer))
    assert status == 0, table
    assert figures["wrong"] == figures["not_reached"] == []
    rows = figures["rows"]
    assert set(rows) == {"fault", "kernel", "model", "memcheck", "racecheck", "synccheck"}
    assert [row["message"].partition(":")[0] for row in rows["fault"]] == [
        "crashed",
        "run_timeout",
        "out_of_memory",
        "load_failed",
    ]
    families = {row["name"].partition(":")[0] for row in rows["kernel"]}
    assert families == {"gpu-tiles", "gpu-norm", "gpu-sums", "gpu-flat"}
    assert [row["name"] for row in rows["model"]] == ["tiny-cnn", "half tiny-cnn"]
    assert all(row["median_s"] > 0 and row["estimate_s"] > 0 for row in rows["kernel"] + rows["model"])
    assert (bundle.parent / "gpu-bundle.tar.gz").exists()


def test_a_wrong_result_fails_the_run(bundle: pathlib.Path) -> None:
    """The kernel is named; the others are right."""
    reference = bundle / "000.npz"
    kept = reference.read_bytes()
    (wanted,) = np.load(reference).values()
    wanted.flat[-1] += 1.0
    np.savez(reference, wanted)
    try:
        status, figures, table = run(bundle)
    finally:
        reference.write_bytes(kept)
    assert status == 1
    assert len(figures["wrong"]) == 2  # of both plans
    assert all("differs from the reference" in each and each in table for each in figures["wrong"])


def test_work_beyond_the_time_limit_is_listed(bundle: pathlib.Path) -> None:
    """None of it is dropped silently."""
    status, figures, table = run(bundle, "--minutes", "0.2")
    assert status == 0
    assert figures["checks"] == 0
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert len(figures["not_reached"]) == len(manifest["faults"]) + len(manifest["programs"])
    assert "not reached: model: half tiny-cnn" in table
