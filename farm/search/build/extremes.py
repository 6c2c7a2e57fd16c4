"""The larger and the smaller of two numbers in one instruction, as Arm has them.

TVM compares and selects, which a compiler may not make one instruction of, since that answers otherwise where a number
is none. Where one is, the result is none now, whatever the order: what ONNX asks of a maximum. Pools are made of it.
"""

from __future__ import annotations

from typing import Any
from tvm import tirx
import tvm_ffi

_TYPE = "float32"


def use_instructions(function: Any) -> Any:
    """A lowered function with LLVM's own maximum and minimum of vectors.

    A limit that is a constant is left: a compiler sees that it is a number.
    """

    def change(node: Any) -> Any:
        dtype = str(node.ty.dtype)
        if not dtype.startswith(f"{_TYPE}x") or any(_is_constant(each) for each in (node.a, node.b)):
            return node
        name = "llvm.maximum" if isinstance(node, tirx.Max) else "llvm.minimum"
        return tirx.call_llvm_pure_intrin(dtype, name, node.a, node.b)

    body = tvm_ffi.structural_map(function.body, [(tirx.Max, change), (tirx.Min, change)])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _is_constant(value: Any) -> bool:
    return isinstance(value.value if isinstance(value, tirx.Broadcast) else value, tirx.FloatImm)
