"""Candidate libraries for the agent's tests: one that computes, and one whose functions misbehave in every way.

The bad ones are plain C with TVM's calling convention, so that each fault is exactly the one it says.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

SIZE = 64

# Left to itself, Zig turns undefined behaviour, such as writing to NULL, into an illegal instruction, and builds the
# runtime for that on first use.
_ZIG_CC = [sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=undefined", "-O1"]

_BAD_SOURCE = pathlib.Path(__file__).with_name("bad_candidates.c").read_text()


def compile_c(source: str, output: pathlib.Path, *options: str) -> bytes:
    """Compile C into a shared library for this machine with the Zig compiler; return the library."""
    source_path = output.with_suffix(".c")
    source_path.write_text(source)
    command = [*_ZIG_CC, "-w", "-shared", "-fPIC", *options, "-o", str(output), str(source_path)]
    subprocess.run(command, check=True, timeout=240)
    return output.read_bytes()


def build_bad(folder: pathlib.Path) -> bytes:
    return compile_c(_BAD_SOURCE, folder / "bad.so")


def build_crash_when_loaded(folder: pathlib.Path) -> bytes:
    return compile_c(_BAD_SOURCE, folder / "crash_when_loaded.so", "-DCRASH_WHEN_LOADED")


def build_hang_when_loaded(folder: pathlib.Path) -> bytes:
    return compile_c(_BAD_SOURCE, folder / "hang_when_loaded.so", "-DHANG_WHEN_LOADED")


def build_matmul(folder: pathlib.Path, name: str = "matmul.so", size: int = SIZE) -> bytes:
    """A parallel `main(A, B, C)` for `size` x `size` float32 matrices: a linked `.so`, or a `.tar` of objects."""
    import tvm
    from tvm import te

    a, b = (te.placeholder((size, size), name=name) for name in "AB")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("C"))[0])
    library = tvm.compile(schedule.mod, target=_target())
    return _export(library, folder / name)


def build_relax_model(folder: pathlib.Path) -> bytes:
    """A Relax VM program `main(x: (4, 8)) -> (x @ w, relu(x @ w))`, where w is `relax_weights()`."""
    import tvm
    from tvm import relax
    from tvm.script import relax as script

    builder = relax.BlockBuilder()
    x = relax.Var("x", script.Tensor((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, relax.const(relax_weights())))
            positive = builder.emit(relax.op.nn.relu(product))
            output = builder.emit_output(relax.Tuple([product, positive]))
        builder.emit_func_output(output)
    module = relax.get_pipeline("zero")(builder.get())
    return _export(tvm.compile(module, target=_target()), folder / "relax.so")


def relax_weights():  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(3).standard_normal((8, 3)).astype("float32")


def build_onnx_model() -> bytes:
    """An ONNX file `y = x @ w` with inputs x (4, 8) and w (8, 3), float32."""
    from onnx import TensorProto, helper

    def value(name: str, shape: list[int]):  # type: ignore[no-untyped-def]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "matmul", [value("x", [4, 8]), value("w", [8, 3])], [value("y", [4, 3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def _target():  # type: ignore[no-untyped-def]
    import tvm

    return tvm.target.Target({"kind": "llvm", "num-cores": 2})


def _export(library, path: pathlib.Path) -> bytes:  # type: ignore[no-untyped-def]
    from tvm.support import cc

    if path.suffix == ".so":
        wrapper = path.with_name("zig-cc")
        wrapper.write_text(f'#!/bin/sh\nexec "{_ZIG_CC[0]}" {" ".join(_ZIG_CC[1:])} "$@"\n')
        wrapper.chmod(0o755)
        library.export_library(str(path), fcompile=cc.cross_compiler(str(wrapper)))
    else:
        library.export_library(str(path))
    return path.read_bytes()
