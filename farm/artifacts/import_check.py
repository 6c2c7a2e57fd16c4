"""Compare the imported model without schedules with ONNX Runtime: no schedule and no option changes that result."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from farm.artifacts import checking, make
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.verify import OutputComparison, find_worst
from farm.errors import DeadlineError, InternalError, PermanentError, UnavailableError, UsageError
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.processes.jobs import compile_in_subprocess
from farm.search.tvm_env import host_target

# Unscheduled code is slow: some seconds per case of a ResNet.
_MOST_CASES = 2

IMPORT_HINT = (
    "TVM imports the model differently from ONNX Runtime, so neither --exact nor other records help. Export it with "
    "another opset or other operators (`farm model show` lists them), and report it. If it takes only some values, "
    "give such with `farm model verify --input`."
)


Case = tuple[str, Mapping[str, Any]]


def require_right_import(source: ModelSource, inputs: Sequence[InputSpec], say: Callable[[str], None]) -> None:
    """Raise PermanentError where the imported model's outputs differ; return where they cannot be compared."""
    say(f"{source.name}: comparing the model without schedules with ONNX Runtime")
    cases = checking.make_seeded(source, inputs)
    found = compare_import(source, inputs, [cases[0], *cases[-1:]], say)
    if found is not None and not found.matches:
        raise PermanentError(f"{source.name} as TVM imports it computes something else: {found.reason}", IMPORT_HINT)


def compare_import(
    source: ModelSource, inputs: Sequence[InputSpec], cases: Sequence[Case], say: Callable[[str], None] | None = None
) -> OutputComparison | None:
    """Compare the unscheduled model on this machine for some `cases` of equal shapes; None where it does not run."""
    shapes = {spec.name: np.shape(cases[0][1][spec.name]) for spec in inputs}
    cases = [each for each in cases if all(np.shape(each[1][name]) == shape for name, shape in shapes.items())]
    cases = cases[:_MOST_CASES]
    feeds = [[arrays[spec.name] for spec in inputs] for _, arrays in cases]
    job = functools.partial(_run, source.load().SerializeToString(), shapes, feeds)
    try:
        references = checking.run_reference(source, cases)
        outputs, factor = compile_in_subprocess(job, source.name, say=say)
    except (DeadlineError, InternalError, PermanentError, UnavailableError, UsageError):
        # The model's compilation reports such errors.
        return None
    triples = zip(cases, outputs, references, strict=True)
    return find_worst(checking.compare_case(source, *triple, factor) for triple in triples)


def _run(
    model: bytes, shapes: Mapping[str, tuple[int, ...]], feeds: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], float]:
    """Return the outputs for each feed, and the tolerance factor. Loads TVM's compiler."""
    compiled = compile_model(
        onnx.load_model_from_string(model), shapes, host_target(1), UNTUNED_PIPELINE, [], link_triple=None
    )
    factor = checking.find_tolerance_factor(make.find_algorithm(each.workload.name) for each in compiled.served)

    with tempfile.TemporaryDirectory(prefix="farm-import-") as folder:
        path = Path(folder) / "model.so"
        path.write_bytes(compiled.library)
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        answers = [machine["main"](*(tvm.runtime.tensor(np.asarray(array)) for array in feed)) for feed in feeds]
        return [
            [answer.numpy()] if hasattr(answer, "numpy") else [a.numpy() for a in answer] for answer in answers
        ], factor
