"""Exponentials and their like as arithmetic, which vectors have, instead of calls of the C library for each element.

In float32 relative errors stay below 1e-6, the library's below 1e-7, and beyond the range infinity is the largest
number; other types keep the library's functions. Numbers of a row that are all divided by one, or all numbers by
constants, are multiplied by what 1 comes to over it: a division of sixteen takes as long as sixteen multiplications, on
a Cortex-A57 longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import ir, relax, topi
from tvm.ir import GenericConst

from farm.search.graph import bindings


def legalise() -> Any:
    """A pass that turns a graph's operators into functions of TIR, as TVM's own does but for the functions above."""
    divide_each, multiply_each = (ir.Op.get(f"relax.{name}").get_attr("FLegalize") for name in ("divide", "multiply"))

    def unary(fast: Any, plain: Any, name: str) -> Any:
        def compute(x: Any) -> Any:
            return (fast if x.dtype == "float32" else plain)(x)

        return lambda builder, call: builder.call_te(compute, call.args[0], primfunc_name_hint=name)

    def sigmoid(x: Any) -> Any:
        return topi.divide(1.0, topi.add(1.0, topi.fast_exp(topi.negative(x))))

    def softmax(builder: Any, call: Any) -> Any:
        def compute(x: Any) -> Any:
            if x.dtype != "float32":
                return topi.nn.softmax(x, call.attrs.axis)
            powers = topi.fast_exp(topi.subtract(x, topi.max(x, call.attrs.axis, keepdims=True)))
            return topi.multiply(powers, topi.divide(1.0, topi.sum(powers, call.attrs.axis, keepdims=True)))

        return builder.call_te(compute, call.args[0], primfunc_name_hint="softmax")

    def divide(builder: Any, call: Any) -> Any:
        def compute(numbers: Any, divisors: Any) -> Any:
            return topi.multiply(numbers, topi.divide(1.0, divisors))

        factors = _invert(call.args[1])
        if factors is not None:
            return multiply_each(builder, builder.normalize(relax.op.multiply(call.args[0], factors)))
        if _is_one_for_all(*call.args):
            return builder.call_te(compute, *call.args, primfunc_name_hint="divide")
        return divide_each(builder, call)

    def gelu(x: Any) -> Any:
        return topi.multiply(topi.multiply(x, 0.5), topi.add(1.0, topi.fast_erf(topi.multiply(x, 0.5**0.5))))

    def plain_gelu(x: Any) -> Any:
        return topi.multiply(topi.multiply(x, 0.5), topi.add(1.0, topi.erf(topi.multiply(x, 0.5**0.5))))

    return relax.transform.LegalizeOps(
        {
            "relax.divide": divide,
            "relax.exp": unary(topi.fast_exp, topi.exp, "tir_exp"),
            "relax.tanh": unary(topi.fast_tanh, topi.tanh, "tir_tanh"),
            "relax.erf": unary(topi.fast_erf, topi.erf, "erf"),
            "relax.sigmoid": unary(sigmoid, topi.sigmoid, "tir_sigmoid"),
            "relax.nn.silu": unary(
                lambda x: topi.multiply(x, sigmoid(x)), lambda x: topi.multiply(x, topi.sigmoid(x)), "silu"
            ),
            "relax.nn.gelu": unary(gelu, plain_gelu, "gelu"),
            "relax.nn.softmax": softmax,
        }
    )


def _invert(divisors: Any) -> Any | None:
    """A constant of what 1 comes to over each number of another; None for what is none, or beyond float32's range."""
    if not isinstance(divisors, GenericConst) or divisors.ty.dtype != "float32":
        return None
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.float32(1) / divisors.value.numpy()
    return relax.const(factors, "float32") if np.isfinite(factors).all() else None


def _is_one_for_all(numbers: Any, divisors: Any) -> bool:
    """Whether neighbouring numbers are divided by the same one."""
    shape, other = (bindings.static_shape(each.ty) for each in (numbers, divisors))
    return bool(shape) and other is not None and other[-1:] in ((), (1,)) and numbers.ty.dtype == "float32"
