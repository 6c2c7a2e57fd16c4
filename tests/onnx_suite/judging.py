"""Compile, run and compare cases, in a process that may not survive it: one name per line in, one verdict out.

`--survey`: also find how operators that are right are computed on a GPU and in 8 bits.

`right`; `wrong`: other values; `refused`: an error for users that names the operator; `internal`: any other error.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.artifacts.compile import compile_model
from farm.errors import ModelRefusedError, UsageError
from farm.search import tvm_env
from farm.search.tvm_env import tvm
from tests.onnx_suite import survey
from tests.onnx_suite.cases import Case, list_cases

PIPELINE = "graph/2"
THREADS = 1
# Near zero a sum differs by more: its parts were larger, and each machine adds them in another order.
_NEAR_ZERO = 8
# By type of floats, the distance of 1 to the next. Results of 16 bits are rounded, and so were those expected.
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a case: `seconds` to import and compile it, and how many of its functions a family scheduled.

    `gpu` and `bytes` are of `tests.onnx_suite.survey`.
    """

    name: str
    kind: str
    reason: str = ""
    seconds: float = 0.0
    functions: int = 0
    by_family: int = 0
    gpu: str = ""
    bytes: str = ""


def judge(case: Case) -> Verdict:
    """Compile a case without a trial for this machine, run it, compare."""
    began = time.monotonic()
    try:
        compiled = compile_model(case.model, case.shapes, tvm_env.host_target(THREADS), PIPELINE, [], None)
    except (UsageError, ModelRefusedError) as error:
        # A refusal says what to do.
        kind = "refused" if error.hint else "internal"
        return Verdict(case.name, kind, str(error), time.monotonic() - began)
    except Exception as error:  # that is the verdict
        return Verdict(case.name, "internal", _locate(error), time.monotonic() - began)
    seconds = time.monotonic() - began
    try:
        found = run(compiled.library, case)
    except Exception as error:
        return Verdict(case.name, "internal", f"run: {_locate(error)}", seconds)
    reason = find_difference(found, case)
    kind = "wrong" if reason else "right"
    return Verdict(case.name, kind, reason, seconds, compiled.workloads, compiled.by_rule)


def run(library: bytes, case: Case) -> list[npt.NDArray[Any]]:
    """Run a compiled model on the case's inputs."""
    with tempfile.TemporaryDirectory(prefix="farm-onnx-") as folder:
        path = pathlib.Path(folder) / "model.so"
        path.write_bytes(library)
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        result = machine["main"](*(tvm.runtime.tensor(np.array(a, order="C")) for a in case.inputs.values()))
        results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        return [each.numpy() for each in results]


def find_difference(found: list[npt.NDArray[Any]], case: Case) -> str:
    """Describe the first output that is not as expected, or return ""."""
    if len(found) != len(case.outputs):
        return f"{len(found)} outputs, not {len(case.outputs)}"
    for at, (given, wanted) in enumerate(zip(found, case.outputs, strict=True)):
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            return f"output {at} is {given.dtype}{list(given.shape)}, not {wanted.dtype}{list(wanted.shape)}"
        with np.errstate(all="ignore"):
            if unit := _UNITS.get(wanted.dtype.name):
                wide = given.astype("float64"), wanted.astype("float64")
                zero = unit if wanted.dtype.itemsize == 2 else _NEAR_ZERO * unit
                near = np.isclose(*wide, max(case.rtol, 2 * unit), max(case.atol, zero), equal_nan=True)
                off = np.nanmax(np.abs(wide[0] - wide[1]), initial=0.0)
                also = f"; NaN {np.isnan(wide[0]).sum()} for {np.isnan(wide[1]).sum()}"
            else:
                near, off, also = given == wanted, 0, ""
        if not near.all():
            return f"output {at}: {(~near).sum()} of {near.size} differ, most {off:.3g}{also}"
    return ""


def _locate(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/farm/" in f.filename]
    where = f" at {frames[-1].filename.partition('/farm/')[2]}:{frames[-1].lineno}" if frames else ""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{where}: {text}"[:300]


def main() -> None:
    """Judge the cases named on standard input."""
    warnings.simplefilter("ignore")
    cases = {case.name: case for case in list_cases()}
    for line in sys.stdin:
        case = cases[line.strip()]
        verdict = judge(case)
        if "--survey" in sys.argv and verdict.kind == "right" and len(case.model.graph.node) == 1:
            bytes_ = survey.find_8_bit_way(case, tvm_env.host_target(THREADS), PIPELINE)
            verdict = dataclasses.replace(verdict, gpu=survey.find_gpu_way(case), bytes=bytes_)
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)


if __name__ == "__main__":
    main()
