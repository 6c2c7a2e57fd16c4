"""A whole model computed in 16 bits (float16), its inputs and outputs as they are: part of a pipeline, on request.

Twice as many numbers are in a vector, and half the bytes come from memory. Products are summed up in float16, too: what
that costs in accuracy is in docs/kernels/half-precision.md. What would lose most (softmax, norms, sums and means over
an axis, exponentials) stays in float32. Weights alone in 16 bits are `half_precision`'s business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm.ir import GenericConst
from tvm.relax import transform
from tvm.target import Target, codegen

from farm.errors import ModelRefusedError, UsageError
from farm.search.graph import bindings

DTYPE = "float16"
# LLVM's name of vectors of float16 that are computed with, since Armv8.2 where a core has them.
_FEATURE = "fullfp16"
# Operators that choose, move or bound elements: TVM does not say of these that they may go with their operands.
_FOLLOW = ("clip", "max", "min", "nn.leakyrelu", "nn.pad", "nn.prelu", "take", "where")
# Operators that sum up or square elements, or whose polynomials are in float32 (`vector_math`): TVM would halve these.
_STAY = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "log", "log_add_exp",
    "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d", "nn.attention", "nn.attention_bias",
    "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "nn.gelu", "nn.gelu_tanh", "nn.group_norm", "nn.instance_norm",
    "nn.layer_norm", "nn.rms_norm", "nn.selu", "nn.silu", "power", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "square",
    "tan", "tanh",
)  # fmt: skip
# TVM's policies of an operator: in 16 bits where its operands are, and never.
_POLICIES = dict.fromkeys(_FOLLOW, 1) | dict.fromkeys(_STAY, 2)


def require(target: Mapping[str, Any]) -> None:
    """Raise UsageError where a target, in TVM's dict form, has no arithmetic on vectors of float16."""
    machine, mcpu = str(target.get("mtriple", "")).partition("-")[0], str(target.get("mcpu", ""))
    if machine != "aarch64" or not codegen.target_has_features(_FEATURE, Target(dict(target))):
        raise UsageError(
            f"{mcpu or machine or 'this target'} cannot compute in 16 bits (--weights fp16)",
            "Arm's cores since Armv8.2 can: Carmel, Cortex-A76, A78AE. --weights bf16 stores weights so on any core.",
        )


@functools.cache
def _tell_policies() -> None:
    """On top of TVM's own word, which is of level 10; it hears each level once."""
    for name, policy in _POLICIES.items():
        tvm.ir.register_op_attr(f"relax.{name}", "TMixedPrecisionPolicy", policy, 20)


def compute() -> Any:
    """A module pass: floats are halved where the inputs are read, and made whole again where outputs are written."""
    _tell_policies()

    def check(module: Any, _: Any) -> Any:
        for _, function in bindings.list_functions(module):
            for binding in bindings.list_bindings(function):
                tvm.relax.analysis.post_order_visit(binding.value, _require_finite)
        return module

    return tvm.transform.Sequential(
        [
            transform.ToMixedPrecision(out_dtype=DTYPE),
            transform.FoldConstant(),
            tvm.transform.module_pass(check, opt_level=0, name="RequireFinite"),
        ]
    )


def _require_finite(expression: Any) -> None:
    """Refuse weights that float16 cannot hold; a bound that is further out than any number is none."""
    if not isinstance(expression, GenericConst):
        return
    values = expression.value.numpy()
    if values.dtype == np.float16 and values.size > 1 and not np.isfinite(values).all():
        raise ModelRefusedError(
            "this model has weights that float16 cannot hold: they are larger than 65,504",
            "Leave --weights fp16 away, or take --weights bf16.",
        )
