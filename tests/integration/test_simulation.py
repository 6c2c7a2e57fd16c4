"""Whole farms that seeds decide: what must hold does, a seed repeats itself, and faults in the code are found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.mutant import MUTANTS, ROOT

_SEEDS = 64


def play(*words: str, module: str = "farm.testing.simulation") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=580, check=False)


@pytest.mark.core
def test_farms_of_many_seeds_hold() -> None:
    """No trial is lost or counted twice, no two holders act at once, campaigns end, while things fail."""
    played = play("--seeds", str(_SEEDS))
    assert played.returncode == 0, played.stdout + played.stderr
    assert f"{_SEEDS} seeds, 0 broken" in played.stdout


@pytest.mark.core
def test_a_seed_repeats_itself() -> None:
    """The story of a seed is the same in each process, to the millisecond."""
    first, second = (play("--seed", "12") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(first.stdout.splitlines()) > 10
    assert first.stdout == second.stdout


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.seed is not None])
def test_a_fault_in_the_code_is_found(name: str) -> None:
    """One line of the product says something else: the seed beside it finds out, and holds without the change."""
    played = play(name, str(MUTANTS[name].seed), "1", module="tests.mutant")
    assert played.returncode == 0, played.stderr
    assert played.stdout.startswith(f"{MUTANTS[name].seed}: "), played.stdout
