"""What an emulated core makes of instructions: kinds, pipes, and that nothing beats them. No emulator runs here."""

from __future__ import annotations

import ast
import pathlib
import struct

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

from device_agent.board_types import load_board_types
from device_agent.protocol import count_seconds
from farm.virtual.emulated import estimate
from farm.virtual.emulated.elf import Elf, ElfError
from farm.virtual.emulated.estimate import Block, Estimator, Misses, merge
from farm.virtual.emulated.isa import Decoder, find_kind
from farm.virtual.emulated.pipeline import Pipeline, load_core
from farm.virtual.emulated.runs import read_executable

ROOT = pathlib.Path(__file__).parents[2]
DESCRIBED = sorted(path.stem for path in (ROOT / "inventory/core_types").glob("*.yaml") if load_core(path.stem))
CORE = load_core("cortex-a57") or {}
PIPELINE = Pipeline(CORE["pipeline"])
# As an assembler encodes them (Arm ARM, C7.2): fmla v0.4s, v1.4s, v2.4s and others that do not wait for each other.
FMLA = [0x4E20CC00 | number | 30 << 5 | 31 << 16 for number in range(24)]
LDR_Q, ADD_X, RET = 0x3DC00000, 0x8B020020, 0xD65F03C0


def code(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


@pytest.mark.parametrize(
    ("mnemonic", "operands", "kind"),
    [
        ("fmla", "v0.4s, v1.4s, v2.s[1]", "fma_q"),
        ("fmla", "v0.2s, v1.2s, v2.2s", "fma"),
        ("fmadd", "s0, s1, s2, s3", "fma"),
        ("fadd", "v0.4s, v1.4s, v2.4s", "fp_q"),
        ("fmla", "v0.8h, v1.8h, v2.h[7]", "fma_q"),
        ("fdiv", "s0, s1, s2", "fp_divide"),
        ("smlal", "v0.8h, v1.8b, v2.8b", "vector_multiply_long_q"),
        ("sadalp", "v0.4s, v1.8h", "vector_add_pairs_q"),
        ("sdot", "v0.4s, v1.16b, v2.4b[1]", "vector_dot_q"),
        ("ldp", "q0, q1, [x0]", "load_vector_pair_q"),
        ("ldp", "x0, x1, [sp], #16", "load_pair"),
        ("ldr", "q0, [x0, #16]", "load_vector_q"),
        ("ldr", "x0, [x1]", "load"),
        ("ld1r", "{v0.4s}, [x0]", "load_lane"),
        ("ld1", "{v0.4s, v1.4s}, [x0]", "load_vectors_q"),
        ("ld2", "{v0.4s, v1.4s}, [x0]", "load_woven_q"),
        ("stp", "q0, q1, [x0]", "store_vector_pair_q"),
        ("str", "s0, [x0]", "store_vector"),
        ("dup", "v0.4s, w1", "transfer_q"),
        ("zip1", "v0.4s, v1.4s, v2.4s", "permute_q"),
        ("add", "x0, x1, x2", "integer"),
        ("add", "x0, x1, x2, lsl #4", "shifted"),
        ("madd", "x0, x1, x2, x3", "multiply_x"),
        ("udiv", "w0, w1, w2", "divide"),
        ("b.ne", "#0x10", "branch"),
        ("blr", "x1", "call"),
        ("prfm", "pldl1keep, [x0]", "prefetch"),
    ],
)
def test_kinds(mnemonic: str, operands: str, kind: str) -> None:
    """An instruction is of the kind that cores' guides list."""
    assert find_kind(mnemonic, operands)[0] == kind


def test_pipes_issue_at_their_rate() -> None:
    """A 128-bit FMA takes both of the Cortex-A57's vector pipes: one in a cycle, if none waits for another. A
    Cortex-A57 begins one `smull` a cycle, and one `sadalp` beside it; two of either take two cycles. A load to all
    lanes and a product of it, again and again in one register: products at the pipe's rate.
    """
    cycles = PIPELINE.count_cycles(Decoder().read(code(*FMLA)))
    assert cycles == pytest.approx(len(FMLA), rel=0.02)
    assert cycles >= len(FMLA)
    products = [0x0E20C000 | number | 30 << 5 | 31 << 16 for number in range(12)]
    sums = [0x4E606800 | 12 + number | 30 << 5 for number in range(12)]
    took = [PIPELINE.count_cycles(Decoder().read(code(*words))) for words in (products, sums, [*products, *sums])]
    assert took == pytest.approx([12, 12, 12], rel=0.1)
    loop = [0x0D40C41F, 0x0E20C000 | 30 << 16 | 31 << 5] * 6  # ld1r {v31.4h}, [x0]; smull v0.8h, v31.8b, v30.8b
    assert PIPELINE.count_cycles(Decoder().read(code(*loop))) == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize("name", DESCRIBED)
def test_prices_and_predictions_know_the_same_core(name: str) -> None:
    """FMAs and loads take the time of the core's own facts, from which the search predicts."""
    core = load_core(name)
    facts = yaml.safe_load((ROOT / f"inventory/core_types/{name}.yaml").read_text())
    assert core["freq_hz"] == facts["freq_hz"]
    pipeline = Pipeline(core["pipeline"])
    in_turns = FMLA * 2
    cycles = pipeline.count_cycles(Decoder().read(code(*in_turns)))
    assert cycles == pytest.approx(len(in_turns) * 128 / facts["datapath_bits"] / facts["fma_pipes"], rel=0.1)
    loads = [LDR_Q | number for number in range(16)]
    cycles = pipeline.count_cycles(Decoder().read(code(*loads)))
    assert cycles == pytest.approx(len(loads) * 128 / facts["datapath_bits"] / facts["load_pipes"], rel=0.1)


def test_every_jetson_is_described() -> None:
    """Virtual boards of each type run their own code."""
    described = set(DESCRIBED)
    for kind in load_board_types().values():
        assert not kind.name.startswith("jetson") or {each.core for each in kind.clusters} <= described


def test_what_depends_waits() -> None:
    """Adding to a sum again takes its forwarding latency; multiplying what was just summed takes all of it. In order,
    what waits holds up what follows: a product's sum between independent additions costs its latency.
    """
    assert PIPELINE.count_cycles(Decoder().read(code(FMLA[0]) * 8)) == pytest.approx(8 * 4, rel=0.05)
    chained = 0x4E20CC00 | 0 | 0 << 5 | 31 << 16  # fmla v0.4s, v0.4s, v31.4s
    assert PIPELINE.count_cycles(Decoder().read(code(chained) * 8)) == pytest.approx(8 * 10, rel=0.05)
    in_order = Pipeline(CORE["pipeline"] | {"in_order": True})
    words = code(LDR_Q | 1, 0x4E21D420, *[ADD_X | number for number in range(3, 9)])  # ldr q1, [x0]; fadd v0, v1, v1
    instructions = Decoder().read(words)
    assert in_order.count_cycles(instructions) > PIPELINE.count_cycles(instructions)


@pytest.mark.parametrize(
    ("word", "reads"),
    [
        (0x0D40C400, {"x0"}),  # ld1r {v0.4h}, [x0]
        (0x0DDFC400, {"x0"}),  # ld1r {v0.4h}, [x0], #2
        (0x4C40A000, {"x0"}),  # ld1 {v0.16b, v1.16b}, [x0]
        (0x0D409000, {"v0", "x0"}),  # ld1 {v0.s}[1], [x0]: the other lanes stay
        (0x13027C02, {"x0"}),  # asr w2, w0, #2
        (0x13027C00, {"x0"}),  # asr w0, w0, #2
        (0x0F180441, {"v2"}),  # sshr v1.4h, v2.4h, #8
        (0x6E621C20, {"v0", "v1", "v2"}),  # bsl v0.16b, v1.16b, v2.16b
        (0x72A00020, {"x0"}),  # movk w0, #1, lsl #16
    ],
)
def test_what_is_overwritten_is_not_read(word: int, reads: set[str]) -> None:
    """A load to all lanes waits for its address alone; what keeps a part of its register waits for that."""
    (found,) = Decoder().read(code(word))
    assert set(found.reads) == reads


@hypothesis.given(
    st.lists(st.sampled_from([*FMLA, LDR_Q, ADD_X, *range(0, 2**32, 0x01030507)]), min_size=1, max_size=40)
)
@hypothesis.settings(max_examples=60)
def test_nothing_beats_the_pipes(words: list[int]) -> None:
    """In any program, no pipe does more in a cycle than there are of it, and no more is dispatched."""
    instructions = Decoder().read(code(*words))
    cycles = PIPELINE.count_cycles(instructions)
    used: dict[str, int] = {}
    operations = 0
    for each in instructions:
        pipes, cost = PIPELINE.expand(each)
        operations += len(pipes)
        for pipe in pipes:
            used[pipe] = used.get(pipe, 0) + cost.busy
    assert cycles >= operations / PIPELINE.dispatch - 1e-9
    for pipe, busy in used.items():
        assert cycles >= busy / PIPELINE.pipes[pipe] - 1e-9


def test_a_region_takes_its_longest_lane() -> None:
    """The calling thread alone, then a region of two: its longest lane, and what all lanes did; waits included."""
    estimator = Estimator(PIPELINE, 8, 0.5, 30)
    body = code(*FMLA)
    one = estimator.count_cycles(body)
    blocks = [Block(0, body, (5, 10, 20)), Block(4096, code(RET), (1, 0, 0))]
    misses = [Misses(0, 3), Misses(10, 7), Misses(0, 2, math_calls=2)]
    alone, region = estimator.estimate(blocks, misses, tasks=2)
    assert alone.lines == alone.all_lines == 3
    assert alone.cycles == pytest.approx(5 * one + estimator.count_cycles(code(RET)))
    assert region.cycles == pytest.approx(20 * one + 2 * 30)
    assert region.all_cycles == pytest.approx(30 * one + 10 * 8 * (1 + 0.5) + 2 * 30)  # two wait beside each other
    assert (region.lines, region.all_lines) == (7, 9)


def test_estimates_of_many_lanes() -> None:
    """Of memory's lines they take what is left: weights that all lanes read are fetched once. Without misses and calls,
    an estimate is the pipes' alone.
    """
    estimator = Estimator(PIPELINE, 8, 0.5, 30)
    blocks, misses = [Block(0, code(*FMLA), (0, 10, 0, 0, 0))], [Misses(0, 0), Misses(2, 6), *[Misses(0, 0)] * 3]
    for left, lines in ((100, 24), (9, 9), (3, 6)):
        _, region = estimator.estimate(blocks, misses, 4, left, first_only=True)
        assert (region.lines, region.all_lines) == (6, lines)
        assert region.all_cycles == pytest.approx(4 * region.cycles)
        assert region.cycles == pytest.approx(10 * estimator.count_cycles(code(*FMLA)) + 2 * 8 * (1 + 0.5 * 3))
    estimator = Estimator(PIPELINE, 8, 0.5, 30)
    [alone] = estimator.estimate([Block(0, code(*FMLA), (7,))], [Misses(0, 0)], 1)
    assert alone == estimate.Segment(7 * estimator.count_cycles(code(*FMLA)), 0, alone.all_cycles, 0)


def test_what_the_emulator_parts_is_put_together() -> None:
    """Blocks that follow each other as often, without a branch between, are one loop: parts alone would look longer."""
    estimator = Estimator(PIPELINE, 8, 0.5, 30)
    head, tail = code(FMLA[0]), code(*FMLA[1:])
    together = [Block(0, head, (9,)), Block(4, tail, (9,))]
    assert estimator.estimate(together, [Misses(0, 0)], 1)[0].cycles == pytest.approx(
        9 * estimator.count_cycles(head + tail)
    )
    apart = [Block(0, head, (9,)), Block(8, tail, (9,))]
    assert estimator.estimate(apart, [Misses(0, 0)], 1)[0].cycles > 9 * estimator.count_cycles(head + tail)


def test_a_loop_that_the_emulator_parts_is_whole_the_first_time_too() -> None:
    """What follows a loop's first part and, the first time round, what goes before the loop, belongs to both."""
    before, head, tail = code(ADD_X), code(*FMLA[:6]), code(*FMLA[6:])
    end = 4 + len(head)
    parted = [Block(0, before + head, (1, 0)), Block(4, head, (8, 3)), Block(end, tail, (9, 3))]
    assert merge(parted) == [Block(0, before + head + tail, (1, 0)), Block(4, head + tail, (8, 3))]
    entered = [*parted[:2], Block(end, tail, (9, 4))]
    assert merge(entered) == entered
    branch = code(0x54000001)  # b.ne
    left = [Block(0, head, (9,)), Block(4, head[4:] + branch, (3,)), Block(len(head) + 4, tail, (3,))]
    assert merge(left) == left


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(64), b"\x7fELF\x02\x01" + bytes(80)])
def test_what_is_no_library_is_refused(data: bytes) -> None:
    """Cut short, of another kind, or nothing at all."""
    with pytest.raises(ElfError):
        Elf(data)
    with pytest.raises(ElfError):
        read_executable(data)


def test_the_agent_never_loads_the_emulator() -> None:
    """Only the emulator's own process imports Unicorn: modules that the agent imports never import it."""
    own = {"machine", "server", "__main__"}
    for path in (ROOT / "farm" / "virtual").rglob("*.py"):
        if path.parent.name == "emulated" and path.stem in own:
            continue
        names = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not {f"farm.virtual.emulated.{name}" for name in own} & names, path


segments = st.lists(
    st.tuples(st.floats(0, 1e9), st.integers(0, 10**6), st.floats(1, 4), st.integers(1, 4)).map(
        lambda each: (each[0], each[1], each[0] * each[2], each[1] * each[3])
    ),
    min_size=1,
    max_size=8,
)


@hypothesis.given(segments, st.floats(1e8, 3e9), st.integers(1, 8), st.floats(1, 8))
def test_nothing_beats_the_cores_or_the_memory(
    found: list[tuple[float, int, float, int]], hz: float, cores: int, memory_s: float
) -> None:
    """A program takes no less than its longest lanes, than all its cycles on all cores, and than memory its lines."""
    base_s, busy_s = count_seconds(found, CORE, hz, cores, memory_s)
    close = 1 + 1e-9
    assert base_s * close >= sum(each[0] for each in found) / hz
    assert base_s * close >= sum(each[2] for each in found) / hz / cores
    assert base_s * close >= sum(each[3] for each in found) * 64 * memory_s / CORE["memory_bytes_per_s"]
    assert base_s * close >= sum(each[1] for each in found) * 64 * memory_s / CORE["core_bytes_per_s"]
    assert busy_s * close >= sum(each[2] for each in found) / hz
