"""The code of a recorded schedule as text: TIR, LLVM's code and assembly of a CPU, CUDA C and PTX of a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from farm.errors import UsageError
from farm.search import gpus, traces
from farm.search.codegen import lowering
from farm.search.target import make_code_target, make_target

# What can be printed, and TVM's name of it for CPUs; None: the farm's own.
FORMS: Mapping[str, str | None] = {"tir": None, "llvm": "ll", "asm": "s", "cuda": None, "ptx": None}
_OF_CPUS, _OF_GPUS = ("llvm", "asm"), ("cuda", "ptx")
_MULTIPLIES = re.compile(r"\tv?(fn?m[alsu]|mul|mla|[us]ml|[us]dot|pdp|pmadd)")


def require_form(form: str, target: Mapping[str, Any]) -> None:
    """Raise UsageError for code that a target's device does not have."""
    own, others = (_OF_GPUS, _OF_CPUS) if gpus.is_gpu(target) else (_OF_CPUS, _OF_GPUS)
    if form in others:
        named = ", ".join(f"--{each}" for each in ("tir", *own))
        raise UsageError(
            f"this record is {gpus.device_of(target).upper()} code: it has no --{form}", f"It has {named}."
        )


def print_code(module_json: str, trace_json: str, target: Mapping[str, Any], form: str) -> str:
    """Rebuild a recorded candidate as a compiled model has it, weights packed, and return its code.

    An empty trace is TVM's default. A virtual board's GPU code is that of the real GPU. Loads TVM's compiler. Raises
    UsageError, InternalError where the trace does not fit, and CodeRefusedError.
    """
    require_form(form, target)
    config = {**target, "libs": [each for each in target.get("libs", ()) if each != gpus.VIRTUAL]}
    made_for = make_target(target)
    if trace_json:
        module = tvm.ir.load_json(traces.replay(module_json, trace_json, made_for))
    else:
        module = tvm.ir.load_json(module_json)
        module = lowering.bind_rest(module, made_for) if gpus.is_gpu(target) else module
    module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    if form == "tir":
        return str(module.script())
    with lowering.making(config) as made:
        built = tvm.tirx.build(module, make_code_target(config), lowering.use_pipeline())
    if form in _OF_CPUS:
        text = str(built.inspect_source(FORMS[form]))
        return "".join(f"# {line}\n" for line in find_hot_loop(text)) + text if form == "asm" else text
    return "\n".join(each.source if form == "cuda" else each.code.decode() for each in made)


def find_hot_loop(asm: str) -> list[str]:
    """Return a heading and the loop with the largest share of multiplications, a line each; [] where none has any."""
    lines = asm.splitlines()
    starts = {line.removesuffix(":"): number for number, line in enumerate(lines) if line.endswith(":")}
    loops = [
        lines[start : end + 1]
        for end, line in enumerate(lines)
        if line.startswith("\t") and (start := starts.get(line.split()[-1], end)) < end
    ]
    shares = [sum(_MULTIPLIES.match(line) is not None for line in loop) / len(loop) for loop in loops]
    if not any(shares):
        return []
    return ["the hot loop, by its share of multiplications; all code follows", *loops[shares.index(max(shares))], ""]
