"""Code for boards' GPUs as far as a machine without one can make and check it, with NVIDIA's compiler and assembler."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import pytest

from device_agent.board_types import load_board_types as load_for_agent
from device_agent.platforms import gpu
from device_agent.protocol import GPU, PROTOCOL_VERSION, Description, Engine, ProtocolError, RunSpec, Status
from farm.artifacts.manifest import GpuCode
from farm.artifacts.on_board import require_gpu
from farm.errors import PermanentError, UsageError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.virtual import gpu_time

# With the headers that TVM writes before its kernels.
SOURCE = """
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
using cuda::std::int64_t;
extern "C" __global__ void __launch_bounds__(128) scale(float* __restrict__ to, float* __restrict__ from, float by) {
  __shared__ float kept[256];
  kept[threadIdx.x] = from[blockIdx.x * 128 + threadIdx.x];
  __syncthreads();
  to[blockIdx.x * 128 + threadIdx.x] = kept[127 - threadIdx.x] * by;
}
"""
ROOMY = code.PtxLimits(registers=32768, shared_bytes=49152, threads=1024)


@pytest.fixture(scope="module")
def text() -> str:
    """The kernel's PTX for a Nano."""
    return code.compile_ptx(SOURCE, "sm_53")


@pytest.mark.parametrize(
    ("board_type", "arch", "newest"),
    [
        ("jetson-nano", "sm_53", "6.5"),
        ("jetson-tx2", "sm_62", "6.5"),
        ("jetson-xavier-nx", "sm_72", "6.5"),
        ("jetson-agx-xavier", "sm_72", "6.5"),
        ("jetson-orin-nano-8gb", "sm_87", "7.4"),
        ("jetson-orin-nx-16gb", "sm_87", "7.4"),
        ("jetson-agx-orin-64gb", "sm_87", "7.4"),
    ],
)
def test_the_assembler_takes_the_code_for_every_jetson(board_type: str, arch: str, newest: str) -> None:
    """Source becomes PTX that says the oldest driver's version, and ptxas takes it for the exact GPU."""
    plan = code.plan_gpu(load_board_types()[board_type])
    assert (plan.arch, plan.newest_ptx) == (arch, newest)
    made = code.make_code(SOURCE, plan, simulated=False)
    assert f".version {newest}\n".encode() in made.code
    (usage,) = made.usages
    assert (usage.kernel, usage.threads, usage.shared_bytes, usage.spilled_bytes) == ("scale", 128, 1024, 0)
    assert 1 < usage.registers < 64


def test_what_a_driver_is_too_old_for_is_found(text: str) -> None:
    """What asks for no more than the driver has stays as it is; text without a version is no PTX. An instruction of a
    later ISA does not get through because the header was rewritten.
    """
    older = code.rewrite_version(text, "6.0")
    assert code.rewrite_version(older, "6.5") == older
    with pytest.raises(PermanentError, match="PTX without"):
        code.rewrite_version("ret;", "6.5")
    hinted = text.replace("ret;", '.pragma "used_bytes_mask 4095";\n\tret;', 1)
    assert code.rewrite_version(hinted, "6.0").split() == older.split()
    later = code.rewrite_version(text, "6.5").replace("ret;", "activemask.b32 %r1;\n\tret;", 1)
    assert code.assemble(later, "sm_53", ROOMY)
    with pytest.raises(PermanentError, match=r"ptxas refuses the code for sm_53: (?s:.*)[Aa]ctivemask"):
        code.assemble(code.rewrite_version(later, "6.0"), "sm_53", ROOMY)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"threads": 64}, "needs 128 threads per block; the GPU has 64"),
        ({"shared_bytes": 1000}, "needs 1024 bytes of shared memory per block; the GPU has 1000"),
        ({"registers": 1000}, r"needs \d+ registers per block; the GPU has 1000"),
    ],
)
def test_a_kernel_beyond_a_limit_is_named(text: str, limits: dict[str, int], what: str) -> None:
    """Threads, shared memory and registers: the kernel, what it takes, what there is."""
    with pytest.raises(PermanentError, match=f"the kernel scale {what}"):
        code.assemble(code.rewrite_version(text, "6.5"), "sm_53", dataclasses.replace(ROOMY, **limits))


def test_the_compilers_words_reach_the_user() -> None:
    """Source that is wrong is refused with NVRTC's own words."""
    with pytest.raises(PermanentError, match="nowhere"):
        code.compile_ptx('extern "C" __global__ void f() { nowhere(); }', "sm_53")


def test_a_virtual_board_of_a_newer_gpu_is_refused() -> None:
    """Its machine code has another form, which is not guessed; a real board gets its PTX."""
    plan = code.plan_gpu(load_board_types()["jetson-orin-nano-8gb"])
    source = 'extern "C" __global__ void f(float* a) { a[0] = 1; }'
    with pytest.raises(PermanentError, match="do not emulate a GPU of sm_87"):
        code.make_code(source, plan, simulated=True)
    assert b".target sm_87" in code.make_code(source, plan, simulated=False).code


def test_a_board_without_a_gpu_is_named() -> None:
    """Code for a GPU is made for board types that have one."""
    with pytest.raises(UsageError, match="raspberry-pi-4 has no GPU"):
        code.plan_gpu(load_board_types()["raspberry-pi-4"])


def test_versions_compare_as_numbers() -> None:
    """10.2 is newer than 9.0; a version in between takes what the older one does; nothing is known before 9.0."""
    assert code.find_newest("10.2") == "6.5"
    assert code.find_newest("12.5") == "8.4"
    assert code.is_newer("10.0", "9.9")
    with pytest.raises(UsageError, match="too old"):
        code.find_newest("8.0")


def describe(**changes: object) -> Description:
    """A board's description."""
    nothing: dict[str, object] = {
        **{key: {} for key in ("cpu_freq_range_hz", "engine_versions")},
        **{key: [] for key in ("cores_online", "engines", "rails", "thermal_zones")},
        **dict.fromkeys(("agent_version", "architecture", "cpu_model"), ""),
    }
    facts = {
        "name": "n",
        "board_type": "jetson-nano",
        "protocol_version": PROTOCOL_VERSION,
        "simulated": False,
        "memory_bytes": 0,
    }
    return Description.from_dict(nothing | facts | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "board n runs no code for GPUs: its agent has no plug-in"),
        ({"notes": ["the GPU cannot be used: no CUDA driver: gone"]}, "no CUDA driver: gone"),
        (
            {"engine_versions": {"cuda": "10.2 sm_53"}},
            "the code is for sm_62; the GPU of board n is an older one, sm_53",
        ),
        ({"engine_versions": {"cuda": "9.0 sm_62"}}, "too old: CUDA 9.0 takes PTX 6.0, the code needs 6.5"),
        ({"engine_versions": {"cuda": "10.2 sm_62"}}, ""),
        ({"engine_versions": {"cuda": "12.6 sm_87"}}, ""),
    ],
)
def test_a_board_that_cannot_run_code_says_why(changes: dict[str, object], said: str) -> None:
    """No GPU, an older one, a driver that is too old: what was found, and what is needed."""
    needed = GpuCode(arch="sm_62", ptx="6.5", kernels=1, registers=1, shared_bytes=0, threads=1, spilled_bytes=0)
    if not said:
        require_gpu(needed, "n", describe(**changes))
        return
    with pytest.raises(PermanentError) as caught:
        require_gpu(needed, "n", describe(**changes))
    assert said in str(caught.value)


def test_the_drivers_errors_are_outcomes() -> None:
    """Memory, refused code and a kernel's crash are distinguished; other texts mean nothing."""
    assert gpu.find_status("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)") is Status.OUT_OF_MEMORY
    assert gpu.find_status("CUDA_ERROR_UNSUPPORTED_PTX_VERSION") is Status.LOAD_FAILED
    assert gpu.find_status("launch of k: CUDA_ERROR_ILLEGAL_ADDRESS") is Status.CRASHED
    assert gpu.find_status("cuInit: CUDA_ERROR_NO_DEVICE") is Status.FARM_ERROR
    assert gpu.find_status("out of memory") is None


def test_a_virtual_board_plays_its_types_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Architecture, driver, memory and limits are the type's; a type without a GPU has none."""
    for name in ("TVM_FARM_GPU_PLUGIN", gpu.DRIVER_VARIABLE, gpu_time.VARIABLE):
        monkeypatch.setenv(name, "")
    gpu_time.use_folder(tmp_path, load_for_agent()["jetson-tx2"])
    played = dict(pair.split("=") for pair in os.environ[gpu_time.VARIABLE].split(";") if pair)
    assert (played["capability"], played["driver"], played["registers"]) == ("62", "10020", "32768")
    gpu_time.use_folder(tmp_path, load_for_agent()["raspberry-pi-4"])
    assert gpu.describe() == ("", "")


def test_only_programs_run_on_the_gpu() -> None:
    """A kernel alone, or an ONNX file, does not; neither does anything on an unknown device."""
    spec = RunSpec(Engine.RELAX_VM, device=GPU)
    assert RunSpec.from_json(json.dumps(spec.to_dict())) == spec
    with pytest.raises(ProtocolError, match="does not run on the GPU"):
        RunSpec(Engine.ONNXRUNTIME, device=GPU)
    with pytest.raises(ProtocolError, match="not served"):
        RunSpec(Engine.RELAX_VM, device="npu")
