"""What benchmarks judge by: loops found in machine code, models that ONNX Runtime runs, kernels measured elsewhere."""

from __future__ import annotations

import collections
import importlib
import math
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


X86_LISTING = """
0000000000000000 <main_compute_>:
       0:      \tvxorps\t%xmm0, %xmm0, %xmm0
      10:      \tvbroadcastss\t4(%rbx,%r14), %ymm15
      17:      \tvfmadd213ps\t(%r11), %ymm15, %ymm13  # ymm13 = (ymm15 * ymm13) + mem
      20:      \tvmovups\t%ymm13, 192(%rsp)
      29:      \tvfmadd231ps\t160(%rsp), %ymm14, %ymm12
      30:      \tvfmadd231ss\t%xmm1, %xmm2, %xmm3
      37:      \taddq\t$8, %r14
      3b:      \tjne\t0x10 <main_compute_+0x10>
      41:      \tretq
"""


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("part", ["_loops"], indirect=True)
def test_innermost_loops_are_found_and_read(part: ModuleType) -> None:
    """Loops around loops, jumps to other functions and loops without arithmetic are left out; spills are counted."""
    first, second = part.find_loops(LISTING, "cortex-a57")
    assert (first.function, first.instructions, first.fmas, first.partial_fmas) == ("outer", 7, 2, 0)
    assert (first.stack_loads, first.stack_stores, first.vector_spills, first.vector_stores) == (1, 1, 1, 1)
    assert (second.function, second.fmas, second.partial_fmas) == ("other", 0, 2)
    assert (second.stack_loads, second.stack_stores, second.vector_spills, second.vector_stores) == (0, 0, 0, 1)


@pytest.mark.parametrize("part", ["_loops"], indirect=True)
@pytest.mark.parametrize(("core", "full"), [("znver3", 2), ("sapphirerapids", 0)])
def test_loops_of_x86_are_read_by_the_length_of_the_cores_vectors(part: ModuleType, core: str, full: int) -> None:
    """Destinations come last there: a store to the stack ends with it, and 256 bits are half a vector of AVX-512."""
    (loop,) = part.find_loops(X86_LISTING, core)
    assert (loop.fmas, loop.partial_fmas) == (full, 3 - full)
    assert (loop.stack_loads, loop.stack_stores, loop.vector_stores) == (1, 1, 1)
    assert loop.vector_spills == full


@pytest.mark.parametrize("part", ["kernels_static"], indirect=True)
def test_what_a_change_cost_a_core_is_told(part: ModuleType) -> None:
    """A share that fell by more than 3 %, and spills that were not there; what was not compared before is no loss."""
    before = [{"workload": name, "share": 0.9, "vector_spills": 0} for name in "abc"]
    after = [
        {"workload": "a", "share": 0.88, "vector_spills": 0},
        {"workload": "b", "share": 0.85, "vector_spills": 0},
        {"workload": "c", "share": 0.9, "vector_spills": 2},
        {"workload": "d", "share": 0.1, "vector_spills": 9},
    ]
    lost = part.compare({"cores": {"zen": {"rows": before}}}, {"zen": {"rows": after}})
    assert [(each["core"], each["workload"]) for each in lost] == [("zen", "b"), ("zen", "c")]


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


@pytest.mark.parametrize("part", ["_autotvm"], indirect=True)
def test_measured_kernels_are_whole(part: ModuleType) -> None:
    """The tiles of each record make up its result and its reduction; a kernel's blocks are theirs."""
    records = part.read_records()
    assert collections.Counter((each.board, each.operator) for each in records) == {
        ("jetson-tx2", "direct"): 133,
        ("jetson-tx2", "depthwise"): 9,
        ("jetson-nano", "direct"): 20,
        ("jetson-nano", "depthwise"): 18,
        ("gtx-1080-ti", "direct"): 24,
    }
    for each in records:
        tiles = {name: math.prod(numbers) for name, numbers in each.knobs.items() if name.startswith("tile")}
        result = dict(zip(("tile_f", "tile_y", "tile_x"), (each.filters, *each.result), strict=True))
        window = dict(zip(("tile_rc", "tile_ry", "tile_rx"), (each.channels, *each.window), strict=True))
        assert tiles == (result if each.operator == "depthwise" else result | window)
        kernel = part.make_kernel(each)
        assert kernel.grid == tuple(each.knobs[f"tile_{axis}"][0] for axis in "xyf")
        assert kernel.block == tuple(each.knobs[f"tile_{axis}"][2] for axis in "xyf")
