"""Innermost loops of kernels compiled for aarch64, read from the objects: multiply-adds, spills, predicted cycles.

`llvm-objdump` and `llvm-mca` are Debian's package `llvm`. Which kernels are worth reading is in `kernels_static.py`.
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

from farm.search import target as targets
from farm.search import tvm_env

TRIPLE = "aarch64-linux-gnu"
# Whose model llvm-mca is asked for. It has none of Carmel, and LLVM 14 does not know Cortex-A78AE; up to LLVM 17 the
# model of every Cortex named here is that of the A57.
MODELLED_AS = {
    "cortex-a57": "cortex-a57",
    "cortex-a72": "cortex-a72",
    "cortex-a78ae": "cortex-a78",
    "carmel": "cortex-a57",
}
TOOLS = ("llvm-objdump", "llvm-mca")
_ITERATIONS = 100
_LIMIT_S = 60.0

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>[^>]+)>:$")
_INSTRUCTION = re.compile(r"^\s*(?P<address>[0-9a-f]+):\s+(?P<text>\S.*)$")
_BRANCH = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)\s+(.*,\s*)?(0x)?(?P<target>[0-9a-f]+)( <[^>]*>)?$")
_FULL_FMA = re.compile(r"^fml[as]\s+v\d+\.4s")
_HALF_FMA = re.compile(r"^(fml[as]\s+v\d+\.2s|fn?m(add|sub)\s+s\d+)")
# The stack pointer, or the frame pointer that stands for it in functions with large frames.
_STACK_LOAD = re.compile(r"^ld(u?r|p|np)\s.*\[(sp|x29)\b")
_STACK_STORE = re.compile(r"^st(u?r|p|np)\s.*\[(sp|x29)\b")
_VECTOR_SPILL = re.compile(r"^(ld|st)(u?r|p|np)\s+q.*\[(sp|x29)\b")
_VECTOR_STORE = re.compile(r"^(st(u?r|p|np)\s+q\d+|st1\s)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop with fused multiply-adds of float32.

    `fmas` are of full vectors, `partial_fmas` of half ones and scalars. Loads and stores of the stack are spills, of
    addresses as a rule; `vector_spills` are those of full vectors. `cycles` per iteration are None where they were not
    predicted.
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

    @property
    def share(self) -> float | None:
        """Of one full vector's multiply-add per cycle."""
        return None if not self.cycles else self.fmas / self.cycles


def inspect_kernel(module: Any, target_config: Mapping[str, Any]) -> list[Loop]:
    """The innermost loops of a scheduled module's kernels, those with most multiply-adds first.

    `module` is a `tvm.IRModule` of PrimFuncs, `target_config` names an aarch64 core. Raises RuntimeError without the
    tools, and what TVM raises where it cannot compile.
    """
    loops = find_loops(disassemble(compile_objects(module, target_config)))
    model = MODELLED_AS.get(str(target_config["mcpu"]), str(target_config["mcpu"]))
    return [dataclasses.replace(loop, cycles=predict_cycles(loop.code, model)) for loop in loops]


def compile_objects(module: Any, target_config: Mapping[str, Any]) -> list[bytes]:
    """The module's object files, not linked. Weights are taken as packed already, as in a compiled model."""
    tvm = tvm_env.load_compiler()
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    built = tvm.tirx.build(packed, target=targets.make_target(target_config))
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


def find_loops(listing: str) -> list[Loop]:
    """Innermost loops of a disassembly that hold multiply-adds; a loop is what a branch backwards goes around."""
    found = []
    for name, lines in _functions(listing):
        addresses = [address for address, _ in lines]
        spans = [
            (addresses.index(target), position)
            for position, (address, text) in enumerate(lines)
            if (target := _branch_target(text)) is not None and target <= address and target in addresses
        ]
        for first, last in spans:
            if any((first, last) != span and first <= span[0] and span[1] <= last for span in spans):
                continue
            loop = _describe(name, [text for _, text in lines[first : last + 1]])
            if loop.fmas or loop.partial_fmas:
                found.append(loop)
    return sorted(found, key=lambda loop: (-loop.fmas, -loop.partial_fmas, loop.instructions))


def _functions(listing: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    name, lines = "", []
    for line in listing.splitlines():
        if heading := _FUNCTION.match(line):
            if lines:
                yield name, lines
            name, lines = heading["name"], []
        elif instruction := _INSTRUCTION.match(line):
            text = re.sub(r"\s*//.*$", "", instruction["text"].replace("\t", " ")).strip()
            lines.append((int(instruction["address"], 16), text))
    if lines:
        yield name, lines


def _branch_target(text: str) -> int | None:
    branch = _BRANCH.match(text)
    return int(branch["target"], 16) if branch else None


def _describe(function: str, code: Sequence[str]) -> Loop:
    def count(pattern: re.Pattern[str]) -> int:
        return sum(pattern.match(line) is not None for line in code)

    return Loop(
        function=function,
        instructions=len(code),
        fmas=count(_FULL_FMA),
        partial_fmas=count(_HALF_FMA),
        stack_loads=count(_STACK_LOAD),
        stack_stores=count(_STACK_STORE),
        vector_spills=count(_VECTOR_SPILL),
        vector_stores=count(_VECTOR_STORE),
        cycles=None,
        code=tuple(code),
    )


def predict_cycles(code: Sequence[str], model: str) -> float | None:
    """Cycles per iteration as llvm-mca has them; None where it refuses an instruction or has no model of the core."""
    # Where branches go to does not matter, but they must go to something.
    lines = ["loop:", *(re.sub(r"(0x)?[0-9a-f]+ <[^>]*>$", "loop", line) for line in code)]
    command = [require_tool("llvm-mca"), f"-mtriple={TRIPLE}", f"-mcpu={model}", f"-iterations={_ITERATIONS}", "-json"]
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
