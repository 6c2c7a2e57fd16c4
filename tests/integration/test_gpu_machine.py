"""Machine code on the virtual GPU: what it computes, what it refuses, what ends it, and how long it is said to take."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from device_agent.protocol.processors import START_S, find_processor
from farm.gpu import code
from farm.virtual import gpu_time
from tests.integration.conftest import ROOT
from tests.integration.virtual_gpu import assemble

RNG = np.random.default_rng(5)
NANO = gpu_time.Gpu(1, 921.6e6, 25.6e9, 262144)
EACH = (
    'extern "C" __global__ void f({0}* y, const {0}* a, const {0}* b, int n) {{\n'
    "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) y[i] = {1};\n}}\n"
)
FLOATS = RNG.normal(size=(2, 500)).astype("float32") * 3
WHOLE = RNG.integers(-(2**31), 2**31 - 1, (2, 500)).astype("int32")
SMALL = np.where((few := RNG.integers(-9, 10, 500)) == 0, 3, few).astype("int32")
# Every pair of them.
EXTREMES = np.array(list(itertools.product([1e38, 1e-38, 0, 3, -1, 1e-40, np.inf, -np.inf, np.nan], repeat=2)), "f4").T
PARTED = """extern "C" __global__ void f(int* y, const int* a, int n) {
  __shared__ int kept[128];
  int i = threadIdx.x, sum = 0, steps = a[i] & 15;
  for (int k = 0; k < steps; ++k) {
    if (k & 1) { if (a[i] & 64) continue; sum += k; } else { sum -= a[k]; if (sum < -5000) break; }
  }
  kept[i] = sum;
  __syncthreads();
  if (i < 32) { for (int step = 16; step; step /= 2) kept[i] += __shfl_xor_sync(~0u, kept[i], step, 32); }
  __syncthreads();
  y[i] = kept[127 - i];
  int local[40];
  for (int k = 0; k < 40; ++k) local[k] = k * sum;
  y[i] += local[(a[i] & 31) + 3];
}
"""
HALVES = """extern "C" __global__ void f(unsigned* y, const unsigned* a, const unsigned* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum, half = 0x38003800u;
  if (i >= n) return;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a[i]), "r"(half));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y[i]) : "r"(a[i]), "r"(b[i]), "r"(sum));
}
"""
FAULTS = {
    "race": ("__shared__ float s[128]; s[threadIdx.x] = y[threadIdx.x]; __syncthreads();"
        " float v = s[127 - threadIdx.x]; s[threadIdx.x] = v; __syncthreads(); y[threadIdx.x] = s[threadIdx.x];",
             "CUDA_ERROR_LAUNCH_FAILED", "races with another thread"),
    "unwritten": ("__shared__ float s[128]; if (threadIdx.x < 64) s[threadIdx.x] = 1; __syncthreads();"
                  " y[threadIdx.x] = s[threadIdx.x];", "CUDA_ERROR_LAUNCH_FAILED", "that nothing wrote"),
    "outside": ("y[threadIdx.x + 4000] = 1;", "CUDA_ERROR_ILLEGAL_ADDRESS", "STG has an address out of memory"),
    "not aligned": ("*(float4*)(y + threadIdx.x) = make_float4(1, 2, 3, 4);", "CUDA_ERROR_MISALIGNED_ADDRESS", "STG"),
}  # fmt: skip
TILE = """extern "C" __global__ void f(float* y, const float* a) {
  __shared__ float s[THREADS];
  float l[HELD];
  for (int j = 0; j < HELD; ++j) l[j] = 0;
  for (int k = 0; k < STEPS; ++k) {
    __syncthreads();
    s[threadIdx.x] = a[(blockIdx.x + k) * THREADS + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 16; ++i) for (int j = 0; j < HELD; ++j) l[j] += s[i] * s[(threadIdx.x + j) % THREADS];
  }
  for (int j = 0; j < HELD; ++j) y[(blockIdx.x * HELD + j) * THREADS + threadIdx.x] = l[j];
}
"""
CONFLICT = """extern "C" __global__ void f(float* y, const float* a) {
  __shared__ float s[4096];
  for (int i = threadIdx.x; i < 4096; i += 128) s[i] = a[i];
  __syncthreads();
  float sum = 0;
  for (int k = 0; k < 64; ++k) sum += s[(threadIdx.x * STRIDE + k * 7) % 4096];
  y[threadIdx.x * PITCH] = sum;
}
"""


def wrap(values: Any) -> Any:
    """The low 32 bits, signed."""
    return np.asarray(values, "int64").astype("uint32").view("int32")


def divide(a: Any, b: Any) -> Any:
    """Towards zero, as C does."""
    return wrap(np.trunc(a.astype("float64") / b))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return code.build_driver(tmp_path_factory.mktemp("gpu"), None)


def test_a_cubin_is_read_within_its_bytes(tmp_path: pathlib.Path) -> None:
    """20,000 of them with random changes are taken or refused; AddressSanitizer sees no read beyond their bytes."""
    if shutil.which("g++") is None and os.environ.get("FARM_REQUIRE_SANITIZER") != "1":
        pytest.skip("g++ is not installed")
    (tmp_path / "cubin").write_bytes(assemble(EACH.format("float", "a[i] + b[i]")))
    sources = [pathlib.Path(__file__).with_name("cubin_fuzz.cc")]
    sources += [code.find_virtual_gpu() / name for name in ("cubin.cc", "decode.cc")]
    options = ["-std=c++20", "-O1", "-fsanitize=address", f"-I{code.find_virtual_gpu()}", "-o", tmp_path / "fuzz"]
    subprocess.run(["g++", *options, *sources], check=True, timeout=300)
    command, environment = [tmp_path / "fuzz", tmp_path / "cubin", "20000"], {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert 1000 < int(done.stdout.split()[0]) < 19000


def launch(driver: pathlib.Path, folder: pathlib.Path, launches: list[dict[str, Any]], **settings: object) -> list[Any]:
    """Run launches in a process of their own, one after another: results, or the error's name."""
    for at, each in enumerate(launches):
        np.savez(folder / f"{at}.npz", *[np.asarray(a) for a in each["arguments"]])
        (folder / f"{at}.cubin").write_bytes(each["cubin"])
    facts = [{key: each[key] for key in ("kernel", "grid", "block")} for each in launches]
    script = (
        "import json, pathlib, sys\nimport numpy as np\nfrom tests.integration.virtual_gpu import VirtualGpu\n"
        "folder, driver, facts, settings = sys.argv[1:]\n"
        "gpu = VirtualGpu(pathlib.Path(driver), **json.loads(settings))\n"
        "folder = pathlib.Path(folder)\nfor at, each in enumerate(json.loads(facts)):\n"
        "  arrays = list(np.load(folder / f'{at}.npz').values())\n"
        "  arguments = [a if a.ndim else a.item() for a in arrays]\n"
        "  cubin = (folder / f'{at}.cubin').read_bytes()\n"
        "  try:\n"
        "    found = gpu.run(cubin, each['kernel'], each['grid'], each['block'], arguments)\n"
        "    np.savez(folder / f'{at}.out.npz', *found)\n"
        "  except RuntimeError as error:\n    (folder / f'{at}.error').write_text(str(error))\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(driver), json.dumps(facts), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: list[Any] = []
    for at, _ in enumerate(launches):
        error, results = folder / f"{at}.error", folder / f"{at}.out.npz"
        found.append(list(np.load(results).values()) if results.exists() else f"{error.read_text()} {done.stderr}")
        results.unlink(missing_ok=True)
    return found


def one(source: str, arguments: list[Any], grid: int = 4, block: int = 128, arch: str = "sm_53") -> dict[str, Any]:
    return {"cubin": assemble(source, arch), "kernel": "f", "grid": [grid], "block": [block], "arguments": arguments}


def of_each(kind: str, expression: str, a: Any, b: Any, arch: str = "sm_53") -> dict[str, Any]:
    return one(EACH.format(kind, expression), [np.zeros_like(a), a, b, len(a)], arch=arch)


ARITHMETIC: dict[str, tuple[str, str, Any, Any, Any]] = {
    "sum": ("float", "a[i] + b[i]", *FLOATS, lambda a, b: a + b),
    "fused": ("float", "fmaf(a[i], b[i], -1.5f)", *FLOATS, lambda a, b: (a.astype("f8") * b - 1.5).astype("f4")),
    "quotient": ("float", "a[i] / b[i]", *FLOATS, lambda a, b: a / b),
    "quotient of extremes": ("float", "a[i] / b[i]", *EXTREMES, lambda a, b: a / b),
    "quotients of extremes": ("float", "a[i] / b[i] + b[i] / (a[i] + 1)", *EXTREMES,
                              lambda a, b: a / b + b / (a + np.float32(1))),
    "root": ("float", "sqrtf(fabsf(a[i]))", *FLOATS, lambda a, b: np.sqrt(np.abs(a))),
    "exponential": ("float", "expf(a[i])", *FLOATS, lambda a, b: np.exp(a.astype("f8")).astype("f4")),
    "hyperbolic tangent": ("float", "tanhf(a[i])", *FLOATS, lambda a, b: np.tanh(a.astype("f8")).astype("f4")),
    "error function": ("float", "erff(a[i])", FLOATS[0] * 0 + 0.5, FLOATS[1],
                       lambda a, b: a * 0 + np.float32(0.5204999)),
    "logarithm": ("float", "logf(fabsf(a[i]))", *FLOATS, lambda a, b: np.log(np.abs(a.astype("f8"))).astype("f4")),
    "rounded": ("float", "rintf(a[i]) + floorf(b[i])", *FLOATS, lambda a, b: np.rint(a) + np.floor(b)),
    "greatest": ("float", "fmaxf(a[i], fminf(b[i], 1.0f))", *FLOATS, lambda a, b: np.maximum(a, np.minimum(b, 1))),
    "signed product": ("int", "a[i] * b[i]", *WHOLE, lambda a, b: wrap(a.astype("i8") * b)),
    "signed quotient": ("int", "a[i] / b[i]", WHOLE[0], SMALL, divide),
    "by a constant": ("int", "a[i] / 14 + a[i] % 7", WHOLE[0], SMALL,
                      lambda a, b: divide(a, 14) + a - 7 * divide(a, 7)),
    "unsigned by a constant": ("unsigned", "a[i] / 14u", *WHOLE.view("uint32"), lambda a, b: a // 14),
    "high product": ("int", "__mulhi(a[i], b[i])", *WHOLE, lambda a, b: (a.astype("i8") * b >> 32).astype("i4")),
    # The opposite predicate writes the register of a high product before it is used.
    "high product under a predicate": (
        "int",
        "[](int v, int w) { int p, q; if (w < 42) { int d = v / 7; p = v + d; q = d * 864 + w; }"
        " else { p = v & 15; q = __mulhi(w, v); } return p ^ q; }(a[i], b[i])", *WHOLE,
        lambda a, b: np.where(b < 42, wrap(a.astype("i8") + divide(a, 7)) ^ wrap(divide(a, 7).astype("i8") * 864 + b),
                              (a & 15) ^ (a.astype("i8") * b >> 32).astype("i4"))),
    "shifts": ("int", "(a[i] >> (b[i] & 31)) ^ (a[i] << 3)", *WHOLE,
               lambda a, b: (a >> (b & 31)) ^ wrap(a.astype("i8") << 3)),
    "bits": ("int", "__popc(a[i]) + __clz(b[i]) + ((a[i] & b[i]) | ~b[i])", *WHOLE,
             lambda a, b: np.array([wrap(bin(int(x) & 0xFFFFFFFF).count("1") + 32 - (int(y) & 0xFFFFFFFF).bit_length()
                                         + ((int(x) & int(y)) | ~int(y))) for x, y in zip(a, b, strict=True)], "i4")),
    "converted": ("int", "(int)(a[i] * 1e-6f) + (int)(signed char)b[i] + (int)(unsigned short)b[i]", *WHOLE,
                  lambda a, b: (a.astype("f4") * np.float32(1e-6)).astype("i4")
                  + b.astype("i1") + b.astype("u2").astype("i4")),
    "wide": ("long long", "a[i] * b[i] + (a[i] > b[i] ? a[i] : b[i]) / 3", *WHOLE.astype("i8")[:, :100],
             lambda a, b: a * b + np.sign(m := np.maximum(a, b)) * (np.abs(m) // 3)),
    "wide compared": ("long long", "a[i] < b[i] ? 1 : a[i] >> 3", *(WHOLE.astype("i8")[:, :100] << 20),
                      lambda a, b: np.where(a < b, 1, a >> 3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def computed(driver: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    launches = [of_each(kind, text, a, b) for kind, text, a, b, _ in ARITHMETIC.values()]
    return dict(zip(ARITHMETIC, launch(driver, tmp_path_factory.mktemp("runs"), launches), strict=True))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_machine_code_computes_what_its_source_says(name: str, computed: dict[str, Any]) -> None:
    """Whole numbers exactly; floats to two units in the last place."""
    *_, a, b, expected = ARITHMETIC[name]
    with np.errstate(all="ignore"):
        wanted = expected(a, b)
    assert not isinstance(computed[name], str), computed[name]
    found = computed[name][0]
    if found.dtype == "float32":
        np.testing.assert_allclose(found, wanted, rtol=2.5e-7, atol=1e-37)
    else:
        np.testing.assert_array_equal(found, wanted)


def test_threads_part_and_meet(driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Loops that end at different times, branches within them, shuffles, barriers, and arrays of a thread's own."""
    a = RNG.integers(0, 2000, 128).astype("int32")
    (found,) = launch(driver, tmp_path, [one(PARTED, [np.zeros(128, "int32"), a, 0], grid=1)], prove=1)
    sums = []
    for value in a:
        total = 0
        for k in range(value & 15):
            if k & 1:
                total += 0 if value & 64 else k
            else:
                total -= int(a[k])
                if total < -5000:
                    break
        sums.append(total)
    kept = np.array(sums)
    kept[:32] = kept[:32].sum()
    assert not isinstance(found, str), found
    np.testing.assert_array_equal(found[0], kept[::-1] + (np.array(sums) * ((a & 31) + 3)))


def test_half_precision_rounds_each_sum_once(driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two halves at a time, as the GPUs of Nano and TX2 have them."""
    a, b = (RNG.normal(size=1000).astype("float16") for _ in range(2))
    arguments = [np.zeros(500, "uint32"), a.view("uint32"), b.view("uint32"), 500]
    for arch in ("sm_53", "sm_62"):
        (found,) = launch(driver, tmp_path, [one(HALVES, arguments, arch=arch)])
        assert not isinstance(found, str), found
        wanted = (a.astype("f8") * b + (a + np.float16(0.5)).astype("f8")).astype("float16")
        np.testing.assert_array_equal(found[0].view("float16"), wanted)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_end_a_launch_with_the_instruction(name: str, driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """By CUDA's error, and the kernel, instruction and block in words; races and unwritten memory where proved."""
    body, error, words = FAULTS[name]
    source = f'extern "C" __global__ void f(float* y) {{ {body} }}'
    (found,) = launch(driver, tmp_path, [one(source, [np.zeros(128, "float32")], grid=1)], prove=1)
    assert isinstance(found, str)
    assert error in found
    assert words in found
    if error == "CUDA_ERROR_LAUNCH_FAILED":
        (found,) = launch(driver, tmp_path, [one(source, [np.zeros(128, "float32")], grid=1)])
        assert not isinstance(found, str)


def test_what_is_no_machine_code_of_these_gpus_is_refused(driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A newer GPU's, and a file cut short anywhere."""
    source = EACH.format("float", "a[i] + b[i]")
    good, newer = assemble(source), assemble(source, "sm_87")
    library = gpu_time.open_driver(str(driver))

    def ask(cubin: bytes) -> str:
        try:
            gpu_time.estimate(library, cubin, "f", (4, 1, 1), (128, 1, 1), (2000, 2000, 2000, 500), NANO)
        except ValueError as error:
            return str(error)
        return ""

    assert ask(good) == ""
    assert "another GPU" in ask(newer)
    for size in range(0, len(good), 37):
        ask(good[:size])  # ends
    assert "no cubin" in ask(good[:10])


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    st.sampled_from((32, 64, 128)),
    st.sampled_from((1, 4, 12)),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 2),
)
def test_no_estimate_beats_arithmetic_memory_or_the_start(
    driver: pathlib.Path, threads: int, held: int, steps: int, blocks: int, processors: int
) -> None:
    """All FMAs on all lanes, all results once to memory; half the clock takes longer, but not more than twice."""
    source = TILE.replace("THREADS", str(threads)).replace("HELD", str(held)).replace("STEPS", str(steps))
    cubin, library = assemble(source), gpu_time.open_driver(str(driver))
    sizes = (4 * threads * held * blocks, 4 * threads * (blocks + steps))

    def seconds(hz: float) -> float:
        made = gpu_time.Gpu(processors, hz, 25.6e9, 262144)
        return gpu_time.estimate(library, cubin, "f", (blocks, 1, 1), (threads, 1, 1), sizes, made)

    fast, slow = seconds(921.6e6), seconds(460.8e6)
    products = blocks * threads * held * steps * 16
    lanes = find_processor("sm_53").lanes * processors
    assert fast >= START_S + products / lanes / 921.6e6 / 1.001
    assert slow >= START_S + products / lanes / 460.8e6 / 1.001
    assert fast >= sizes[0] / 25.6e9
    assert fast < slow < 2.001 * fast


def test_conflicts_and_scattered_writes_take_time(driver: pathlib.Path) -> None:
    """Threads that read one bank take turns; writes to a sector each move eight times the bytes."""
    library = gpu_time.open_driver(str(driver))

    def cycles(stride: int, pitch: int) -> tuple[float, float]:
        cubin = assemble(CONFLICT.replace("STRIDE", str(stride)).replace("PITCH", str(pitch)))
        found = (ctypes.c_double * 2)()
        sizes, values = (ctypes.c_uint * 7)(8, 1, 1, 128, 1, 1, 0), (ctypes.c_ulonglong * 2)(1 << 20, 1 << 20)
        given = (ctypes.c_double * 6)(1, 4096, 170, 16, 2, 1)
        library.farm_gpu_estimate(cubin, ctypes.c_size_t(len(cubin)), b"f", sizes, 2, values, given, found)
        return found[0], found[1]

    one_word, two, all_threads = (cycles(stride, 1)[0] for stride in (1, 2, 32))
    assert one_word < two < all_threads / 4
    assert cycles(1, 8)[1] - cycles(1, 1)[1] >= (128 - 16) * 32


def test_an_estimate_is_the_same_wherever_memory_is(driver: pathlib.Path) -> None:
    """Addresses that this machine gives decide nothing."""
    library, cubin = gpu_time.open_driver(str(driver)), assemble(EACH.format("float", "a[i] + b[i]"))
    sizes = (1 << 20, 1 << 20, 1 << 20, 1 << 18)
    taken, seconds = [], set()
    for pages in (1, 7, 300):
        taken.append(mmap.mmap(-1, pages * mmap.PAGESIZE))
        seconds.add(gpu_time.estimate(library, cubin, "f", (2048, 1, 1), (128, 1, 1), sizes, NANO))
    assert len(seconds) == 1
