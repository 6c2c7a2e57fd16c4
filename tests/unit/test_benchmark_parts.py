"""What benchmarks judge by: loops found in machine code, models that ONNX Runtime runs."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"

LISTING = """
one.o:  file format elf64-littleaarch64

Disassembly of section .text:

0000000000000000 <outer>:
       0:       mov     x8, xzr
       4:       ldr     q0, [x0]
       8:       fmla    v1.4s, v0.4s, v2.s[0]
       c:       fmla    v3.4s, v0.4s, v2.s[1]
      10:       str     q1, [sp, #32]
      14:       ldr     x9, [sp, #8]
      18:       subs    x8, x8, #1
      1c:       b.ne    0x4 <outer+0x4>
      20:       fmla    v7.4s, v0.4s, v2.s[1]
      24:       cbnz    x10, 0x0 <outer>
      28:       ret

000000000000002c <other>:
      2c:       fmla    v1.2s, v0.2s, v2.2s
      30:       fmadd   s1, s2, s3, s1
      34:       stp     q4, q5, [x1], #32
      38:       tbnz    w8, #0, 0x2c <other>
      3c:       b       0x0 <outer>
      40:       add     x0, x0, #1
      44:       b       0x40 <other+0x14>
"""


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """A module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("part", ["_loops"], indirect=True)
def test_innermost_loops_are_found_and_read(part: ModuleType) -> None:
    """Loops around loops, jumps to other functions and loops without arithmetic are left out; spills are counted."""
    first, second = part.find_loops(LISTING)
    assert (first.function, first.instructions, first.fmas, first.partial_fmas) == ("outer", 7, 2, 0)
    assert (first.stack_loads, first.stack_stores, first.vector_spills, first.vector_stores) == (1, 1, 1, 1)
    assert (second.function, second.fmas, second.partial_fmas) == ("other", 0, 2)
    assert (second.stack_loads, second.stack_stores, second.vector_spills, second.vector_stores) == (0, 0, 0, 1)


@pytest.mark.parametrize("part", ["_small_models"], indirect=True)
def test_thirty_small_models_run(part: ModuleType) -> None:
    """ONNX Runtime runs every one of them, and its outputs vary."""
    assert len(part.MODELS) == 30
    part.check()


@pytest.mark.parametrize("part", ["_small_models"], indirect=True)
def test_small_models_are_functions_of_their_seed(part: ModuleType) -> None:
    """The same seed gives the same bytes, another one others."""
    model = part.MODELS["quantised"]
    assert model.build(1) == model.build(1) != model.build(2)
