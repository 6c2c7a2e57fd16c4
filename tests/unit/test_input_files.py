"""Users' files of arrays and images: read as what they are, or refused with a reason, for any error."""

from __future__ import annotations

import io
import pathlib
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from farm.artifacts import checking
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import InputError, read_arrays
from farm.cli import model_artifacts
from farm.errors import UsageError
from farm.measure.arrays import pack_arrays, unpack_arrays


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def zipped(content: bytes, name: str = "x.npy", method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


GOOD = zipped(npy(np.arange(6.0).reshape(2, 3)))
PACKED = zipped(npy(np.zeros(5000)), method=zipfile.ZIP_DEFLATED)
BROKEN = {
    "no archive": b"meow",
    "empty": b"",
    "an .npy": npy(np.ones(3)),
    "cut short": GOOD[: len(GOOD) // 2],
    "damaged data": PACKED[:60] + b"\xff" * 10 + PACKED[70:],
    "wrong checksum": GOOD.replace(struct.pack("<d", 3.0), struct.pack("<d", 4.0)),
    "encrypted": GOOD.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"),
    "unknown compression": PACKED.replace(struct.pack("<HH", 0, 8), struct.pack("<HH", 0, 99)),
    "text inside": zipped(b"meow", "notes.txt"),
    "Python objects": zipped(npy(np.array([{}], dtype=object), allow_pickle=True)),
    "no header": zipped(b"meow"),
    "a header that is no dictionary": zipped(header("[1, 2]\n")),
    "a header that is no Python": zipped(header("{'descr': (\n")),
    "a nested header": zipped(header("(" * 3000 + "\n")),
    "a huge shape": zipped(header("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 99999999), }\n")),
    "a negative shape": zipped(header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 0), }\n")),
    "an unknown type": zipped(header("{'descr': '<q9', 'fortran_order': False, 'shape': (1,), }\n")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_archives_are_refused(tmp_path: pathlib.Path, kind: str) -> None:
    """Each kind of broken .npz is an InputError that names the file."""
    path = tmp_path / "x.npz"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(InputError, match=r"x\.npz is not an \.npz of plain arrays: ."):
        read_arrays(path)


def test_archives_that_unpack_to_too_much_are_refused(tmp_path: pathlib.Path) -> None:
    """A member that claims 3 GB is refused before it is unpacked; what is no regular file before it is opened."""
    path = tmp_path / "x.npz"
    path.write_bytes(PACKED.replace(struct.pack("<I", 40128), struct.pack("<I", 3 << 30)))
    with pytest.raises(InputError, match="unpacks to 3,221,225,472 bytes"):
        read_arrays(path)
    with pytest.raises(InputError, match="not a regular file"):
        read_arrays(pathlib.Path("/dev/zero"))


def test_good_arrays_are_read_as_they_are(tmp_path: pathlib.Path) -> None:
    """Scalars, empty arrays, Fortran's order, bytes and packed files come back as they were written."""
    arrays = {
        "scalar": np.asarray(np.float32(2)),
        "empty": np.zeros((0, 3)),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "bytes": np.arange(5, dtype="uint8"),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found = read_arrays(tmp_path / "x.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=True)


def test_arrays_may_have_any_name(tmp_path: pathlib.Path) -> None:
    """Outputs and inputs called as arguments of NumPy's own writer are saved and sent under their names."""
    arrays = {name: np.arange(3.0) for name in ("file", "args", "allow_pickle", "kwds")}
    checking.write_outputs(arrays, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert sorted(found) == sorted(arrays)
    assert sorted(unpack_arrays(pack_arrays(arrays))) == sorted(arrays)


@pytest.mark.parametrize("ending", ["png", "tiff", "pgm"])
def test_grey_of_16_bits_is_read_by_its_depth(tmp_path: pathlib.Path, ending: str) -> None:
    """Half of 65535 is mid grey, not white."""
    path = tmp_path / f"x.{ending}"
    Image.fromarray(np.array([[0, 257, 32896, 65535]], "uint16")).save(path)
    for channels in (1, 3):
        read = np.asarray(tasks.read_image(path, channels)).reshape(4, channels)
        assert read[:, 0].tolist() == [0, 1, 128, 255]


def test_images_are_refused_for_what_they_are(tmp_path: pathlib.Path) -> None:
    """Too many pixels, unknown ranges, damaged files and formats beyond the list are refused with a reason."""
    Image.new("1", (13_000, 13_000)).save(tmp_path / "large.png")
    Image.fromarray(np.ones((2, 2), "float32")).save(tmp_path / "float.tiff")
    whole = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(whole, "PNG")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[:-60])
    (tmp_path / "x.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    reasons = {
        "large.png": "13000 x 13000 pixels",
        "float.tiff": "32 bits",
        "cut.png": "not an image",
        "x.eps": "no such format",
        "none.png": "no file",
    }
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=reason):
            tasks.read_image(tmp_path / name, 3)


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/zero", "regular file"), ("/proc/self/exe", "not UTF-8 text|bytes")]
)
def test_names_of_classes_are_text(path: str, reason: str) -> None:
    """A device or a program given with --classes is refused, and not read to its end."""
    with pytest.raises(UsageError, match=reason):
        model_artifacts.read_labels(pathlib.Path(path))
