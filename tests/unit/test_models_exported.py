"""Programs of torch.export: converted by any PyTorch, once for each content, if the user trusts them.

What real PyTorch makes of hostile ones is in `tests/torch`.
"""

from __future__ import annotations

import hashlib
import pathlib
import textwrap
import zipfile

import pytest

from farm.artifacts import given_model
from farm.artifacts.manifest import ModelFacts
from farm.errors import UsageError
from farm.models import exported, source, zoo

# PyTorch as far as the conversion asks it: a program is ONNX already.
STAND_IN = """
import pathlib, zipfile
from types import SimpleNamespace

class _Program:
    def __init__(self, data):
        self.data = data
    def save(self, path, external_data):
        pathlib.Path(path).write_bytes(self.data)

def load(path, weights_only=False):
    if not weights_only:
        raise SystemExit("a pickle would have been obeyed")

def _load(path):
    import torch
    torch.load(path, weights_only=False)
    data = zipfile.ZipFile(path).read("program/model")
    if data == b"odd":
        raise RuntimeError("no such operator:\\n  aten.odd")
    return data

export = SimpleNamespace(load=_load)
onnx = SimpleNamespace(export=lambda program, dynamo, verbose: _Program(program))
"""


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """FARM_HOME."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_program(path: pathlib.Path, content: bytes) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("program/archive_format", "pt2")
        archive.writestr("program/model", content)
    return path


def install(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    folder = folder / "site-packages"  # what a confined process may read
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(textwrap.dedent(code))
    (folder / "torch" / "export.py").write_text("from torch import _load as load\n" if "_load" in code else "")
    (folder / "onnxscript.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_program_that_nobody_trusts_is_not_read(
    tmp_path: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one can run code, so the user has to allow it; what an artifact's manifest names is never trusted."""
    install(tmp_path / "site", monkeypatch, STAND_IN)
    path = write_program(tmp_path / "net.pt2", zoo.ZOO["mlp"].build())
    with pytest.raises(UsageError, match="can run code") as raised:
        source.resolve_model(str(path))
    assert f"farm model show {path} --trust-model" in raised.value.hint
    about = ModelFacts(name="net", sha256="0" * 64, origin=str(path), shapes=(), batch=None)
    with pytest.raises(UsageError, match="can run code"):
        given_model.find_same_model(about, None, "net was compiled from")
    assert not (home / "cache").exists()


@pytest.mark.parametrize("member", ["data/aotinductor/net/code.so", "data/constants/custom_obj_0", "x/opaque_obj_1"])
def test_code_in_a_program_is_refused_whoever_trusts_it(
    tmp_path: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    """By the member's name, before PyTorch is asked."""
    install(tmp_path / "site", monkeypatch, STAND_IN)
    path = write_program(tmp_path / "net.pt2", zoo.ZOO["mlp"].build())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"program/{member}", b"")
    with pytest.raises(UsageError, match=f"refused: its member 'program/{member}'"):
        source.resolve_model(str(path), trusted=True)
    assert not (home / "cache").exists()


def test_without_pytorch_it_is_asked_for(
    tmp_path: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what the file is, what is missing, and the way without; nothing is kept."""
    install(tmp_path / "site", monkeypatch, "raise ImportError('no torch here')")
    path = write_program(tmp_path / "net.pt2", b"anything")
    with pytest.raises(UsageError, match=r"net\.pt2 is a program of torch\.export, which cannot be") as raised:
        source.resolve_model(str(path), trusted=True)
    assert "no torch here" in raised.value.message
    assert "pip install torch onnxscript" in raised.value.hint
    assert not list((home / "cache" / "exported").iterdir())


def test_a_program_is_converted_once(
    tmp_path: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, and under another name, it comes from the cache and needs no trust; another content does."""
    install(tmp_path / "site", monkeypatch, STAND_IN)
    tiny, mlp = zoo.ZOO["tiny-cnn"].build(), zoo.ZOO["mlp"].build()
    first = source.resolve_model(str(write_program(tmp_path / "one.pt2", tiny)), trusted=True)
    again = source.resolve_model(str((tmp_path / "one.pt2").rename(tmp_path / "two.pt2")))
    other = source.resolve_model(str(write_program(tmp_path / "three.pt2", mlp)), trusted=True)
    assert (first.onnx_bytes, other.onnx_bytes) == (tiny, mlp)
    assert (again.sha256, again.name) == (first.sha256, "two")
    assert first.sha256 == hashlib.sha256(tiny).hexdigest()
    assert len(list((home / "cache" / "exported").iterdir())) == 2


def test_what_pytorch_says_is_passed_on(
    tmp_path: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, without its traceback; what was half written is gone."""
    install(tmp_path / "site", monkeypatch, STAND_IN)
    with pytest.raises(UsageError, match=r"cannot convert .*odd\.pt2: RuntimeError: no such operator: aten\.odd\n"):
        exported.convert(write_program(tmp_path / "odd.pt2", b"odd"), trusted=True)
    assert not list((home / "cache" / "exported").iterdir())


def test_other_archives_are_no_programs(tmp_path: pathlib.Path) -> None:
    """A checkpoint is a zip archive, too, and is refused as before."""
    with zipfile.ZipFile(tmp_path / "weights.pt", "w") as archive:
        archive.writestr("archive/data.pkl", "")
    assert not exported.is_exported(tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"PyTorch checkpoint.*torch\.export\.save"):
        source.resolve_model(str(tmp_path / "weights.pt"))
