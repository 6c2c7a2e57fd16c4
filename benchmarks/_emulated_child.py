"""On the emulated board: `python _emulated_child.py ORDER.json`, started by `_emulated.py`; writes ORDER.results.

For each job the counts of some runs and of twice as many, after one that is not counted and whose outputs are kept;
or, where the order names a recorder's control file (`_recorded.py`), one run with it at work, after one that fills
caches.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    path = Path(sys.argv[1])
    order = json.loads(path.read_text())
    sys.path[:0] = order["paths"]
    import counter

    gc.disable()
    if order.get("control"):
        record(order)
        return
    reader = counter.Reader(Path(os.environ[counter.VARIABLE]))
    results = []
    for job in order["jobs"]:
        arrays = read_inputs(job["inputs"])
        run, collect = load_program(job, arrays)
        outputs = run()
        if job["outputs"]:
            np.savez(job["outputs"], *collect(outputs))
        before, counted = reader.read(), []
        for calls in (order["runs"], 2 * order["runs"]):
            for _ in range(calls):
                run()
            after = reader.read()
            spent, before = after - before, after
            counted.append([spent.instructions, spent.vector_fmas, spent.loads_stores])
        results.append(counted)
    path.with_suffix(".results").write_text(json.dumps(results))


def record(order: Any) -> None:
    """One run of the only job, counted, after one of which only caches are followed."""
    (job,) = order["jobs"]
    arrays = read_inputs(job["inputs"])
    run, collect = load_program(job, arrays)
    with Path(order["control"]).open("r+b") as file, mmap.mmap(file.fileno(), 4096) as control:
        run()
        for state in (1, 2):
            control[0] = state
            outputs = run()
            control[0] = 0
    if job["outputs"]:
        np.savez(job["outputs"], *collect(outputs))


def read_inputs(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        with np.load(given) as arrays:
            return dict(arrays)
    draw = np.random.default_rng(0)
    return {f"arg_{at:03}": draw.standard_normal(shape).astype(dtype) for at, (shape, dtype) in enumerate(given)}


def load_program(job: Any, arrays: dict[str, Any]) -> Any:
    """As the agent runs it, but that `ncnn half` may use half precision where the processor can."""
    from device_agent.protocol import Engine, Limits, RunSpec
    from device_agent.worker import engines, rivals

    name, _, half = job["engine"].partition(" ")
    spec, program = RunSpec(Engine(name), limits=Limits(threads=1)), Path(job["files"][0])
    if spec.engine is not Engine.NCNN:
        return engines.load_program(spec, program, arrays)
    if half:
        rivals.NCNN_OFF = ("use_bf16_storage",)
    kept = {name: np.ascontiguousarray(each[0]) for name, each in arrays.items()}
    run, collect = engines.load_program(spec, program, kept)
    return run, lambda outputs: [each[None] for each in (collect(outputs), kept)[0]]


if __name__ == "__main__":
    main()
