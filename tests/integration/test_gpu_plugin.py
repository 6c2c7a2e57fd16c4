"""The GPU plug-in over a stand-in for the CUDA driver: natively, and in the stock aarch64 runtime under emulation."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from device_agent.platforms import gpu
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.provision.bundle_build import find_agent_source, pack_agent
from tests.integration.conftest import ROOT

CONTRACT = pathlib.Path(__file__).with_name("gpu_contract.py")
SECOND = 'extern "C" __global__ void __launch_bounds__(1) seven(float* to) { to[0] = 7.0f; }'
TIMEOUT_S = 240.0
# As the agent does in `device-agent serve`, and then in the child that asks the driver.
_FIRST_LOOK = """
import json
import tvm.runtime  # the agent has it before it forks: the driver alone is waited for
from device_agent.platforms import gpu
from device_agent.board_types import load_board_types
gpu.use_folder(None, load_board_types()["jetson-nano"])
print(json.dumps([gpu.__file__, *gpu.describe()]))
"""


def build(folder: pathlib.Path, triple: str | None) -> list[pathlib.Path]:
    kernels = folder / "kernels"
    plan = code.plan_gpu(load_board_types()["jetson-nano"])
    source = CONTRACT.with_name("gpu_contract_kernels.cu").read_text()
    kernels.write_bytes(code.make_code(source, plan, simulated=True).code)
    (folder / "second").write_bytes(code.make_code(SECOND, plan, simulated=True).code)
    return [code.build_plugin(folder, triple), code.build_driver(folder, triple), kernels]


@pytest.fixture(scope="module", params=["native", "aarch64"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu")
    interpreter, triple = sys.executable, None
    if request.param == "aarch64":
        interpreter = f"{request.getfixturevalue('emulated_root')}/usr/bin/board-python"
        triple = load_board_types()["jetson-nano"].link_triple
    command = [interpreter, str(CONTRACT), *map(str, build(folder, triple)), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QEMU_CPU": "cortex-a57"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_kernels_compute(said: dict[str, Any]) -> None:
    """Arguments of every kind reach a kernel; blocks share memory, wait for each other and shuffle."""
    assert said["arithmetic"] == [21.0 * i for i in range(100)]
    turned, total, dynamic, eights = said["meetings"]
    assert turned == [float(63 - i) for i in range(64)]
    assert total == sum(range(64))
    assert dynamic == turned
    assert eights == [float(sum(range(i // 8 * 8, i // 8 * 8 + 8))) for i in range(64)]  # each eight has its own mask
    assert said["two_modules"] == 7.0


def test_the_device_and_its_streams_are_the_drivers(said: dict[str, Any]) -> None:
    """TVM and the agent report the driver's message. Workspaces are reused and aligned, streams live and end, the
    timer is one of events.
    """
    assert said["attributes"] == [True, "5.3", "NVIDIA Tegra X1", 1024, 49152, [1024, 1024, 64], 32, 1 << 30]
    found = said["description"]
    assert (found["name"], found["compute_capability"]) == ("NVIDIA Tegra X2", "6.2")
    assert found["driver_version"] == 10020
    assert said["workspaces"] == [1, 0, 1]
    assert said["streams"] == ["cuStreamCreate", "cuStreamSynchronize", "cuStreamDestroy_v2"]
    assert said["timer"] == [True, 2]


def test_memory_is_limited(said: dict[str, Any]) -> None:
    """What is given back may be taken again; the limit is the driver's own error."""
    error, kept = said["limited_memory"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in error
    assert "8388608 bytes beyond the limit" in error
    assert kept == 1 << 18


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE"),
        ("cuMemAlloc_v2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemcpyHtoDAsync_v2", "CUDA_ERROR_INVALID_VALUE"),
        ("cuModuleLoadDataEx", "CUDA_ERROR_INVALID_PTX"),
        ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND"),
        ("cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ("cuMemcpyDtoHAsync_v2", "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ],
)
def test_an_error_has_the_drivers_name(said: dict[str, Any], entry: str, name: str) -> None:
    """Each refusal of the driver is an exception with its name and its words."""
    assert re.search(rf"{name} \(.+\)$", str(said[entry])), said[entry]


def test_what_cannot_run_is_refused_with_the_reason(said: dict[str, Any]) -> None:
    """PTX that is too new, code for another GPU, source, and bytes cut short."""
    assert "Unsupported .version 8.8; current version is '6.5'" in said["refused_ptx"]
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in said["refused_ptx"]
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in said["newer_ptx_target"]
    assert "CUDA source" in said["source"]
    assert "cut short" in said["cut_short"]
    assert "machine code is cut short" in said["long_image"]
    assert "clusterCtaIdx.x" in said["cluster"]


def test_what_fails_for_good_is_told(said: dict[str, Any]) -> None:
    """After an illegal address every call says so, and the process still ends by itself. No driver, one that is too
    old or never answers, and a process that was forked too late.
    """
    first, second = said["lost_context"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in first
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in second
    assert "did not answer within 0.5 s" in said["silence"]["error"]
    assert "no CUDA driver" in said["no_driver"]
    assert "too old" in said["old_driver"]
    assert "forked" in said["fork"]


@pytest.mark.parametrize("system", ["native", "aarch64"])
def test_an_agent_from_a_bundle_has_it(system: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> None:
    """What a bundle's wheel unpacks to, and TVM's stock runtime, are all that a board with a driver needs."""
    interpreter, triple = sys.executable, f"{platform.machine()}-linux-gnu.2.27"
    if system == "aarch64":
        interpreter = f"{request.getfixturevalue('emulated_root')}/usr/bin/board-python"
        triple = "aarch64-linux-gnu.2.27"
    added = {f"device_agent/native/{name}": data for name, data in code.read_files(triple, simulated=False).items()}
    assert len(added) == 1
    wheel = pack_agent(find_agent_source(), tmp_path, added, "linux")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    driver = code.build_driver(tmp_path, triple)
    done = subprocess.run(
        [interpreter, "-c", _FIRST_LOOK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), gpu.DRIVER_VARIABLE: str(driver)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    place, cuda, lack = json.loads(done.stdout)
    assert place.startswith(str(tmp_path / "site"))
    assert (cuda, lack) == ("10.2 sm_53", "")


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_it_needs_nothing_newer_than_glibc_2_27(architecture: str, tmp_path: pathlib.Path) -> None:
    """What JetPack 4 has is enough, for the plug-in as for the stand-in, and no C++ runtime but TVM's is asked for."""
    triple = f"{architecture}-linux-gnu.2.27"
    for path in (code.build_plugin(tmp_path, triple), code.build_driver(tmp_path, triple)):
        data = path.read_bytes()
        assert str(ROOT).encode() not in data  # equal sources give equal bytes, wherever they lie
        versions = [tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+(?:\.\d+)+)\0", data)]
        assert versions
        assert max(versions) <= (2, 27)
        needed = set(re.findall(rb"\0(lib[\w+-]+\.so[.\d]*)\0", data))
        assert needed <= {b"libc.so.6", b"libm.so.6", b"libdl.so.2", b"libpthread.so.0", path.name.encode()} | {
            b"libcuda.so.1"
        }


def test_it_stays_small() -> None:
    """The plug-in is at most 850 lines: small enough to be read before it is put on a board."""
    folder = ROOT / "device_agent" / "native"
    assert sum(len(path.read_text().splitlines()) for path in folder.iterdir()) <= 850
