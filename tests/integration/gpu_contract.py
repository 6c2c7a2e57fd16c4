"""What the GPU plug-in does over a CUDA driver, tried in one process per check; a program for a board's interpreter.

Arguments: the plug-in, the stand-in for the driver, a module of kernels, a folder. Prints one JSON object: what came of
each check, which `test_gpu_plugin.py` judges.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import struct
import sys
import traceback
from typing import Any

PLUGIN, DRIVER, KERNELS, FOLDER = (pathlib.Path(word) for word in sys.argv[1:5])
LOG = FOLDER / "calls"
KERNEL_ARGUMENTS = {
    "add": ("handle", "handle", "handle", "int32", "float32"),
    "turn": ("handle", "handle"),
    "total": ("handle", "handle"),
    "eights": ("handle", "handle"),
    "dynamic": ("handle", "handle"),
    "seven": ("handle",),
}
_TYPES = {"handle": (3, 64), "int32": (0, 32), "float32": (2, 32)}
FAILURES = {
    "cuInit": (100, 0),
    "cuMemAlloc_v2": (2, 0),
    "cuMemcpyHtoDAsync_v2": (1, 0),
    "cuModuleLoadDataEx": (218, 0),
    "cuModuleGetFunction": (500, 0),
    "cuLaunchKernel": (701, 0),
    "cuMemcpyDtoHAsync_v2": (719, 0),
    "cuStreamSynchronize": (700, 0),
    "cuDevicePrimaryCtxRetain": (46, 0),
}


def serialise(code: bytes, form: str = "ptx", tags: tuple[str, ...] = ("blockIdx.x", "threadIdx.x")) -> bytes:
    def text(value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(data)) + data

    out = text(form) + struct.pack("<Q", len(KERNEL_ARGUMENTS))
    for name, arguments in KERNEL_ARGUMENTS.items():
        launch = (*tags, "tirx.use_dyn_shared_memory") if name == "dynamic" else tags
        out += text(name) + text(name) + struct.pack("<Q", len(arguments))
        out += b"".join(struct.pack("<BBH", *_TYPES[each], 1) for each in arguments)
        out += struct.pack("<Q", len(launch)) + b"".join(map(text, launch)) + struct.pack("<Q", 0)
    return out + text(code)


def load(code: bytes | None = None, **more: Any) -> Any:
    """The module of kernels, through TVM's loader."""
    import tvm_ffi

    loader = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda")
    return loader(serialise(KERNELS.read_bytes() if code is None else code, **more))


def on_gpu(array: Any) -> Any:
    import tvm.runtime

    return tvm.runtime.tensor(array, tvm.runtime.cuda(0))


def pointer(tensor: Any) -> Any:
    capsule = tensor.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(ctypes.c_uint64.from_address(get(capsule, b"dltensor")).value)


def set_gpu(**settings: Any) -> None:
    os.environ["TVM_FARM_VIRTUAL_GPU"] = ";".join(f"{key}={value}" for key, value in settings.items())


def add(count: int = 100) -> list[float]:
    """A kernel's result: a + 2 b, over more threads than there are numbers."""
    import numpy as np

    a, b, c = (on_gpu(np.arange(count, dtype="float32") * scale) for scale in (1, 10, 0))
    load()["add"](pointer(c), pointer(a), pointer(b), count, 2.0, 4, 32)
    return [float(each) for each in c.numpy()]


def check_arithmetic() -> Any:
    """Arguments of every kind reach a kernel, and a copy back sees what it wrote."""
    set_gpu(log=LOG)
    return add()


def check_meetings() -> Any:
    """Barriers, shared memory and shuffles: a block turned round, its sum, and the sums of every eight threads."""
    import numpy as np

    set_gpu()
    a, b, c = (on_gpu(np.arange(64, dtype="float32")) for _ in range(3))
    module = load()
    module["turn"](pointer(b), pointer(a), 1, 64)
    module["total"](pointer(c), pointer(a), 1, 64)
    turned = b.numpy().tolist()
    module["dynamic"](pointer(b), pointer(a), 1, 64, 256)
    eights = on_gpu(np.zeros(64, "float32"))
    module["eights"](pointer(eights), pointer(a), 1, 64)
    return [turned, float(c.numpy()[0]), b.numpy().tolist(), eights.numpy().tolist()]


def check_two_modules() -> Any:
    import numpy as np

    set_gpu()
    add(8)
    c = on_gpu(np.zeros(1, "float32"))
    load(KERNELS.with_name("second").read_bytes())["seven"](pointer(c), 1, 1)
    return float(c.numpy()[0])


def check_attributes() -> Any:
    import tvm.runtime

    set_gpu(name="NVIDIA Tegra X1", capability=53, memory=1 << 30)
    device = tvm.runtime.cuda(0)
    return [
        device.exist,
        device.compute_version,
        device.device_name,
        device.max_threads_per_block,
        device.max_shared_memory_per_block,
        device.max_thread_dimensions,
        device.warp_size,
        device.total_global_memory,
    ]


def check_workspaces() -> Any:
    import tvm

    set_gpu(log=LOG)
    runtime = ctypes.CDLL(str(pathlib.Path(tvm.__file__).parent / "lib" / "libtvm_runtime.so"))
    runtime.TVMBackendAllocWorkspace.restype = ctypes.c_void_p
    runtime.TVMBackendAllocWorkspace.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    runtime.TVMBackendFreeWorkspace.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    taken = []
    for _ in range(4):
        taken.append(runtime.TVMBackendAllocWorkspace(2, 0, 4096, 2, 32))
        runtime.TVMBackendFreeWorkspace(2, 0, taken[-1])
    return [len(set(taken)), taken[0] % 256, LOG.read_text().count("cuMemAlloc_v2 4096")]


def check_limited_memory() -> Any:
    """A megabyte beside what is held: half of it, again after it was given back, then too much."""
    import tvm.runtime

    from device_agent.platforms import gpu

    set_gpu()
    os.environ["TVM_FARM_GPU_PLUGIN"] = str(PLUGIN)
    held = tvm.runtime.empty((1 << 20,), "float32", tvm.runtime.cuda(0))
    gpu.allow_memory(1 << 20)
    for _ in range(3):
        half = tvm.runtime.empty((1 << 17,), "float32", tvm.runtime.cuda(0))
        del half
    kept = tvm.runtime.empty((1 << 18,), "float32", tvm.runtime.cuda(0))
    del held
    try:
        tvm.runtime.empty((1 << 21,), "float32", tvm.runtime.cuda(0))
    except RuntimeError as error:
        return [str(error), kept.shape[0]]


def check_streams() -> Any:
    """A stream of TVM's is made, awaited by another, synchronised and freed."""
    import tvm.runtime

    set_gpu(log=LOG)
    device = tvm.runtime.cuda(0)
    stream = device.create_raw_stream()
    device.sync(stream)
    device.free_raw_stream(stream)
    return [line.split()[0] for line in LOG.read_text().splitlines() if "Stream" in line]


def check_timer() -> Any:
    """TVM's evaluator is given the GPU's events, not the processor's clock."""
    import tvm.runtime
    import tvm_ffi

    set_gpu(log=LOG)
    timer = tvm_ffi.get_global_func("runtime.timer.cuda")(tvm.runtime.cuda(0))
    return [type(timer).__name__ != "", LOG.read_text().count("cuEventCreate")]


def check_description() -> Any:
    from device_agent.platforms import gpu

    os.environ["TVM_FARM_GPU_PLUGIN"] = str(PLUGIN)
    set_gpu(name="NVIDIA Tegra X2", capability=62, driver=10020)
    return gpu.probe()


def check_silence() -> Any:
    from device_agent.platforms import gpu

    os.environ["TVM_FARM_GPU_PLUGIN"] = str(PLUGIN)
    set_gpu(fail="cuInit:-1")
    gpu.PROBE_TIMEOUT_S = 0.5
    return gpu.probe()


def failing(entry: str, number: int, calls: int = 0) -> Any:
    """A failing driver gives TVM's user an error."""

    def check() -> Any:
        set_gpu(fail=f"{entry}:{number}:{calls}")
        return add(8)

    return check


def check_refused_ptx() -> Any:
    """The driver's log comes along."""
    set_gpu(ptx=65, capability=53)
    return call_ptx(".version 8.8\n.target sm_53\n.address_size 64\n.visible .entry add(\n)\n{\nret;\n}\n")


def check_newer_ptx_target() -> Any:
    set_gpu(ptx=65, capability=53)
    return call_ptx(".version 6.4\n.target sm_62\n.address_size 64\n.visible .entry add(\n)\n{\nret;\n}\n")


def call_ptx(text: str) -> Any:
    return load(text.encode())["add"](ctypes.c_void_p(0), ctypes.c_void_p(0), ctypes.c_void_p(0), 0, 0.0, 1, 1)


def check_source() -> Any:
    set_gpu()
    return load(b'extern "C" __global__ void add() {}', form="cuda")


def check_cut_short() -> Any:
    import tvm_ffi

    set_gpu()
    return tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda")(serialise(b"x")[:40])


def check_long_image() -> Any:
    set_gpu()
    return load(KERNELS.read_bytes()[:-100])


def check_cluster() -> Any:
    set_gpu()
    return load(tags=("blockIdx.x", "clusterCtaIdx.x"))["add"] is None


def check_lost_context() -> Any:
    """After a kernel's fault every call fails with it, and tensors are freed without another."""
    import numpy as np

    set_gpu(fail="cuLaunchKernel:700")
    tensor = on_gpu(np.zeros(4, "float32"))
    said = []
    for attempt in (add, lambda: on_gpu(np.zeros(4, "float32"))):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    del tensor
    return said


def check_fork() -> Any:
    set_gpu()
    add(8)
    return run(lambda: add(8))


def check_no_driver() -> Any:
    import tvm.runtime

    os.environ["TVM_FARM_CUDA_DRIVER"] = "libcuda-that-is-not-there.so"
    assert not tvm.runtime.cuda(0).exist
    return add(8)


def check_old_driver() -> Any:
    os.environ["TVM_FARM_CUDA_DRIVER"] = "libm.so.6"
    return add(8)


def run(check: Any) -> Any:
    """What a check returns, or what it raises as text, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            LOG.unlink(missing_ok=True)
            result = check()
        except RuntimeError as error:
            result = str(error)
        except BaseException:
            result = traceback.format_exc()
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else f"ended with status {status}"


def main() -> None:
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"
    os.environ["TVM_FARM_CUDA_DRIVER"] = str(DRIVER)
    import tvm.runtime  # noqa: F401  before the first fork

    from device_agent.platforms import gpu

    gpu.load_plugin(PLUGIN)
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    checks |= {entry: failing(entry, *how) for entry, how in FAILURES.items()}
    print(json.dumps({name: run(check) for name, check in checks.items()}))


if __name__ == "__main__":
    main()
