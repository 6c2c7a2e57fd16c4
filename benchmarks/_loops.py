"""Innermost loops of kernels compiled for other cores, read from the objects: FMAs, spills, predicted cycles.

`llvm-objdump` and `llvm-mca` are Debian's package `llvm`. `kernels_static.py` chooses the kernels.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.inventory.core_types import find_core_type
from farm.search import target as targets
from farm.search import tvm_env
from farm.search.build import lowering
from farm.search.cores import core_of

# Whose model llvm-mca is asked for. It has none of Carmel, and LLVM 14 knows neither Cortex-A78AE nor Zen 4 and 5, of
# whose loops only spills are reported; up to LLVM 17 the model of every Cortex named here is that of the A57, and the
# models of Intel's servers are Skylake's.
MODELLED_AS = {
    "cortex-a53": "cortex-a53",
    "cortex-a57": "cortex-a57",
    "cortex-a72": "cortex-a72",
    "cortex-a76": "cortex-a76",
    "cortex-a78ae": "cortex-a78",
    "carmel": "cortex-a57",
    "haswell": "haswell",
    "znver3": "znver2",
    "znver4": None,
    "znver5": None,
    "icelake-server": "icelake-server",
    "sapphirerapids": "sapphirerapids",
}
TOOLS = ("llvm-objdump", "llvm-mca")
_ITERATIONS = 100
_LIMIT_S = 60.0

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>[^>]+)>:$")
_INSTRUCTION = re.compile(r"^\s*(?P<address>[0-9a-f]+):\s+(?P<text>\S.*)$")


@dataclasses.dataclass(frozen=True)
class _Assembly:
    """Patterns of an architecture's instructions in the output of `llvm-objdump`.

    The stack pointer, or the frame pointer that stands for it in functions with large frames, makes a spill.
    """

    triple: str
    features: tuple[str, ...]
    comment: str
    branch: re.Pattern[str]
    full_fma: re.Pattern[str]
    half_fma: re.Pattern[str]
    stack_load: re.Pattern[str]
    stack_store: re.Pattern[str]
    vector_spill: re.Pattern[str]
    vector_store: re.Pattern[str]


def _x86(vector: str) -> _Assembly:
    """AT&T's syntax: the destination comes last. `vector` names full registers, shorter ones count as half."""
    shorter = "[xy]mm" if vector == "zmm" else "xmm"
    return _Assembly(
        triple="x86_64-linux-gnu",
        features=(),
        comment="#",
        branch=re.compile(r"^j\w+ (0x)?(?P<target>[0-9a-f]+)( <[^>]*>)?$"),
        full_fma=re.compile(rf"^vfn?m(add|sub)\d+ps .*%{vector}\d+$"),
        half_fma=re.compile(rf"^vfn?m(add|sub)\d+(ps .*%{shorter}\d+|ss .*)$"),
        stack_load=re.compile(r"^\S+ .*\(%r[sb]p[^)]*\).*,"),
        stack_store=re.compile(r"^\S+ .*, -?\w*\(%r[sb]p[^)]*\)$"),
        vector_spill=re.compile(rf"^v(?=.*%{vector}).*\(%r[sb]p"),
        vector_store=re.compile(r"^vmov[au]p[sd] %[xyz]mm\d+, "),
    )


_AARCH64 = _Assembly(
    triple="aarch64-linux-gnu",
    features=("+neon",),
    comment="//",
    branch=re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)\s+(.*,\s*)?(0x)?(?P<target>[0-9a-f]+)( <[^>]*>)?$"),
    full_fma=re.compile(r"^fml[as]\s+v\d+\.4s"),
    half_fma=re.compile(r"^(fml[as]\s+v\d+\.2s|fn?m(add|sub)\s+s\d+)"),
    stack_load=re.compile(r"^ld(u?r|p|np)\s.*\[(sp|x29)\b"),
    stack_store=re.compile(r"^st(u?r|p|np)\s.*\[(sp|x29)\b"),
    vector_spill=re.compile(r"^(ld|st)(u?r|p|np)\s+q.*\[(sp|x29)\b"),
    vector_store=re.compile(r"^(st(u?r|p|np)\s+q\d+|st1\s)"),
)


def make_config(core: str, threads: int) -> dict[str, Any]:
    """The target of so many threads of a core, by LLVM's name for it, in TVM's dict form."""
    assembly = _assembly_of(core)
    config: dict[str, Any] = {"kind": "llvm", "mtriple": assembly.triple, "mcpu": core, "num-cores": threads}
    return config | ({"mattr": list(assembly.features)} if assembly.features else {})


def _assembly_of(core: str) -> _Assembly:
    kind = find_core_type(core, "x86_64")
    if kind is None or not any(core.startswith(start) for start in kind.match if start):
        return _AARCH64
    return _x86("zmm" if kind.vector_bits == 512 else "ymm")


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop with float32 FMAs.

    `fmas` are of full vectors, `partial_fmas` of half ones and scalars. Loads and stores of the stack are spills, of
    addresses as a rule; `vector_spills` are those of full vectors. `cycles` per iteration are None where they were not
    predicted, `rate` is how many of full vectors a core begins in one.
    """

    function: str
    instructions: int
    fmas: int
    partial_fmas: int
    stack_loads: int
    stack_stores: int
    vector_spills: int
    vector_stores: int
    cycles: float | None
    code: tuple[str, ...] = dataclasses.field(repr=False)
    rate: float = 1.0

    @property
    def share(self) -> float | None:
        """Share of the full-vector FMAs that a core begins in as many cycles."""
        return None if not self.cycles else self.fmas / self.cycles / self.rate


def inspect_kernel(module: Any, target_config: Mapping[str, Any]) -> list[Loop]:
    """Find the innermost loops of a scheduled module's kernels, those with most FMAs first.

    `module` is a `tvm.IRModule` of PrimFuncs, `target_config` is `make_config`'s. Raises RuntimeError without the
    tools, and what TVM raises where it cannot compile.
    """
    core = str(target_config["mcpu"])
    assembly, model = _assembly_of(core), MODELLED_AS.get(core, core)
    loops = find_loops(disassemble(compile_objects(module, target_config)), core)
    # One for every Arm core, so that figures stay comparable with earlier ones.
    unit = core_of(target_config)
    rate = 1.0 if assembly is _AARCH64 else unit.fma_per_cycle(unit.vector_bits)
    cycles = [None if model is None else predict_cycles(loop.code, model, assembly) for loop in loops]
    return [dataclasses.replace(loop, cycles=each, rate=rate) for loop, each in zip(loops, cycles, strict=True)]


def compile_objects(module: Any, target_config: Mapping[str, Any]) -> list[bytes]:
    """The module's object files, not linked. Weights are taken as packed already, as in a compiled model."""
    tvm = tvm_env.load_compiler()
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    built = tvm.tirx.build(packed, targets.make_code_target(target_config), lowering.use_pipeline())
    objects: list[bytes] = []

    def keep(output: str, files: Sequence[str] | str, options: Any = None, **_: Any) -> None:
        listed = [files] if isinstance(files, str) else files
        objects.extend(Path(file).read_bytes() for file in listed if file.endswith(".o"))
        Path(output).touch()

    with tempfile.TemporaryDirectory(prefix="farm-bench-objects-") as folder:
        built.export_library(str(Path(folder) / "kernel.so"), fcompile=keep, workspace_dir=folder)
    return objects


def disassemble(objects: Sequence[bytes]) -> str:
    """All objects as `llvm-objdump -d` shows them."""
    tool, texts = require_tool("llvm-objdump"), []
    with tempfile.TemporaryDirectory(prefix="farm-bench-objects-") as folder:
        for data in objects:
            path = Path(folder) / "one.o"
            path.write_bytes(data)
            texts.append(_run([tool, "-d", "--no-show-raw-insn", str(path)]))
    return "\n".join(texts)


def find_loops(listing: str, core: str) -> list[Loop]:
    """Find a disassembly's innermost loops with FMAs; a loop ends in a backward branch."""
    found, assembly = [], _assembly_of(core)
    for name, lines in _functions(listing, assembly.comment):
        addresses = [address for address, _ in lines]
        spans = [
            (addresses.index(target), position)
            for position, (address, text) in enumerate(lines)
            if (target := _branch_target(text, assembly)) is not None and target <= address and target in addresses
        ]
        for first, last in spans:
            if any((first, last) != span and first <= span[0] and span[1] <= last for span in spans):
                continue
            loop = _describe(name, [text for _, text in lines[first : last + 1]], assembly)
            if loop.fmas or loop.partial_fmas:
                found.append(loop)
    return sorted(found, key=lambda loop: (-loop.fmas, -loop.partial_fmas, loop.instructions))


def _functions(listing: str, comment: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    name, lines = "", list[tuple[int, str]]()
    for line in listing.splitlines():
        if heading := _FUNCTION.match(line):
            if lines:
                yield name, lines
            name, lines = heading["name"], []
        elif instruction := _INSTRUCTION.match(line):
            text = re.sub(rf"\s*{comment}.*$", "", instruction["text"].replace("\t", " ")).strip()
            lines.append((int(instruction["address"], 16), text))
    if lines:
        yield name, lines


def _branch_target(text: str, assembly: _Assembly) -> int | None:
    branch = assembly.branch.match(text)
    return int(branch["target"], 16) if branch else None


def _describe(function: str, code: Sequence[str], assembly: _Assembly) -> Loop:
    def count(pattern: re.Pattern[str]) -> int:
        return sum(pattern.match(line) is not None for line in code)

    return Loop(
        function=function,
        instructions=len(code),
        fmas=count(assembly.full_fma),
        partial_fmas=count(assembly.half_fma),
        stack_loads=count(assembly.stack_load),
        stack_stores=count(assembly.stack_store),
        vector_spills=count(assembly.vector_spill),
        vector_stores=count(assembly.vector_store),
        cycles=None,
        code=tuple(code),
    )


def predict_cycles(code: Sequence[str], model: str, assembly: _Assembly) -> float | None:
    """Cycles per iteration as llvm-mca has them; None where it refuses an instruction or has no model of the core."""
    # Where branches go to does not matter, but they must go to something.
    lines = ["loop:", *(re.sub(r"(0x)?[0-9a-f]+ <[^>]*>$", "loop", line) for line in code)]
    command = [
        require_tool("llvm-mca"),
        f"-mtriple={assembly.triple}",
        f"-mcpu={model}",
        f"-iterations={_ITERATIONS}",
        "-json",
    ]
    try:
        answer = json.loads(_run(command, "\n".join(lines) + "\n"))
    except (subprocess.CalledProcessError, json.JSONDecodeError):
        return None
    return float(answer["CodeRegions"][0]["SummaryView"]["TotalCycles"]) / _ITERATIONS


def require_tool(name: str) -> str:
    """The path of one of LLVM's tools. Raises RuntimeError."""
    if (path := shutil.which(name)) is None:
        raise RuntimeError(f"{name} is not installed; on Debian and Ubuntu it is in the package llvm")
    return path


def _run(command: Sequence[str], text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout
