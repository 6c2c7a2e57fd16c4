"""Artifacts as plain data, for tests that need one and no compiler."""

from __future__ import annotations

import pathlib
from typing import Any

from device_agent.protocol import PROTOCOL_VERSION, Description
from farm.artifacts import artifact_folder
from farm.artifacts import manifest as manifests
from farm.artifacts.artifact_folder import Artifact, describe_file
from farm.artifacts.given_model import find_task
from farm.artifacts.manifest import Manifest, ModelFacts, Tensor, Verified

LIBRARY = b"\x7fELF and so on"
_INPUT = Tensor(name="x", shape=(1, 3, 8, 8), dtype="float32")
_OUTPUT = Tensor(name="y", shape=(1, 10), dtype="float32")


def make_manifest(library: bytes = LIBRARY, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "name": "tiny-cnn",
        "model": ModelFacts(name="tiny-cnn", sha256="0" * 64, origin="zoo:tiny-cnn"),
        "inputs": (_INPUT,),
        "outputs": (_OUTPUT,),
        "board_type": "jetson-nano",
        "operating_point": "default",
        "simulated": False,
        "architecture": "aarch64",
        "target": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4},
        "link_triple": "aarch64-linux-gnu.2.27",
        "threads": 4,
        "pipeline": "graph/2",
        "workloads": (),
        "memory_bytes": 1 << 27,
        "predicted_latency_s": 0.001,
        "task": find_task([_INPUT], [_OUTPUT]),
        "files": {manifests.LIBRARY: describe_file(library)},
        "versions": {"tvm-farm": "0.1.0", "apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"},
        "created_at": 1.5,
    }
    return Manifest(**(fields | changes))


def verified(library: bytes = LIBRARY, **changes: Any) -> Verified:
    fields: dict[str, Any] = {
        "at": 2.5,
        "matches": True,
        "reason": "",
        "board": "b",
        "board_type": "jetson-nano",
        "simulated": False,
        "reference": "ONNX Runtime 1.0",
        "inputs": ("seed 0",),
        "max_abs_error": 0.0,
        "max_rel_error": 0.0,
        "tolerance_factor": 1.0,
        "library_sha256": describe_file(library).sha256,
    }
    return Verified(**(fields | changes))


def write(folder: pathlib.Path, library: bytes = LIBRARY, **changes: Any) -> Artifact:
    return artifact_folder.write_artifact(folder, make_manifest(library, **changes), {manifests.LIBRARY: library})


def description(architecture: str, board_type: str, simulated: bool = False) -> Description:
    return Description(
        name="b",
        board_type=board_type,
        agent_version="0",
        protocol_version=PROTOCOL_VERSION,
        simulated=simulated,
        architecture=architecture,
        cpu_model="",
        cores_online=(0,),
        cpu_freq_range_hz={},
        memory_bytes=1 << 30,
        engines=("relax-vm",),
        engine_versions={},
        rails=(),
        thermal_zones=(),
    )
