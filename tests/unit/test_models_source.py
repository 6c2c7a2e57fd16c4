"""What the user may type for a model, and what is said when it is not one."""

from __future__ import annotations

import pathlib
import zipfile

import numpy as np
import onnx
import pytest

from farm.errors import UsageError
from farm.models import source, zoo

LIGHT = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"


@pytest.fixture
def tiny() -> bytes:
    return zoo.ZOO["tiny-cnn"].build()


def test_models_are_resolved_by_name_and_by_file(tiny: bytes, tmp_path: pathlib.Path) -> None:
    """A zoo name gives the built model, with where it came from. A file keeps its bytes; the name is the file's, the
    digest is that of the same model from the zoo. Changing a loaded model does not change the source.
    """
    model = source.resolve_model("tiny-cnn")
    assert (model.name, model.origin, model.onnx_bytes) == ("tiny-cnn", "zoo:tiny-cnn", tiny)
    path = tmp_path / "mine.onnx"
    path.write_bytes(tiny)
    model = source.resolve_model(str(path))
    assert (model.name, model.origin, model.onnx_bytes) == ("mine", str(path), tiny)
    assert model.sha256 == source.resolve_model("tiny-cnn").sha256
    model = source.resolve_model("mlp")
    del model.load().graph.node[:]
    assert len(model.load().graph.node) == 5


@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda p: p.stem)
def test_files_of_the_onnx_package(path: pathlib.Path) -> None:
    """Files this project did not make (IR version 3, opset 9) are accepted."""
    assert source.resolve_model(str(path)).load().graph.node


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00" * 500, "is not an ONNX file"),
        (b"just some text\n" * 20, "is not an ONNX file"),
        (bytes(range(240, 256)).replace(b"\x08", b"\x09").join([b"\xff", b"\xff"]), "is not an ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (
            b"PK\x03\x04rest",
            "neither a program of torch.export nor an ONNX file: it is a truncated or damaged zip archive",
        ),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\x1f\x8b\x08\x00", "compressed"),
        (b"\x08\x08", "damaged"),
        (b"\x08\x08\x3a\x00", "without any node"),
    ],
)
def test_not_a_model(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    """Each thing that is no model is named for what it is, as far as its first bytes tell."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        source.resolve_model(str(path))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (["x/data.pkl", "x/version"], "a PyTorch checkpoint without a program; save the model with torch.export"),
        (["x/data.pkl", "x/constants.pkl", "x/code/a.py"], "a TorchScript program; save the model with torch.export"),
        (["notes.txt"], "a zip archive of another kind"),
        (None, "such a program is a zip archive"),
    ],
)
def test_what_is_no_exported_program_is_named(tmp_path: pathlib.Path, members: list[str] | None, message: str) -> None:
    """A .pt2 file that torch.export did not write is not spoken of as a bad ONNX file alone."""
    path = tmp_path / "x.pt2"
    if members is None:
        path.write_text("not yet downloaded")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name in members:
                archive.writestr(name, "")
    with pytest.raises(UsageError, match=f"neither a program of torch.export nor an ONNX file: .*{message}"):
        source.resolve_model(str(path))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_truncated_file(tmp_path: pathlib.Path, tiny: bytes, share: float) -> None:
    """A file that breaks off anywhere is an error, never half a model."""
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny[: int(len(tiny) * share)])
    with pytest.raises(UsageError, match=r"damaged|not a valid"):
        source.resolve_model(str(path))


def test_file_too_large_to_be_a_model(tmp_path: pathlib.Path) -> None:
    """A file past the format's limit is refused by its size, without being read."""
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.write(b"\x08\x08")
        file.truncate(3 * 2**30)
    with pytest.raises(UsageError, match=r"3,221,225,472 bytes"):
        source.resolve_model(str(path))


def test_paths_that_are_no_model_are_refused(tmp_path: pathlib.Path, tiny: bytes) -> None:
    """A path that is not there is called a missing file, and the zoo is offered. For a folder the hint lists the models
    in it. A device is not read from. A path that the system cannot even look up is the user's error, not a crash.
    """
    with pytest.raises(UsageError, match=r"no such file: nowhere/model\.onnx") as raised:
        source.resolve_model("nowhere/model.onnx")
    assert "squeezenet1.1" in raised.value.hint
    (tmp_path / "a.onnx").write_bytes(tiny)
    with pytest.raises(UsageError, match="is a folder") as raised:
        source.resolve_model(str(tmp_path))
    assert "a.onnx" in raised.value.hint
    with pytest.raises(UsageError, match="not a regular file"):
        source.resolve_model("/dev/zero")
    with pytest.raises(UsageError):
        source.resolve_model("a" * 5000 + ".onnx")
    with pytest.raises(UsageError):
        source.resolve_model("a\0b")


@pytest.mark.parametrize(
    ("typed", "meant"), [("squeezenet", "squeezenet1.1"), ("ResNet18", "resnet18"), ("mobilenetv2", "mobilenet_v2")]
)
def test_near_miss_of_a_zoo_name(typed: str, meant: str) -> None:
    """A name close to one of the zoo's gets that one suggested."""
    with pytest.raises(UsageError, match="no zoo model") as raised:
        source.resolve_model(typed)
    assert f"Did you mean {meant}" in raised.value.hint


def test_external_weights_are_taken_in(tmp_path: pathlib.Path, tiny: bytes) -> None:
    """Weights in another file become part of the bytes, so that these alone are the model."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load_model_from_string(tiny), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = source.resolve_model(str(path)).load()
    want = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load_model_from_string(tiny).graph.initializer}
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), want[tensor.name])


@pytest.mark.parametrize("held", ["initializer", "constant"])
def test_external_weights_of_a_subgraph_lie_beside_the_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Weights of an If's branch come from the model's folder, never from the current one."""
    weight = onnx.numpy_helper.from_array(np.array([1.0, 2.0], "float32"), "w")
    wanted = weight.raw_data
    onnx.external_data_helper.set_external_data(weight, "w.bin")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    made = [] if held == "initializer" else [onnx.helper.make_node("Constant", [], ["w"], value=weight)]
    y, c = (
        onnx.helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (("y", onnx.TensorProto.FLOAT, [2]), ("c", onnx.TensorProto.BOOL, []))
    )
    branch = onnx.helper.make_graph(
        [*made, onnx.helper.make_node("Identity", ["w"], ["b"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [2])],
        [weight] if held == "initializer" else [],
    )
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [c], [y]))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(wanted)
    (tmp_path / "elsewhere" / "w.bin").write_bytes(bytes(8))
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = source.resolve_model(str(tmp_path / "model.onnx")).onnx_bytes
    assert wanted in data
    assert b"w.bin" not in data


def test_external_weights_missing(tmp_path: pathlib.Path, tiny: bytes) -> None:
    """The missing file is named, and the folder it belongs into."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load_model_from_string(tiny), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(UsageError, match=r"w\.bin") as raised:
        source.resolve_model(str(path))
    assert str(tmp_path) in raised.value.hint


@pytest.mark.parametrize("shape", [False, True], ids=["no type", "no shape"])
def test_what_onnx_runtime_takes_is_taken(tmp_path: pathlib.Path, shape: bool) -> None:
    """The domain "ai.onnx" is ONNX's own, and an output without type or shape has what ONNX infers."""
    node = onnx.helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    output = output if shape else onnx.ValueInfoProto(name="y")
    graph, opsets = onnx.helper.make_graph([node], "g", [given], [output]), [onnx.helper.make_opsetid("ai.onnx", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "model.onnx")
    model = source.resolve_model(str(tmp_path / "model.onnx")).load()
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17)]
    assert model.graph.node[0].domain == ""
    assert model.graph.output[0].type == given.type


def test_invalid_graph_names_the_trouble(tmp_path: pathlib.Path) -> None:
    """A graph that the checker refuses is refused with the checker's words, or with what lacks a shape."""
    node = onnx.helper.make_node("Relu", ["nothing_makes_this"], ["y"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [output])), path)
    with pytest.raises(UsageError, match="nothing_makes_this"):
        source.resolve_model(str(path))
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    sizes = onnx.helper.make_tensor_value_info("n", onnx.TensorProto.INT64, ["count"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    for inputs, said in (([given, sizes], "input 'x' has no shape"), ([sizes], "output 'y' has no shape")):
        node = onnx.helper.make_node("Expand", [inputs[0].name, "n"], ["y"])
        onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", inputs, [output])), path)
        with pytest.raises(UsageError, match=said):
            source.resolve_model(str(path))
