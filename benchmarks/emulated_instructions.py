"""Instructions that one inference executes on an emulated Cortex-A57: ours, ONNX Runtime's and ncnn's, one thread.

Ours is what the farm compiles for a Jetson Nano when it has measured nothing; the others are their own aarch64 wheels,
installed for this the first time. Counts are those of QEMU's plug-in in `deploy/emulated-board`, start-up cancelled,
outputs checked. They tell nothing of caches and memory, and not how many instructions a core runs side by side.
Default budget: about 4 minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import _emulated
import _farm
import _machine
import numpy as np

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts import bench
from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.errors import UnavailableError
from farm.inventory.board_types import require_board_type
from farm.models import zoo
from farm.models.inputs import make_inputs
from farm.search import tvm_env

MODELS = "mobilenet_v2,resnet18"
ENGINES = ("ours", "onnxruntime", "ncnn")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--runs", type=int, default=1, help="inferences that count (default: 1)")
    options = parser.parse_args()
    if options.quick:
        options.models = "tiny-cnn"
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("emulated_instructions", vars(options), measure(options, folder))


def measure(options: Any, folder: Path) -> dict[str, Any]:
    try:
        _emulated.require_board()
    except UnavailableError as error:
        return {"models": None, "reason": str(error)}
    return {
        "board": f"emulated {_emulated.BOARD_TYPE}",
        "ratio_is": "instructions of ours / of the other",
        "models": [measure_model(_farm.read_model(name), options.runs, folder) for name in options.models.split(",")],
    }


def measure_model(model: _farm.Model, runs: int, folder: Path) -> dict[str, Any]:
    tvm_env.load()
    board_type = require_board_type(_emulated.BOARD_TYPE)
    assert board_type.target is not None
    compiled = compile_model(
        model.source.load(), model.shapes, board_type.target.to_tvm(), board_type.pipeline, (), board_type.link_triple
    )
    values = make_inputs(model.inputs, farm.settings.load().seed)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        library, onnx, inputs = (Path(name) / file for file in ("model.so", "model.onnx", "inputs.npz"))
        library.write_bytes(compiled.library)
        onnx.write_bytes(model.source.onnx_bytes)
        np.savez(inputs, **values)
        executed, outputs, reasons = {}, {}, {}
        for engine in ENGINES:
            result = Path(name) / f"{engine}.npz"
            try:
                files: tuple[Path, ...]
                if engine == "ncnn":
                    network = Path(name) / "model.zip"
                    shapes = [spec.static_shape for spec in model.inputs]
                    network.write_bytes(bench.convert(Engine.NCNN, model.source.onnx_bytes, shapes))
                    files, kind = (network,), engine
                elif engine == "ours":
                    files, kind = (library,), Engine.RELAX_VM.value
                else:
                    files, kind = (onnx,), Engine.ONNXRUNTIME.value
                job = _emulated.Job(kind, files, inputs, result)
                (executed[engine],) = _emulated.count([job], _emulated.require_wheels(), runs)
            except UnavailableError as error:
                reasons[engine] = str(error)
                continue
            with np.load(result) as arrays:
                outputs[engine] = list(arrays.values())
            _machine.say(
                f"{model.source.name}, {engine}: {executed[engine].instructions / 1e6:.1f} million instructions"
            )
    entry = zoo.ZOO.get(model.source.name)
    flop = entry.flop if entry else 0.0
    checked = {k: compare(v, outputs["onnxruntime"]) for k, v in outputs.items() if "onnxruntime" in outputs}
    return {
        "name": model.source.name,
        "compiled": {"workloads": compiled.workloads, "by_rule": compiled.by_rule, "pipeline": compiled.pipeline},
        "mflop": _machine.round_to(flop / 1e6),
        "inference": {name: _emulated.describe(one, flop) for name, one in executed.items()},
        "ratio_to": {
            name: _machine.round_to(executed["ours"].instructions / executed[name].instructions, 3)
            for name in ENGINES[1:]
            if "ours" in executed and name in executed
        },
        "outputs": {
            k: {"match": v.matches, "error": _machine.round_to(v.max_rel_error, 3)} for k, v in checked.items()
        },
        "reasons": reasons or None,
    }


if __name__ == "__main__":
    main()
