"""A campaign's model is found by its content on another host, which does not have the file."""

from __future__ import annotations

import pathlib

import pytest

from farm import settings
from farm.artifacts.given_model import find_same_model
from farm.artifacts.manifest import ModelFacts
from farm.errors import UnavailableError, UsageError
from farm.models.source import find_model, keep_model, resolve_model
from farm.models.zoo import ZOO


def test_a_model_is_found_where_its_file_is_not(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content alone: a copy that was changed is none, and without a shared folder the error says what to set."""
    file, shared = tmp_path / "mine.onnx", tmp_path / "shared"
    file.write_bytes(ZOO["mlp"].build())
    source = resolve_model(str(file))
    about = ModelFacts(name=source.name, sha256=source.sha256, origin=source.origin)
    monkeypatch.setenv("FARM_SHARED", str(shared))
    assert (settings.load().builds_path, settings.load().models_path) == (shared / "builds", shared / "models")
    keep_model(shared / "models", source)
    keep_model(shared / "models", source)
    file.unlink()
    found = find_same_model(about, None, "the campaign tuned")
    assert found.source == source
    assert found.about == about
    kept = find_model(shared / "models", source.sha256)
    kept.write_bytes(kept.read_bytes() + b"x")
    with pytest.raises(UsageError) as caught:
        find_same_model(about, None, "the campaign tuned")
    assert "FARM_SHARED" in caught.value.hint


def test_a_folder_that_takes_nothing_is_named(tmp_path: pathlib.Path) -> None:
    """Before a campaign is submitted that other hosts could not end; a model of the zoo needs none."""
    (tmp_path / "file").write_text("")
    (tmp_path / "mine.onnx").write_bytes(ZOO["mlp"].build())
    keep_model(tmp_path / "file", resolve_model("mlp"))
    keep_model(None, resolve_model(str(tmp_path / "mine.onnx")))
    with pytest.raises(UnavailableError, match="mine cannot be kept in"):
        keep_model(tmp_path / "file", resolve_model(str(tmp_path / "mine.onnx")))
