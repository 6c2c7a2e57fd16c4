"""Packages of an artifact: what is in a wheel and a tar, what they are called, and what reads images in them."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import shutil
import sys
import tarfile
import zipfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from farm.artifacts import package
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import InputError, read_arrays
from farm.errors import PermanentError, UsageError
from tests.unit.artifacts import make_manifest, verified, write


def write_wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    return package.write_package(write(tmp_path / "a", verified=verified()), package.WHEEL, tmp_path, None)


def test_wheels_are_named_listed_and_equal(tmp_path: pathlib.Path) -> None:
    """A library linked for glibc 2.27 on aarch64 is tagged so; one for this very machine as what this machine is. No
    date and no chance is in a wheel.
    """
    assert write_wheel(tmp_path).name.endswith("-py3-none-manylinux_2_27_aarch64.whl")
    assert package.find_tag(make_manifest(link_triple=None, architecture="x86_64")) == "py3-none-linux_x86_64"
    (tmp_path / "b").mkdir()
    assert write_wheel(tmp_path).read_bytes() == write_wheel(tmp_path / "b").read_bytes()


def test_a_wheels_record_has_every_file(tmp_path: pathlib.Path) -> None:
    """Each member is listed with its digest and size, as installers check."""
    archive = zipfile.ZipFile(write_wheel(tmp_path))
    (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    rows = [line.split(",") for line in archive.read(record).decode().splitlines()]
    assert {row[0] for row in rows} == set(archive.namelist())
    for name, digest, size in rows:
        if name != record:
            data = archive.read(name)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={wanted}", len(data))


def test_a_tar_is_the_artifact(tmp_path: pathlib.Path) -> None:
    """One folder with the manifest and the files that it lists."""
    path = package.write_package(write(tmp_path / "a", verified=verified()), package.TAR, tmp_path / "x.tar", None)
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert {name.split("/")[1] for name in names} == {"manifest.json", "model.so"}
    assert len({name.split("/")[0] for name in names}) == 1


def test_nothing_is_written_of_what_was_not_verified(tmp_path: pathlib.Path) -> None:
    """The refusal leaves no file behind."""
    with pytest.raises(PermanentError, match="never verified"):
        package.write_package(write(tmp_path / "a"), package.WHEEL, tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_package_gets_a_name_that_python_imports() -> None:
    """Dots, dashes and digits in front go; a name that was asked for is not bent but refused."""
    assert package.find_name("squeezenet1.1") == "squeezenet1_1"
    assert package.find_name("3d-net") == "model_3d_net"
    with pytest.raises(UsageError, match="--name"):
        package.require_name("my-net")
    with pytest.raises(UsageError, match="--name"):
        package.require_name("class")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("test", "standard library"),
        ("json", "standard library"),
        ("site", "standard library"),
        ("NumPy", "pip installs another"),
        ("tvm", "an installed module"),
        ("apache-tvm", "pip installs another"),
        ("scipy", "pip installs another"),
        ("ml-dtypes", "pip installs another"),
        ("Pillow", "pip installs another"),
    ],
)
def test_a_package_takes_no_name_of_another(model: str, reason: str) -> None:
    """A model called as a module or package gets a longer name, and a reason; --name with such a name is refused."""
    words = model.lower().replace("-", "_")
    assert package.find_name(model) == f"model_{words}"
    assert reason in package.explain_name(model)
    with pytest.raises(UsageError, match=reason):
        package.require_name(words)
    assert package.explain_name("resnet18") == package.explain_name("...") == ""


def test_a_package_of_ours_may_be_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose own wheel is installed here keeps its name."""
    artifact = write(tmp_path / "a", verified=verified())
    path = package.write_package(artifact, package.WHEEL, tmp_path, None)
    shutil.unpack_archive(path, tmp_path / "site", "zip")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert package.find_name(artifact.manifest.name) == "tiny_cnn"


def test_a_wheel_is_not_called_what_pip_refuses(tmp_path: pathlib.Path) -> None:
    """`--out model.whl` is answered with the name that a wheel must have."""
    with pytest.raises(UsageError, match=r"pip does not install a wheel called model\.whl"):
        package.write_package(write(tmp_path / "a", verified=verified()), package.WHEEL, tmp_path / "model.whl", None)


@pytest.mark.parametrize("form", [package.WHEEL, package.TAR])
def test_a_folder_that_is_not_there_yet_is_made(tmp_path: pathlib.Path, form: str) -> None:
    """With a slash at its end or without one, one level or several; the package in it has a name of its own."""
    artifact = write(tmp_path / "a", verified=verified())
    for text in ("dist/", "dist", "new/dist/", "v1.2", "x.tar/"):
        path = package.write_package(artifact, form, f"{tmp_path}/{text}")
        assert path.parent == tmp_path / text
        assert path.name.startswith("tiny_cnn-")


def test_another_package_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    """What is there may be the same package of earlier; another model's, another format's, or no package stays."""
    artifact = write(tmp_path / "a", verified=verified())
    other = write(tmp_path / "b", verified=verified(), name="other")
    place = tmp_path / "x.tar"
    package.write_package(artifact, package.TAR, place)
    package.write_package(write(tmp_path / "a", verified=verified(board="later")), package.TAR, place)
    before = place.read_bytes()
    assert b"later" in before
    for form, wrong in ((package.TAR, other), (package.C, artifact)):
        with pytest.raises(UsageError, match="is there already, and is no"):
            package.write_package(wrong, form, place)
    assert place.read_bytes() == before
    wheel = package.write_package(artifact, package.WHEEL, tmp_path)
    assert package.write_package(artifact, package.WHEEL, tmp_path) == wheel
    for text in (b"my thesis", b""):
        wheel.write_bytes(text)
        with pytest.raises(UsageError, match="is there already, and is no wheel package of tiny-cnn for jetson-nano"):
            package.write_package(artifact, package.WHEEL, tmp_path)
        assert wheel.read_bytes() == text


def test_what_cannot_be_a_place_is_refused(tmp_path: pathlib.Path) -> None:
    """A file where a folder should be, and the ending of another kind."""
    artifact = write(tmp_path / "a", verified=verified())
    (tmp_path / "file").write_text("")
    for text, match in (("file/", "file is a file"), ("file/dist", "file is a file"), ("x.tgz", "ends in .tar")):
        with pytest.raises(UsageError) as caught:
            package.write_package(artifact, package.TAR, f"{tmp_path}/{text}")
        assert match in str(caught.value)


def test_pixels_become_what_the_model_takes() -> None:
    """White, normalised, in both layouts, as a batch of one."""
    task: dict[str, Any] = {**make_manifest().task, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.25, 0.125]}
    white = np.full((8, 8, 3), 255, "uint8")
    first = tasks.normalise(white, task)
    assert first.shape == (1, 3, 8, 8)
    assert first.dtype == np.float32
    assert first[0, :, 0, 0].tolist() == [1.0, 2.0, 4.0]
    assert tasks.normalise(white, {**task, "layout": "NHWC"})[0, 0, 0].tolist() == [1.0, 2.0, 4.0]


def test_scores_are_ranked_as_shares() -> None:
    """Logits go through a softmax; what is a distribution already stays; labels are used as far as they go."""
    (best, second) = tasks.rank(np.array([[0.0, np.log(3.0)]]), ["cat"], 2)
    assert best == (1, "class 1", pytest.approx(0.75))
    assert second[1] == "cat"
    assert tasks.rank(np.array([0.9, 0.1]), [], 1) == [(0, "class 0", pytest.approx(0.9))]


def test_boxes_are_where_the_cells_say() -> None:
    """One sure cell is one box, in pixels of the image; a duplicate of its class goes, another class stays."""
    head = np.full((1, 7, 4, 4), -30.0, "float32")
    # Row 1, column 2 of cells of 8 pixels: the middle of the cell, 16 pixels wide, 8 high.
    head[0, :, 1, 2] = (0.5, 0.5, np.log(2.0), 0.0, 9.0, 9.0, -9.0)
    head[0, :, 1, 3] = (-0.5, 0.5, np.log(2.0), 0.0, 4.0, 4.0, -9.0)
    head[0, :, 2, 2] = (0.5, -0.5, np.log(2.0), 0.0, 4.0, -9.0, 4.0)
    task = {"outputs": ["a"], "strides": [8]}
    first, second = tasks.find_boxes({"a": head}, task, 0.5)
    assert (first.left, first.top, first.right, first.bottom) == pytest.approx((24, 16, 56, 32))
    assert (first.index, second.index) == (0, 1)
    assert first.score > second.score > 0.9


def test_a_detectors_image_keeps_its_shape() -> None:
    """A wide picture fills the width, blue first, and grey is below it."""
    task = {"input": "x", "size": [32, 32], "dtype": "float32"}
    inputs, scale = tasks.prepare_boxes(Image.new("RGB", (64, 32), (10, 20, 30)), task)
    assert scale == 0.5
    assert inputs["x"].shape == (1, 3, 32, 32)
    assert inputs["x"][0, :, 0, 0].tolist() == [30, 20, 10]
    assert inputs["x"][0, :, 31, 31].tolist() == [114, 114, 114]


def test_without_pillow_an_image_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names Pillow and the way around it."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install pillow.*npz"):
        tasks.read_image(pathlib.Path("cat.jpg"), 3)


def test_an_image_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    """Text called .jpg is no image, and neither is text called .npz."""
    (tmp_path / "cat.jpg").write_text("meow")
    with pytest.raises(InputError, match="not an image"):
        tasks.read_image(tmp_path / "cat.jpg", 3)
    (tmp_path / "x.npz").write_text("meow")
    with pytest.raises(InputError, match="not an"):
        read_arrays(tmp_path / "x.npz")
