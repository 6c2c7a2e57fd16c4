"""Convert TensorFlow Lite models to ONNX: `graph` parses and writes, `operators` maps each operator.

TVM's own front end lacks custom operators and sparse weights of 16 bits, and its NHWC convolutions reach no schedule
family. As ONNX, models share records, batches, quantisation and the reference with all others.
The file is untrusted input, so a confined process converts it.
"""

from __future__ import annotations

import importlib.util
import pathlib

from farm.errors import UsageError
from farm.processes import confined

SUFFIX = ".tflite"
# The file identifier, behind the offset of the root table.
_MARK = b"TFL3"
_MEMORY_BYTES, _COPIES = 2 << 30, 12
_HINT = "Copy it again, or convert the model that it was made from to ONNX (tf2onnx, torch.onnx.export)."


def is_tflite(path: pathlib.Path, start: bytes) -> bool:
    """Say whether a file with these first bytes is, or should be, a TensorFlow Lite model."""
    return start[4:8] == _MARK or path.suffix.lower() == SUFFIX


def convert(path: pathlib.Path, data: bytes) -> bytes:
    """Return a model as ONNX. Raises UsageError for a damaged file, an unknown operator, or without `tflite`."""
    if data[4:8] != _MARK:
        raise UsageError(f"{path} is not a TensorFlow Lite model", "Copy or convert it again.")
    if importlib.util.find_spec("tflite") is None:
        raise UsageError(
            f"{path} is a TensorFlow Lite model, and reading one needs the package tflite",
            "Install it: pip install 'tflite>=2.18'",
        )
    limits = confined.ConfinedLimits(_MEMORY_BYTES + _COPIES * len(data))
    try:
        return confined.call(f"{__name__}.operators:convert", data, "it was not converted", limits)
    except UsageError as error:
        raise UsageError(
            f"{path} is a TensorFlow Lite model that cannot be converted: {error.message}", error.hint or _HINT
        ) from error
