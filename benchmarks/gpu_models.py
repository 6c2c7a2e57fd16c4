"""Whole models for the GPUs of Jetsons, made without one: does ptxas take them, and is what they compute right?

Untuned code. For each architecture: kernels, and the most that one of them takes. What they compute is compared with
ONNX Runtime's outputs on a virtual GPU, which a processor plays: no time here is a GPU's. Default budget: 3 minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import _machine
import numpy as np
import onnx
import onnxruntime

from device_agent.board_types import load_board_types as load_for_agent
from device_agent.protocol import GPU, Engine, RunSpec, find_processor
from device_agent.worker import engines
from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.inputs import InputSpec, make_inputs
from farm.models.zoo import ZOO
from farm.search import gpus, tvm_env
from farm.virtual import gpu_time

MODELS = ("squeezenet1.1", "mobilenet_v2", "resnet18")
# One of each architecture.
BOARDS = ("jetson-nano", "jetson-tx2", "jetson-xavier-nx", "jetson-orin-nano-8gb")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names from `farm model zoo`, with commas between")
    options = parser.parse_args()
    models = ["tiny-cnn"] if options.quick else options.models.split(",")
    boards = BOARDS[:1] if options.quick else BOARDS
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        home = Path(folder)
        code.prepare(home)
        figures = {name: try_model(name, boards, home) for name in models}
        emit("gpu_models", {"models": models, "board_types": list(boards)}, {"models": figures})


def try_model(name: str, boards: tuple[str, ...], home: Path) -> dict[str, Any]:
    """What becomes of a model: its code for each board type, and its output on a virtual board of the first one."""
    entry, types = ZOO[name], load_board_types()
    data = entry.build()
    model = onnx.load_model_from_string(data)

    def make(board: str, host: Any, triple: str | None, *, simulated: bool) -> Any:
        config = gpus.to_config(board, code.plan_gpu(types[board]), host, simulated=simulated)
        return compile_model(model, entry.input_shapes, config, gpus.PIPELINE, [], triple)

    code_for = {}
    for board in boards:
        _machine.say(f"{name} for {board}")
        begun = time.monotonic()
        plan, host = code.plan_gpu(types[board]), types[board].target
        assert host is not None  # of `local` alone
        made = make(board, host.to_tvm(), types[board].link_triple, simulated=False)
        code_for[board] = {
            "arch": plan.arch,
            "ptx": plan.newest_ptx,
            "kernels": len(made.usages),
            "seconds": round(time.monotonic() - begun, 1),
            **{
                each: max(getattr(usage, each) for usage in made.usages)
                for each in ("registers", "spilled_bytes", "shared_bytes")
            },
        }
    compiled = make(boards[0], tvm_env.host_target(2), None, simulated=True)
    inputs = make_inputs([InputSpec(*each, "float32") for each in entry.input_shapes.items()], 0)
    given = run(compiled.library, inputs, boards[0], home / f"{name}.so")
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    comparison = compare(given, session.run(None, dict(inputs)))
    return {
        "code": code_for,
        "matches": comparison.matches,
        "max_abs_error": comparison.max_abs_error,
        "max_rel_error": comparison.max_rel_error,
    }


def use_gpu(board: str, home: Path) -> None:
    """Make the virtual GPU of a board type, which `code.prepare(home)` built, this process's one."""
    os.environ.pop(gpu_time.VARIABLE, None)
    gpu_time.use_folder(code.find_folder(home), load_for_agent()[board])


def describe(board: str) -> tuple[dict[str, Any], float]:
    """A board type's GPU as `gpu_time.compute_seconds` takes it, and its highest clock in Hz."""
    kind = load_board_types()[board].gpu
    assert kind is not None
    facts = {key: getattr(kind, key) for key in ("arch", "processors", "memory_bytes_per_s")}
    assert None not in facts.values()
    return facts | {"stretch": 1}, float(max(kind.freqs_hz))


def count_peak(board: str) -> float:
    """FLOP per second of a board type's GPU in float32 at its highest clock."""
    facts, hz = describe(board)
    return 2 * find_processor(facts["arch"]).lanes * int(facts["processors"]) * hz


def run(library: bytes, inputs: Any, board: str, program: Path) -> list[Any]:
    """A program's outputs on a virtual board's GPU, in this process; `program` is a file that is not there yet."""
    use_gpu(board, program.parent)
    program.write_bytes(library)
    once, collect = engines.load_program(RunSpec(Engine.RELAX_VM, device=GPU), program, dict(inputs))
    return [np.asarray(each) for each in collect(once())]


if __name__ == "__main__":
    main()
