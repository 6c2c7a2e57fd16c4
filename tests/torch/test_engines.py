"""PyTorch as an engine beside ours, with the real package."""

from __future__ import annotations

import pathlib

from device_agent.protocol import Engine
from tests.contract.test_engines import check_engine


def test_pytorch_computes_what_onnxruntime_does(tmp_path: pathlib.Path) -> None:
    """Pnnx's module of the model gives the same outputs; bytes that are no model are a LoadError."""
    check_engine(Engine.PYTORCH, tmp_path)
