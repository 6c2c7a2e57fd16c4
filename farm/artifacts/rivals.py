"""Make the program that another engine runs: the model's file, or pnnx's conversion for ncnn and PyTorch."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol import CPU, GPU, Description, Engine
from farm.artifacts.given_model import GivenModel
from farm.artifacts.timing import Variant
from farm.errors import UnavailableError
from farm.models.tflite import conversion

# The engines by name, best known first, as people call them.
ENGINES = {
    Engine.ONNXRUNTIME: "ONNX Runtime",
    Engine.NCNN: "ncnn",
    Engine.PYTORCH: "PyTorch",
    Engine.TFLITE: "TensorFlow Lite",
    Engine.TENSORRT: "TensorRT",
}
_FILES = {
    Engine.NCNN: ("model.ncnn.param", "model.ncnn.bin"),
    Engine.PYTORCH: ("model_pnnx.py", "model.pnnx.bin"),
}
_CONVERT_S = 300.0
# The deadline of TensorRT's build on the board, which tries kernels.
_BUILD_S = 900.0


def make_variant(engine: Engine, opened: GivenModel, inputs: Mapping[str, Any], board: Description) -> Variant:
    """Return what the board runs in this engine. Raises UnavailableError: the engine or the model does not allow it."""
    called, data, arrays = ENGINES[engine], opened.source.onnx_bytes, dict(inputs)
    if str(engine) not in board.engines:
        is_emulated = board.simulated and board.architecture == "aarch64"
        raise UnavailableError(f"{called} is not {'emulated' if is_emulated else 'installed'} on {board.name}")
    if engine in _FILES:
        if engine is Engine.NCNN:
            if any(array.ndim < 2 or array.shape[0] != 1 for array in arrays.values()):
                raise UnavailableError("ncnn takes one example at a time: inputs must have a batch size of 1")
            arrays = {name: array[0] for name, array in arrays.items()}
        data = convert(engine, data, [array.shape for array in inputs.values()])
    elif engine is Engine.TFLITE:
        path = Path(opened.about.origin)
        if path.suffix != conversion.SUFFIX or opened.about.batch is not None:
            raise UnavailableError("TensorFlow Lite is timed with the .tflite file of a model, which this model is not")
        data = path.read_bytes()
    device, timeout_s = (GPU, _BUILD_S) if engine is Engine.TENSORRT else (CPU, None)
    return Variant(str(engine), engine, data, arrays, device=device, load_timeout_s=timeout_s)


def convert(engine: Engine, model: bytes, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """Convert an ONNX model by pnnx in float32 for ncnn or PyTorch; return a zip. Raises UnavailableError."""
    pnnx, wanted, called = _find_pnnx(), _FILES[engine], ENGINES[engine]
    with tempfile.TemporaryDirectory(prefix="farm-pnnx-") as name:
        folder, packed = Path(name), io.BytesIO()
        (folder / "model.onnx").write_bytes(model)
        listed = ",".join(str(list(shape)).replace(" ", "") for shape in shapes)
        command = [pnnx, "model.onnx", f"inputshape={listed}", "fp16=0"]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, timeout=_CONVERT_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"pnnx did not convert the model for {called} in {_CONVERT_S:.0f} s") from error
        if missing := [each for each in wanted if not (folder / each).exists()]:
            raise UnavailableError(f"pnnx cannot convert the model for {called}: it wrote no {missing[0]}")
        with zipfile.ZipFile(packed, "w") as archive:
            for each in wanted:
                archive.write(folder / each, each)
    return packed.getvalue()


def _find_pnnx() -> str:
    """Find the converter: the program in its wheel, whose Python code alone needs PyTorch, or on PATH."""
    spec = importlib.util.find_spec("pnnx")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if found := shutil.which("pnnx", path=folder):
            return found
    if found := shutil.which("pnnx"):
        return found
    raise UnavailableError(
        "pnnx, which converts models for ncnn and PyTorch, is not installed: pip install --no-deps pnnx"
    )
