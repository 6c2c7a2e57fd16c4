"""Ranges of lengths: reading them, the size that is chosen, padding and cropping, and models that padding changes."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest

from farm.artifacts import import_check
from farm.artifacts.artifact_folder import describe_file, list_artifacts, open_artifact
from farm.artifacts.given_model import GivenModel, open_model, open_source
from farm.artifacts.manifest import CompiledSize, Manifest, SequenceLengths, Tensor
from farm.artifacts.package import find_version
from farm.artifacts.runtime.inputs import InputError, fit
from farm.campaign.plan_models import read_models, to_variants
from farm.campaign.spec import check_campaign
from farm.campaign.submit import to_model
from farm.errors import UsageError
from farm.models.lengths import split_shapes
from tests.encoders import make_encoder
from tests.unit.artifacts import LIBRARY, make_manifest, write


def open_encoder(folder: pathlib.Path, *shapes: str, batch: int | None = 1, masked: bool = True) -> GivenModel:
    path = folder / "encoder.onnx"
    onnx.save(make_encoder(1, masked=masked), path)
    return open_model(str(path), shapes, batch)


@pytest.mark.parametrize(
    ("text", "least", "sizes"),
    [
        ("tokens=1..512@32,128,512", 1, (32, 128, 512)),
        ("tokens = 3 .. 7@7", 3, (7,)),
        ("tokens=1..512", 1, (32, 128, 512)),
        ("tokens=100..512", 100, (128, 512)),
        ("tokens=1..100", 1, (8, 32, 100)),
        ("tokens=1..8", 1, (8,)),
    ],
)
def test_a_range_is_read(text: str, least: int, sizes: tuple[int, ...]) -> None:
    plain, lengths = split_shapes(["ids=1,8", text])
    assert plain == ["ids=1,8"]
    assert lengths is not None
    assert (lengths.name, lengths.least, lengths.sizes) == ("tokens", least, sizes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (("tokens=9..4",), "not 9 to 4"),
        (("tokens=0..4",), "from at least 1"),
        (("tokens=1..",), "is not NAME=1..512"),
        (("tokens=1..64@32,8,64",), "do not ascend"),
        (("tokens=1..64@8,32",), "within the range to its end, 64"),
        (("tokens=16..64@8,64",), "do not ascend within the range"),
        (("words=1..64",), "no open dimension 'words'"),
        (("tokens=1..64", "ids=1,64"), "twice: as a range and by 'ids'"),
        (("tokens=1..64", "tokens=64"), "twice: as a range and by 'tokens'"),
        (("tokens=1..64", "batch=1..2"), "a range to both 'tokens' and 'batch'"),
        (("batch=1..64",), "that --batch 1 sets"),
    ],
)
def test_what_is_refused(shapes: tuple[str, ...], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_encoder(tmp_path, *shapes)


def test_a_dimension_can_be_given_by_name(tmp_path: pathlib.Path) -> None:
    """It holds for all inputs, and what else is open is asked for in the same way."""
    opened = open_encoder(tmp_path, "batch=2", "tokens=1..64@8,64", batch=None)
    assert [spec.shape for spec in opened.inputs] == [(2, 64), (2, 64)]
    assert [spec.shape for spec in opened.list_sizes()[0].inputs] == [(2, 8), (2, 8)]
    with pytest.raises(UsageError, match="leaves dimensions open") as caught:
        open_encoder(tmp_path, "batch=1", batch=None)
    assert "--shape tokens=1" in str(caught.value.hint)


def test_padding_is_proved(tmp_path: pathlib.Path) -> None:
    """The output to crop is found; a model that ignores its mask is refused with the difference and the way out."""
    opened = open_encoder(tmp_path, "tokens=1..64@8,64")
    (states, _) = opened.source.load().graph.output
    assert import_check.find_output_axes(opened) == {states.name: (1,)}
    with pytest.raises(UsageError, match="padded from 1 to 8: output 0 differs by") as caught:
        import_check.find_output_axes(open_encoder(tmp_path, "tokens=1..64@8,64", masked=False))
    assert "attention mask" in str(caught.value.hint)
    assert "--shape tokens=64" in str(caught.value.hint)


def with_lengths() -> Manifest:
    tensors = {name: Tensor(name=name, shape=(1, 64), dtype="int64") for name in ("ids", "mask", "states")}
    sizes = [
        CompiledSize(size=size, library=library, workloads=(), predicted_latency_s=None)
        for size, library in ((8, "model-8.so"), (64, "model.so"))
    ]
    return make_manifest(
        inputs=(tensors["ids"], tensors["mask"]),
        outputs=(tensors["states"],),
        files={"model.so": describe_file(LIBRARY), "model-8.so": describe_file(b"8")},
        lengths=SequenceLengths(
            name="tokens", least=2, sizes=tuple(sizes), inputs={"ids": (1,), "mask": (1,)}, outputs={"states": (1,)}
        ),
    )


@pytest.mark.parametrize(("length", "library"), [(2, "model-8.so"), (8, "model-8.so"), (9, "model.so")])
def test_the_smallest_size_that_holds_the_length_runs(length: int, library: str) -> None:
    ones = np.ones((1, length), "int64")
    fitted = fit(with_lengths().to_runtime(), {"mask": ones, "ids": ones})
    size = 8 if length <= 8 else 64
    assert fitted.library == library
    assert [(name, array.shape, array.sum()) for name, array in fitted.inputs.items()] == [
        ("ids", (1, size), length),
        ("mask", (1, size), length),
    ]
    (cropped,) = fitted.crop([np.arange(size).reshape(1, size)])
    assert cropped.tolist() == [list(range(length))]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ((1, 1), (1, 1), "ids has 1 tokens; the model takes from 2 to 64"),
        ((1, 65), (1, 65), "ids has 65 tokens"),
        ((1, 9), (1, 8), r"expected mask \(1, 9\) int64"),
        ((9,), (1, 9), r"expected ids \(1, 64\) int64"),
    ],
)
def test_inputs_of_no_such_length_are_refused(ids: tuple[int, ...], mask: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(with_lengths().to_runtime(), {"ids": np.ones(ids, "int64"), "mask": np.ones(mask, "int64")})


def test_a_manifest_without_lengths_is_as_before(tmp_path: pathlib.Path) -> None:
    """Its text has no word of them; a package's version is that of all its libraries."""
    write(tmp_path / "fixed")
    assert "lengths" not in (tmp_path / "fixed" / "manifest.json").read_text()
    assert open_artifact(tmp_path / "fixed").manifest.lengths is None
    assert find_version(with_lengths()) != find_version(make_manifest())
    with pytest.raises(ValueError, match=r"there is no model-8\.so"):
        make_manifest(lengths=with_lengths().lengths)


def test_every_size_is_tuned_and_one_artifact_made(tmp_path: pathlib.Path) -> None:
    """The sizes are models of a campaign by file or `farm tune`; their artifact has the range."""
    opened = open_encoder(tmp_path, "tokens=1..64@8,64", batch=2)
    file = check_campaign(
        {
            "name": "c",
            "models": [{"path": "encoder.onnx", "batch": 2, "lengths": "tokens=1..64@8,64"}],
            "boards": {"types": "jetson-nano"},
            "budget": {"trials": 1},
        },
        str(tmp_path / "c.yaml"),
    )
    variants, faults = read_models(file)
    assert (faults, to_variants(opened)) == ([], variants[::-1])
    assert [each.name for each in variants] == ["encoder tokens=8", "encoder tokens=64"]
    assert [[spec.shape for spec in each.inputs] for each in variants] == [[(2, 8)] * 2, [(2, 64)] * 2]
    kind = {"type": "jetson-nano", "simulated": False, "pipeline": "graph/2", "points": ["default"]}
    models = [to_model(each).model_dump(exclude_unset=True) for each in variants]
    (wanted,) = list_artifacts({"models": models, "types": [kind]})
    assert wanted.name == "encoder-jetson-nano"
    assert "--batch 2 --shape tokens=1..64@8,64" in wanted.command


def test_a_tuned_batch_is_found_again(tmp_path: pathlib.Path) -> None:
    """A variant for a campaign names the model as it is in its file, and what was asked of it."""
    opened = open_encoder(tmp_path, "tokens=8", batch=2)
    (variant,) = to_variants(opened)
    assert (variant.source.sha256, variant.batch) == (opened.about.sha256, 2)
    assert open_source(variant.source, variant.shapes, variant.batch).inputs == opened.inputs == variant.inputs
