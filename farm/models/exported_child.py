"""Run by `exported` in a process of its own: reads a program with PyTorch and writes it as ONNX. Imports no farm."""

from __future__ import annotations

import importlib
import sys

# The exit code that says that PyTorch, or what it exports with, is not installed.
MISSING = 3


def main(program: str, out: str) -> int:
    """Convert; the last line on stderr says what is wrong where that fails."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.export")
        importlib.import_module("onnxscript")
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    try:
        loaded = torch.export.load(program)
        torch.onnx.export(loaded, dynamo=True, verbose=False).save(out, external_data=False)
    except Exception as error:  # noqa: BLE001 - the edge of a process; the one who asked says what it means
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
