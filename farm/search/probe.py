"""A small kernel to prove a board with: a 64x64 float32 matrix product."""

from __future__ import annotations

from farm.search import tvm_env


def probe_module() -> str:
    """The unscheduled function `main(a, b, product)` in TVM's JSON."""
    tvm = tvm_env.load()
    from tvm import te

    size = 64
    a = te.placeholder((size, size), "float32", name="a")
    b = te.placeholder((size, size), "float32", name="b")
    k = te.reduce_axis((0, size), name="k")
    product = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    function = te.create_prim_func([a, b, product]).with_attr("global_symbol", "main")
    return str(tvm.ir.save_json(tvm.IRModule({"main": function})))
