"""Every schedule family's code for cortex-a57, run on the emulated board, computes what NumPy does."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

from farm import linker
from farm.inventory.board_types import require_board_type
from farm.search import cores, tvm_env
from farm.search.families.rule import FAMILIES, read_outlook
from farm.search.graph import canonical, dots, half_precision, winograd
from tests.integration.test_schedule_families import build_canonical

# The best predicted, and others drawn at random.
PLANS = 3
TIMEOUT_S = 240.0

# Runs there: calls each function of a library on its inputs, the last argument being its result.
_SCRIPT = """
import json, sys
import ml_dtypes
import numpy as np
import tvm.runtime
library, order, inputs, outputs = sys.argv[1:]
module, arrays = tvm.runtime.load_module(library), np.load(inputs)
results = {}
for function, names, shape, dtype in json.load(open(order)):
    unwritten = np.nan if dtype.startswith("float") else -1
    arguments = [*(arrays[name] for name in names), np.full(shape, unwritten, dtype)]
    # NumPy's files have no name for bfloat16.
    arguments = [each.view(ml_dtypes.bfloat16) if each.dtype == "V2" else each for each in arguments]
    tensors = [tvm.runtime.tensor(argument, tvm.runtime.cpu()) for argument in arguments]
    module[function](*tensors)
    results[function] = tensors[-1].numpy()
np.savez(outputs, **results)
"""

Array = np.ndarray
LAYOUT = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
# Those of the cases above that sum up products, which is where float16 has schedules of its own.
HALVED = ("dense", "dense_odd", "dense_few", "matmul", "grouped", "depthwise", "depthwise_odd", "batched", "max_pool")


def convolve(x: Array, w: Array, stride: int = 1, pad: int = 0, groups: int = 1, dilation: int = 1) -> Array:
    x = np.pad(x.astype("float64"), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = (
        (size - dilation * (k - 1) - 1) // stride + 1 for size, k in zip(x.shape[1:3], w.shape, strict=False)
    )
    parts = []
    for data, weights in zip(np.split(x, groups, -1), np.split(w.astype("float64"), groups, -1), strict=True):
        windows = (
            data[:, a * dilation :: stride, b * dilation :: stride][:, :rows, :columns] @ weights[a, b]
            for a in range(w.shape[0])
            for b in range(w.shape[1])
        )
        parts.append(sum(windows))
    return np.concatenate(parts, -1)


def pool(x: Array, reduce: Callable[..., Array]) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2]
    return reduce(windows, axis=(-1, -2))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def layer_norm(x: Array, a: Array, b: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * a + b)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


# Family, shapes, the function in Relax's words, and in NumPy's.
CASES: dict[str, tuple[str, tuple[tuple[int, ...], ...], Callable[..., Any], Callable[..., Array]]] = {
    "dense": (
        "dense",
        ((1, 9, 14, 8), (3, 3, 8, 24)),
        lambda op, x, w: op.nn.relu(op.nn.conv2d(x, w, padding=1, **LAYOUT)),
        lambda x, w: relu(convolve(x, w, pad=1)),
    ),
    "dense_odd": (
        "dense",
        ((2, 11, 8, 5), (3, 3, 5, 10)),
        lambda op, x, w: op.nn.conv2d(x, w, strides=2, dilation=2, **LAYOUT),
        lambda x, w: convolve(x, w, 2, dilation=2),
    ),
    "dense_few": (
        "dense",
        ((1, 11, 15, 3), (3, 3, 3, 16)),
        lambda op, x, w: op.nn.conv2d(x, w, strides=2, padding=1, **LAYOUT),
        lambda x, w: convolve(x, w, 2, 1),
    ),
    "dense_limited": (
        "dense",
        ((1, 6, 10, 16), (1, 1, 16, 24), (24,)),
        lambda op, x, w, b: op.clip(op.add(op.nn.conv2d(x, w, **LAYOUT), b), 0, 6),
        lambda x, w, b: np.clip(convolve(x, w) + b, 0, 6),
    ),
    "dense_added": (
        "dense",
        ((1, 7, 7, 16), (3, 3, 16, 24), (24,), (1, 7, 7, 24)),
        lambda op, x, w, b, y: op.nn.relu(op.add(op.add(op.nn.conv2d(x, w, padding=1, **LAYOUT), b), y)),
        lambda x, w, b, y: relu(convolve(x, w, pad=1) + b + y),
    ),
    "matmul": ("dense", ((12, 40), (40, 36)), lambda op, x, y: op.matmul(x, y), lambda x, y: x @ y),
    "grouped": (
        "grouped",
        ((1, 7, 7, 32), (3, 3, 8, 48)),
        lambda op, x, w: op.nn.conv2d(x, w, groups=4, padding=1, **LAYOUT),
        lambda x, w: convolve(x, w, pad=1, groups=4),
    ),
    "depthwise": (
        "depthwise",
        ((1, 9, 12, 32), (3, 3, 1, 32)),
        lambda op, x, w: op.nn.relu(op.nn.conv2d(x, w, groups=32, padding=1, **LAYOUT)),
        lambda x, w: relu(convolve(x, w, pad=1, groups=32)),
    ),
    "depthwise_limited": (
        "depthwise",
        ((1, 14, 12, 48), (3, 3, 1, 48), (48,)),
        lambda op, x, w, b: op.clip(op.add(op.nn.conv2d(x, w, groups=48, padding=1, **LAYOUT), b), 0, 6),
        lambda x, w, b: np.clip(convolve(x, w, pad=1, groups=48) + b, 0, 6),
    ),
    "depthwise_odd": (
        "depthwise",
        ((2, 11, 11, 30), (5, 5, 1, 30)),
        lambda op, x, w: op.nn.conv2d(x, w, groups=30, padding=2, strides=2, **LAYOUT),
        lambda x, w: convolve(x, w, 2, 2, groups=30),
    ),
    "batched": ("batched", ((3, 14, 20), (3, 20, 24)), lambda op, x, y: op.matmul(x, y), lambda x, y: x @ y),
    "max_pool": (
        "reduce",
        ((1, 9, 9, 24),),
        lambda op, x: op.nn.max_pool2d(x, 3, 2, layout="NHWC"),
        lambda x: pool(x, np.max),
    ),
    "mean_pool": (
        "reduce",
        ((1, 9, 9, 20),),
        lambda op, x: op.nn.avg_pool2d(x, 3, 2, layout="NHWC"),
        lambda x: pool(x, np.mean),
    ),
    "sum": ("reduce", ((5, 131),), lambda op, x: op.sum(x, -1), lambda x: x.sum(-1)),
    "layer_norm": (
        "norm",
        ((1, 6, 48), (48,), (48,)),
        lambda op, x, a, b: op.nn.layer_norm(x, a, b, axes=[-1]),
        layer_norm,
    ),
    "softmax": ("norm", ((6, 40),), lambda op, x: op.nn.softmax(x), softmax),
    "softmax_odd": ("norm", ((3, 67),), lambda op, x: op.nn.softmax(x), softmax),
    "variance": (
        "norm",
        ((3, 77),),
        lambda op, x: op.variance(x, [-1], keepdims=True),
        lambda x: x.var(-1, keepdims=True),
    ),
    "residual": (
        "elementwise",
        ((1, 7, 7, 40), (1, 7, 7, 40)),
        lambda op, x, y: op.nn.relu(op.add(x, y)),
        lambda x, y: relu(x + y),
    ),
    "concatenation": (
        "elementwise",
        ((1, 5, 5, 24), (1, 5, 5, 13)),
        lambda op, x, y: op.concat([x, y], -1),
        lambda x, y: np.concatenate([x, y], -1),
    ),
    "transposition": (
        "elementwise",
        ((1, 24, 12, 12),),
        lambda op, x: op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.transpose(0, 2, 3, 1),
    ),
}


def list_products_of_bytes(config: Any) -> list[tuple[str, Any, list[Array], Array]]:
    """Convolutions that pad with a byte or have channels that fill no four, and products, with the extremes in them.

    Weights lie in panels of so many channels, of a few tiles or a part of one, or all together.
    """
    values = np.random.default_rng(0)
    instruction = dots.find_instruction(tvm_env.make_target(config))
    window = dots.DotWindow((3, 3), (2, 1), (1, 1), (1, 1, 1, 1), -7)
    found = []
    for case, shape, weight, panel in (
        ("padded", (1, 8, 6, 8), (3, 3, 8, 12), 4),
        ("odd", (1, 8, 6, 3), (3, 3, 3, 24), 12),
        ("together", (1, 8, 6, 4), (3, 3, 4, 8), 0),
        ("product", (6, 16), (16, 8), 8),
        ("product_together", (6, 16), (16, 8), 0),
    ):
        data, weights = (
            values.integers(least, 128, size).astype("int8")
            for least, size in ((-128, shape), (instruction.least, weight))
        )
        if case.startswith("product"):
            data[0], weights[:, 0] = -128, instruction.least
            function = dots.make_product(shape, "int8", weight[-1], instruction.at_once, panel)
            result = data.astype("int64") @ weights
        else:
            function = dots.make_convolution(shape, "int8", weight[-1], window, instruction.at_once, panel)
            padded = np.pad(data, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=window.fill)
            result = sum(
                padded[:, a : a + 7 : 2, b : b + 6].astype("int64") @ weights[a, b] for a in range(3) for b in range(3)
            )
        found.append((f"bytes_{case}", canonical.canonicalise(function), [data, dots.pack(weights, panel)], result))
    return found


def test_every_family_computes_on_cortex_a57_what_numpy_does(emulated_root: str, tmp_path: pathlib.Path) -> None:
    """The best predicted plan and some drawn at random, of each family, all in one library."""
    tvm = tvm_env.load()
    board_type = require_board_type("jetson-nano")
    nano = board_type.target.to_tvm()
    draw, values = random.Random(0), np.random.default_rng(0)
    functions, order, arrays, expected, seen = {}, [], {}, {}, set()

    def add(
        case: str, family: str, function: Any, arguments: list[Array], result: Array, dtype: str = "float32"
    ) -> None:
        module = tvm.IRModule({"main": function})
        outlook = read_outlook(module, cores.core_of(nano))
        assert outlook.family.name == family
        seen.add(family)
        best, *others = [plan for _, plan in outlook.plans()]
        arrays.update({f"{case}_{at}": argument for at, argument in enumerate(arguments)})
        for number, plan in enumerate([best, *draw.sample(others, min(len(others), PLANS - 1))]):
            schedule = tvm.s_tir.Schedule(module)
            outlook.apply(schedule, plan)
            name = f"{case}__{number}"
            functions[name] = schedule.mod["main"].with_attr("global_symbol", name)
            order.append([name, [f"{case}_{at}" for at in range(len(arguments))], result.shape, dtype])
            expected[name] = (result, plan)

    for case, (family, shapes, build, reference) in CASES.items():
        arguments = [values.standard_normal(shape).astype("float32") for shape in shapes]
        add(case, family, build_function(shapes, build, nano), arguments, reference(*arguments))
        if case in ("dense", "dense_odd", "dense_few", "matmul", "grouped"):
            halved = half_precision.halve_function(build_function(shapes, build, nano), 1)
            rounded = half_precision.round_weights(arguments[1])
            wanted = reference(arguments[0], rounded.astype("float32"))
            add(f"{case}_halved", family, halved, [arguments[0], rounded], wanted)
    for m in (2, 4, 6):
        shape = (1, 10, 13, 8)
        data, weights = (values.standard_normal(size).astype("float32") for size in (shape, (3, 3, 8, 16)))
        function = canonical.canonicalise(winograd.make_function(shape, 16, (1, 1, 1, 1), m))
        transformed = winograd.transform_weights(weights, m)
        add(f"winograd{m}", "winograd", function, [data, transformed], convolve(data, weights, pad=1))
    for case, function, arguments, result in list_products_of_bytes(nano):
        add(case, "dots", function, arguments, result, "int32")
    assert seen == {family.name for family in FAMILIES}

    results = run_there(emulated_root, tvm.IRModule(functions), nano, order, arrays, tmp_path, "cortex-a57")
    assert set(results) == set(expected)
    for name, (result, plan) in expected.items():
        error = np.abs(results[name] - result).max() / np.abs(result).max()
        assert error < (2e-5 if results[name].dtype == "float32" else 1e-9), f"{name} {plan}: {error}"


def test_what_later_cores_have_computes_there_what_numpy_does(emulated_root: str, tmp_path: pathlib.Path) -> None:
    """Orin's code for signed bytes: convolutions that pad with a byte or have channels that fill no four, a product;
    and for float16, within what its sums are rounded by.
    """
    tvm = tvm_env.load()
    board_type = require_board_type("jetson-orin-nano-8gb")
    orin = board_type.target.to_tvm()
    assert dots.find_instruction(tvm_env.make_target(orin)) == dots.INSTRUCTIONS["aarch64"][0]
    draw, values = random.Random(0), np.random.default_rng(0)
    functions, order, arrays, expected = {}, [], {}, {}

    def add(case: str, family: str, function: Any, names: list[str], result: Array, dtype: str) -> None:
        module = tvm.IRModule({"main": function})
        outlook = read_outlook(module, cores.core_of(orin))
        assert outlook.family.name == family
        best, *others = [plan for _, plan in outlook.plans()]
        for number, plan in enumerate([best, *draw.sample(others, min(len(others), PLANS - 1))]):
            schedule = tvm.s_tir.Schedule(module)
            outlook.apply(schedule, plan)
            name = f"{case}__{number}"
            functions[name] = schedule.mod["main"].with_attr("global_symbol", name)
            order.append([name, names, result.shape, dtype])
            expected[name] = result

    for case, function, given, result in list_products_of_bytes(orin):
        names = [f"{case}_{at}" for at in range(len(given))]
        arrays |= dict(zip(names, given, strict=True))
        add(case, "dots", function, names, result, "int32")
    for case in HALVED:
        family, shapes, build, reference = CASES[case]
        given = [values.standard_normal(shape).astype("float16") for shape in shapes]
        names = [f"half_{case}_{at}" for at in range(len(given))]
        arrays |= dict(zip(names, given, strict=True))
        wanted = reference(*(each.astype("float64") for each in given))
        add(f"half_{case}", family, build_function(shapes, build, orin, "float16"), names, wanted, "float16")
    for m in (2, 4):
        shape = (1, 10, 13, 8)
        data, weights = (values.standard_normal(size).astype("float16") for size in (shape, (3, 3, 8, 16)))
        function = canonical.canonicalise(winograd.make_function(shape, 16, (1, 1, 1, 1), m, "float16"))
        arrays |= {f"winograd{m}_0": data, f"winograd{m}_1": winograd.transform_weights(weights, m)}
        names = [f"winograd{m}_0", f"winograd{m}_1"]
        add(f"half_winograd{m}", "winograd", function, names, convolve(data, weights, pad=1), "float16")
    results = run_there(emulated_root, tvm.IRModule(functions), orin, order, arrays, tmp_path, "max")
    assert set(results) == set(expected)
    for name, result in expected.items():
        if name.startswith("half"):
            error = np.abs(results[name].astype("float64") - result).max() / np.abs(result).max()
            assert error < 6e-3, f"{name}: {error}"
        else:
            np.testing.assert_array_equal(results[name], result, err_msg=name)


def build_function(shapes: tuple[Any, ...], build: Callable[..., Any], config: Any, dtype: str = "float32") -> Any:
    return build_canonical(tuple((shape, dtype) for shape in shapes), build, tvm_env.make_target(config))


def run_there(
    root: str, module: Any, config: Any, order: list[Any], arrays: dict[str, Array], folder: pathlib.Path, cpu: str
) -> dict[str, Array]:
    """Each function's result, by name, on such a core."""
    tvm = tvm_env.load()

    def link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
        linker.link_candidate(pathlib.Path(output), [pathlib.Path(o) for o in np.atleast_1d(objects)])

    library, steps, inputs, outputs = (folder / name for name in ("all.so", "order.json", "inputs.npz", "outputs.npz"))
    tvm.compile(module, target=tvm_env.make_target(config)).export_library(str(library), fcompile=link)
    steps.write_text(json.dumps(order))
    np.savez(inputs, **arrays)
    python = str(pathlib.Path(root) / "usr/bin/board-python")
    environment = {**os.environ, "QEMU_CPU": cpu, "TVM_USE_RUNTIME_LIB": "1", "PYTHONPATH": ""}
    command = [python, "-c", _SCRIPT, *map(str, (library, steps, inputs, outputs))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(outputs) as found:
        return dict(found)
