"""Programs of torch.export, ordinary and hostile, with the real PyTorch; `make test-torch` runs these."""

from __future__ import annotations

import os
import pathlib
import subprocess
import textwrap

import numpy as np
import onnx
import onnxruntime
import pytest

from farm.errors import UsageError
from farm.models import exported

# PyTorch lives in an environment of its own: it cannot be loaded beside TVM.
_TORCH = pathlib.Path(os.environ["FARM_TORCH"]).resolve()
_SAVE = """
import io, os, sys, zipfile, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 5)
    def forward(self, image):
        return self.linear(torch.relu(self.convolution(image)).mean((2, 3)))

def save(path):
    net = Net().eval()
    image = torch.linspace(-1, 1, 768).reshape(1, 3, 16, 16)
    torch.export.save(torch.export.export(net, (image,)), path)
    return net(image)

class Hostile:
    def __reduce__(self):
        return os.system, (f"echo {os.getpid()} > {sys.argv[2]}",)

def change(path, ending, content):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    changed = [name for name in members if name.endswith(ending)]
    assert changed, sorted(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, content(data) if name in changed else data)

def pickled(data):
    file = io.BytesIO()
    torch.save(Hostile(), file)
    return file.getvalue()
"""


def _save(path: pathlib.Path, code: str) -> str:
    """Run `code` after the above with PyTorch; `path` and a file that only hostile code writes are its arguments."""
    command = [str(_TORCH / "bin/python"), "-c", _SAVE + textwrap.dedent(code), str(path), str(path.parent / "owned")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _assert_hostile(folder: pathlib.Path) -> None:
    """The archive is as hostile as it is meant to be: it does run code in the process that loads it."""
    assert not (folder / "owned").exists()
    _save(
        folder / "evil.pt2",
        """
        try:
            torch.export.load(sys.argv[1])
        except Exception:
            pass
        """,
    )
    assert (folder / "owned").exists()


@pytest.fixture(autouse=True)
def _home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FARM_HOME, and a PyTorch beside the farm."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    (packages,) = (_TORCH / "lib").glob("python3*/site-packages")
    monkeypatch.setenv("PYTHONPATH", str(packages))


def test_a_program_computes_what_it_did_in_pytorch(tmp_path: pathlib.Path) -> None:
    """Converted in a child process, with all weights inside."""
    said = _save(tmp_path / "net.pt2", "print(*save(sys.argv[1]).detach().flatten().tolist())")
    model = exported.convert(tmp_path / "net.pt2", trusted=True)
    onnx.checker.check_model(onnx.load_model_from_string(model))
    session = onnxruntime.InferenceSession(model)
    image = np.linspace(-1, 1, 768, dtype="float32").reshape(1, 3, 16, 16)
    (found,) = session.run(None, {session.get_inputs()[0].name: image})
    np.testing.assert_allclose(np.ravel(found), [float(word) for word in said.split()], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_pickle_in_a_program_is_not_obeyed(tmp_path: pathlib.Path, trusted: bool) -> None:
    """PyTorch itself would: what it loads as example inputs may name any function, and it calls it."""
    _save(tmp_path / "evil.pt2", 'save(sys.argv[1]); change(sys.argv[1], "sample_inputs/model.pt", pickled)')
    said = "pickle in it makes more than tensors" if trusted else "can run code"
    with pytest.raises(UsageError, match=said):
        exported.convert(tmp_path / "evil.pt2", trusted=trusted)
    _assert_hostile(tmp_path)
