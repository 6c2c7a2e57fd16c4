"""Artifacts on disk: written whole, read back, refused when they were changed or are of another version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from device_agent.protocol import Clocks, DomainClocks, OperatingPoint, PinReport, PinStatus
from farm.artifacts import artifact_folder, make, package
from farm.artifacts import manifest as manifests
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.checking import find_tolerance_factor, require_verified, take_inputs
from farm.artifacts.compile import find_algorithm
from farm.artifacts.given_model import find_task, open_model, require_labels
from farm.artifacts.manifest import GpuCode, Manifest, RecordUsed, StoredWeights, Tensor, Verified, WorkloadServed
from farm.artifacts.on_board import HeldForModels, require_made_for
from farm.cli.model_artifacts import _say_weights, _show
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import require_board_type
from farm.settings import Settings
from farm.store import Store
from tests.unit.artifacts import LIBRARY, description, make_manifest, verified, write

GPU_CODE = GpuCode(arch="sm_53", ptx="6.5", kernels=1, registers=1, shared_bytes=0, threads=1, spilled_bytes=0)


def test_what_was_written_is_read_back(tmp_path: pathlib.Path) -> None:
    """A manifest survives the way to disk, and the library is the one written."""
    artifact = write(tmp_path / "a")
    again = artifact_folder.open_artifact(tmp_path / "a")
    assert again.manifest == artifact.manifest
    assert again.read_file("model.so") == LIBRARY
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_verdict_is_kept(tmp_path: pathlib.Path) -> None:
    """What verification found is in the file afterwards, and the file still proves itself."""
    write(tmp_path / "a").update(verified=verified(matches=False))
    kept = artifact_folder.open_artifact(tmp_path / "a").manifest.verified
    assert not kept.matches


def test_nothing_stays_of_a_failed_write(tmp_path: pathlib.Path) -> None:
    """An artifact that cannot be finished leaves the one before, and no scrap."""
    write(tmp_path / "a")
    with pytest.raises(TypeError):
        artifact_folder.write_artifact(tmp_path / "a", make_manifest(), {manifests.LIBRARY: b"new", "more": None})  # type: ignore[dict-item]
    assert artifact_folder.open_artifact(tmp_path / "a").read_file("model.so") == LIBRARY
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_artifact_takes_the_place_of_one_and_of_nothing_else(tmp_path: pathlib.Path) -> None:
    """Compiling again replaces; a folder of the user's files is refused and untouched."""
    write(tmp_path / "a")
    write(tmp_path / "a", library=b"newer")
    assert artifact_folder.open_artifact(tmp_path / "a").read_file("model.so") == b"newer"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(UsageError, match="no artifact"):
        write(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "one"


def test_a_changed_library_is_refused(tmp_path: pathlib.Path) -> None:
    """One flipped byte is found, by verification and packaging alike."""
    artifact = write(tmp_path / "a", verified=verified())
    require_verified(artifact)
    (tmp_path / "a" / manifests.LIBRARY).write_bytes(LIBRARY[:-1] + b"!")
    with pytest.raises(PermanentError, match="SHA-256"):
        require_verified(artifact)


def test_a_changed_manifest_is_refused(tmp_path: pathlib.Path) -> None:
    """A verdict written in by hand does not count."""
    write(tmp_path / "a")
    path = tmp_path / "a" / manifests.NAME
    document = json.loads(path.read_text())
    document["verified"] = verified().model_dump(mode="json")
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="changed"):
        artifact_folder.open_artifact(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not JSON"),
        ("[]", "no manifest"),
        ('{"format": "tvm-farm artifact", "version": 0}', "version 0; this farm reads version 1"),
        ('{"format": "tvm-farm artifact", "version": 2}', "version 2; this farm reads version 1"),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused(tmp_path: pathlib.Path, text: str, match: str) -> None:
    """Garbage, and manifests of older and newer farms, are named for what they are."""
    (tmp_path / manifests.NAME).write_text(text)
    with pytest.raises(UsageError, match=match):
        artifact_folder.open_artifact(tmp_path)


def test_a_folder_without_manifest_is_no_artifact(tmp_path: pathlib.Path) -> None:
    """The error says how to make one."""
    with pytest.raises(UsageError, match="is no artifact") as caught:
        artifact_folder.open_artifact(tmp_path)
    assert "farm model compile" in caught.value.hint


@pytest.mark.parametrize(
    ("verdict", "match"), [(None, "never verified"), (verified(matches=False), "computes something else")]
)
def test_only_what_was_verified_right_is_packaged(tmp_path: pathlib.Path, verdict: Verified | None, match: str) -> None:
    """Neither an unverified artifact nor a wrong one passes."""
    with pytest.raises(PermanentError, match=match):
        require_verified(write(tmp_path / "a", verified=verdict))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"image": np.zeros((1, 3, 8, 8), "float32")}, r"takes the inputs x .*; given: image \(1, 3, 8, 8\) float32"),
        ({"x": np.zeros((1, 3, 9, 9), "float32")}, r"expected x \(1, 3, 8, 8\) float32; given: x \(1, 3, 9, 9\)"),
        ({"x": np.zeros((1, 3, 8, 8))}, r"expected x .* float32; given: x \(1, 3, 8, 8\) float64"),
        ({}, "given: none"),
    ],
)
def test_wrong_inputs_are_named_with_the_right_ones(given: dict[str, Any], match: str) -> None:
    """Names, shapes and element types: what is expected and what was given."""
    with pytest.raises(UsageError, match=match):
        take_inputs(make_manifest(), given)


@pytest.mark.parametrize(
    ("manifest", "board", "match", "hint"),
    [
        ({}, ("x86_64", "local"), r"for aarch64 \(jetson-nano\); board b is x86_64 \(local\)", "--board-type local"),
        ({}, ("aarch64", "jetson-tx2"), r"for aarch64 \(jetson-nano\); board b is aarch64 \(jetson-tx2\)", "--board b"),
        (
            {},
            ("x86_64", "jetson-nano", True),
            r"aarch64 \(jetson-nano\); board b is x86_64 \(jetson-nano, simulated\)",
            "--board b",
        ),
        (
            {"simulated": True},
            ("aarch64", "jetson-nano"),
            r"for aarch64 \(jetson-nano, simulated\); board b is aarch64 \(jetson-nano\)",
            "--board b",
        ),
        (
            {"gpu": GPU_CODE},
            ("aarch64", "jetson-nano", True),
            r"for aarch64 \(jetson-nano\); board b is aarch64 \(jetson-nano, simulated\)",
            "--board b",
        ),
    ],
)
def test_an_artifact_for_something_else_is_refused(
    manifest: dict[str, Any], board: tuple[Any, ...], match: str, hint: str
) -> None:
    """Another processor, another type, a real board for a virtual one's: both are named before anything travels, and
    the command that helps is another than the one that made the artifact.
    """
    made = make_manifest(pipeline="graph/2-exact", **manifest)
    with pytest.raises(UsageError, match=match) as caught:
        require_made_for(made, "b", description(*board))
    assert f"farm model compile tiny-cnn {hint} --exact --out tiny-cnn-b`" in caught.value.hint


def test_an_artifact_for_a_board_is_taken() -> None:
    """Real ones by a virtual board, too, where that runs the type's own code."""
    require_made_for(make_manifest(), "b", description("aarch64", "jetson-nano"))
    require_made_for(make_manifest(), "b", description("aarch64", "jetson-nano", True))
    require_made_for(make_manifest(simulated=True), "b", description("aarch64", "jetson-nano", True))


def test_a_wheel_with_gpu_code_needs_nothing_more() -> None:
    """Its METADATA names the GPU; what it requires is what the wheel for the CPU requires."""
    gpu, cpu = (package._describe("m", "1", make_manifest(**each)).splitlines() for each in ({"gpu": GPU_CODE}, {}))
    assert [line for line in gpu if line not in cpu] == [
        "Summary: tiny-cnn, compiled for the GPU of jetson-nano by tvm-farm 0.1.0"
    ]
    assert len(gpu) == len(cpu)


@pytest.mark.parametrize("place", ["file/a", "file/a/b", "x" * 300, "link/a"])
def test_where_nothing_can_be_written_is_known_first(tmp_path: pathlib.Path, place: str) -> None:
    """A place below a file, with an endless name, or at a dangling link is refused before anything is compiled."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UsageError, match="nothing can be written to"):
        artifact_folder.require_place(tmp_path / place)


def test_looking_first_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """Folders that were made for the try are gone again; those that were there are not."""
    (tmp_path / "there").mkdir()
    artifact_folder.require_place(tmp_path / "there" / "a" / "b" / "c")
    artifact_folder.require_room(tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_too_little_memory_is_found_before_anything_travels() -> None:
    """A board with 1 GiB is not sent what needs 2."""
    held = HeldForModels(
        description("aarch64", "jetson-nano"),
        Settings(),
        lambda *_: pytest.fail("ran"),
        lambda _: pytest.fail("pinned"),
    )
    held.require_fit(make_manifest(memory_bytes=1 << 30))
    with pytest.raises(PermanentError, match="b has 1024 MiB of memory; tiny-cnn needs about 2048 MiB"):
        held.require_fit(make_manifest(memory_bytes=2 << 30))


def test_threads_are_limited_to_the_cores_of_a_power_mode() -> None:
    """A point that leaves two cores on runs two threads, fewer than when the board described itself."""
    clocks = Clocks((DomainClocks("a57", cpus=(0, 1, 2, 3), online=(0, 1)),))
    reached = PinReport(PinStatus.OK, reached=OperatingPoint(power_mode="5W"), clocks=clocks)
    about = dataclasses.replace(description("aarch64", "jetson-nano"), cores_online=(0, 1, 2, 3))
    held = HeldForModels(about, Settings(), lambda *_: pytest.fail("ran"), lambda _: reached)
    assert held.limits(4).threads == 4
    held.pin(OperatingPoint(power_mode="5W"), "mode=5W")
    assert held.limits(4).threads == 2


def test_the_least_exact_algorithm_sets_the_tolerance() -> None:
    """A model with one convolution by F(6, 3) may differ by as much as that does."""
    assert find_tolerance_factor(["direct", "winograd F(6, 3)", "winograd F(2, 3)"]) == 8.0
    assert find_tolerance_factor([]) == 1.0
    assert find_tolerance_factor([find_algorithm("int8_conv2d_quantize 1x1 8x8x8>8"), "direct"]) == 500.0
    assert find_algorithm("depthwise_conv2d_quantize 3x3 8x8x8>8") == "8 bits"
    assert [find_algorithm(name) for name in ("winograd4_conv2d_add 3x3 8x8x8>8", "conv2d 1x1 8x8x8>8", "mean 8")] == [
        "winograd F(4, 3)",
        "direct",
        "",
    ]


@pytest.mark.parametrize(
    ("pipeline", "asked", "workloads", "said"),
    [
        (
            "graph/2-bf16",
            "bf16",
            2,
            "weights of 2 of 0 workloads are in 16 bits: 1.0 MB in place of 2.0; `farm model v",
        ),
        (
            "graph/2-fp16",
            "fp16",
            2,
            "2 of 0 workloads compute in 16 bits; weights take 1.0 MB in place of 2.0; `farm m",
        ),
        ("graph/2-bf16", "bf16", 0, "no workload is predicted to gain by 16 bits (--weights bf16-all takes all that"),
        ("graph/2-bf16-all", "bf16-all", 0, "all weights are float32: no workload has any that can be in 16 bits"),
        ("graph/2-nchw", "bf16", 0, "the model went through the graph pipeline graph/2-nchw, which stores none in 16"),
        ("graph/2-nchw", "bf16-all", 0, "the model went through the graph pipeline graph/2-nchw, which stores none in"),
    ],
)
def test_why_no_weights_are_in_16_bits(pipeline: str, asked: str, workloads: int, said: str) -> None:
    """Each cause has words of its own, and nothing is recommended that was asked for or would not help."""
    weights = StoredWeights(asked=asked, workloads=workloads, bytes=500_000 * workloads)
    told = _say_weights(make_manifest(pipeline=pipeline, weights=weights))
    assert said in told
    assert ("--weights bf16-all" in told) == (workloads == 0 and pipeline == "graph/2-bf16")


def test_estimates_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """A predicted time of 33 ns is `~0.033`, not a measured 0.0, and so is a sum with one in it."""
    record = RecordUsed(
        fit="exact", candidate="c", board_type="jetson-nano", operating_point="default", latency_s=2.2e-6,
        simulated=False, verified_at=1.0,
    )  # fmt: skip
    served = (
        WorkloadServed(hash="1" * 16, name="softmax 10", flop=50.0, weight=1, algorithm="", source="rule",
                       latency_s=3.3e-8),
        WorkloadServed(hash="2" * 16, name="dense 8>8", flop=128.0, weight=1, algorithm="", source="record",
                       latency_s=2.2e-6, record=record),
    )  # fmt: skip
    manifest = make_manifest(workloads=served, predicted_latency_s=2.233e-6)
    list(_show(Artifact(pathlib.Path("art"), manifest), 0.0))
    shown = capsys.readouterr().out
    softmax, dense = (next(line for line in shown.splitlines() if name in line) for name in ("softmax", "dense"))
    assert softmax.rstrip().endswith(" ~0.033")
    assert dense.rstrip().endswith(" 2.20")
    assert "latency summed over them ~2.23 µs" in shown
    assert "~: estimated" in shown


def test_classifiers_are_told_by_their_inputs_and_outputs() -> None:
    """A picture in and a row of scores out is a classifier, in either layout; anything else takes arrays."""
    scores = Tensor(name="y", shape=(1, 10), dtype="float32")
    task = find_task([Tensor(name="x", shape=(1, 224, 224, 3), dtype="float32")], [scores])
    assert (task["kind"], task["layout"], task["size"], task["resize"]) == ("classifier", "NHWC", [224, 224], 256)
    digits = find_task([Tensor(name="x", shape=(1, 1, 28, 28), dtype="float32")], [scores])
    assert (digits["resize"], digits["mean"]) == (28, [0.5])
    words = Tensor(name="x", shape=(1, 128), dtype="int64")
    assert find_task([words], [scores]) == {"kind": "arrays"}
    image = Tensor(name="x", shape=(1, 3, 64, 64), dtype="float32")
    heads = [Tensor(name=f"y{side}", shape=(1, 85, side, side), dtype="float32") for side in (8, 4, 2)]
    assert find_task([image], heads)["strides"] == [8, 16, 32]
    assert find_task([image], heads[::-1]) == {"kind": "arrays"}


def test_an_artifact_knows_its_folder(tmp_path: pathlib.Path) -> None:
    """The path of the manifest itself is taken as well."""
    write(tmp_path / "a")
    opened = artifact_folder.open_artifact(tmp_path / "a" / manifests.NAME)
    assert isinstance(opened, Artifact)
    assert opened.folder == tmp_path / "a"
    assert isinstance(opened.manifest, Manifest)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"versions": {"tvm-farm": "1", "apache-tvm": "1\nRequires-Dist: evil", "apache-tvm-ffi": "1"}}, "versions"),
        ({"versions": {"tvm-farm": "1", "apache-tvm": "1; extra", "apache-tvm-ffi": "1"}}, "no version as PEP 440"),
        ({"versions": {"tvm-farm": "1", "apache-tvm": "1"}}, "apache-tvm-ffi is missing"),
        ({"name": "tiny\nRequires-Dist: evil"}, "name holds a control character"),
        ({"name": "tiny\x1b]0;x\x07"}, "name holds a control character"),
        ({"task": {"kind": "arrays", "\r": 1}}, r"task.\\x0d holds a control character"),
        ({"board_type": "../../nano"}, "board_type"),
        ({"architecture": "../x"}, "architecture"),
        ({"link_triple": "-lfoo"}, "link_triple"),
        ({"created_at": 1e308}, "created_at"),
        ({"predicted_latency_s": 1e308}, "predicted_latency_s"),
        ({"predicted_latency_s": -1.0}, "predicted_latency_s"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"inputs": [{"name": "x", "shape": [-1], "dtype": "float32"}]}, "inputs.0.shape"),
        ({"inputs": [{"name": "x", "shape": [1], "dtype": "object"}]}, "no type of numbers"),
        ({"inputs": [{"name": "x", "shape": [1], "dtype": "S5, evil"}]}, "inputs.0.dtype"),
    ],
)
def test_a_manifest_that_was_made_to_harm_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], match: str
) -> None:
    """Its digest is right, which proves nothing; what it holds would become headers, paths and arguments."""
    write_document(tmp_path, changes)
    with pytest.raises(UsageError, match=match):
        artifact_folder.open_artifact(tmp_path)


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../x", "/x", ".hidden", "manifest.json", "images.py", "__init__.py", "a\nb", "C:"]
)
def test_an_artifact_has_files_with_plain_names(tmp_path: pathlib.Path, name: str) -> None:
    """A name that leads elsewhere, or is a program's or the manifest's own, is no file's."""
    files = make_manifest().model_dump(mode="json")["files"]
    write_document(tmp_path, {"files": files | {name: files[manifests.LIBRARY]}})
    with pytest.raises(UsageError, match=r"is no file of an artifact|holds a control character"):
        artifact_folder.open_artifact(tmp_path)


def test_numbers_that_are_none_are_no_manifest(tmp_path: pathlib.Path) -> None:
    """JSON of Python's writes infinities; no figure here is one."""
    write_document(tmp_path, {"predicted_latency_s": float("inf")})
    with pytest.raises(UsageError, match="the number inf"):
        artifact_folder.open_artifact(tmp_path)


def test_reasons_may_have_lines(tmp_path: pathlib.Path) -> None:
    """What a compiler said of a device, and what was wrong with outputs, is text for people."""
    write(tmp_path / "a", not_made={"gpu": "ptxas:\n\tno"}, verified=verified(matches=False, reason="a\nb"))
    assert artifact_folder.open_artifact(tmp_path / "a").manifest.not_made == {"gpu": "ptxas:\n\tno"}


def test_what_could_not_be_read_is_not_written(tmp_path: pathlib.Path) -> None:
    """A model whose output has a name with an escape in it gives no artifact, rather than one that cannot be opened."""
    with pytest.raises(UsageError, match=r"outputs.name holds a control character"):
        write(tmp_path / "a", outputs=(Tensor(name="\x1b[2J", shape=(1, 10), dtype="float32"),))
    assert not (tmp_path / "a").exists()


def write_document(folder: pathlib.Path, changes: dict[str, Any]) -> None:
    document = make_manifest().model_dump(mode="json") | changes
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / manifests.NAME).write_text(json.dumps({**document, "manifest_sha256": digest}))


def test_a_model_that_no_manifest_can_tell_of_is_refused_before_it_is_compiled(tmp_path: pathlib.Path) -> None:
    """Names come from the exporter; minutes later would be too late to say so."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y\n"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y\n", TensorProto.FLOAT, [1, 8])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    order = make.CompileOrder(open_model(str(tmp_path / "m.onnx")), require_board_type("jetson-nano"))
    settings = Settings(home=str(tmp_path))
    with Store(tmp_path / "farm.db") as store, pytest.raises(UsageError, match="m: outputs holds a control character"):
        make.make_artifact(order, tmp_path / "a", settings, store)


def test_a_file_of_classes_has_a_name_for_each() -> None:
    """Two names for ten scores are refused, for a classifier; a model of another kind may have any."""
    manifest = make_manifest()
    require_labels(b"name\n" * 10, manifest.task, manifest.outputs)
    with pytest.raises(UsageError, match="2 names, and the model has 10 classes"):
        require_labels(b"cat\ndog\n", manifest.task, manifest.outputs)
    require_labels(b"cat\ndog\n", {"kind": "arrays"}, manifest.outputs)
