"""Operators that a graph pipeline leaves without code: found before a trial is spent, and named."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

# What the executable calls by itself, whoever wrote the code. Anything else needs a function of its own.
_CALLS = frozenset(
    {
        "relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed", "relax.call_pure_packed",
        "relax.call_builtin_with_ctx", "relax.invoke_closure", "relax.tensor_to_shape", "relax.shape_of",
    }
)  # fmt: skip
# TVM's Python package registers these, which boards run without.
_PYTHON_ONLY = "relax.run."


def find_operators(module: Any, target: Any) -> list[str]:
    """Names of operators that still have no code once the compiler has done what it can, such as `nn.conv2d`."""
    # The passes with which `relax.build` begins: sorting and scanning become code there, not in our pipelines.
    passes = [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan(), relax.transform.LegalizeOps()]
    with target:
        lowered = tvm.transform.Sequential(passes)(module)
    found: dict[str, None] = {}
    for call in _list_calls(lowered):
        if isinstance(call.op, relax.ExternFunc):
            name = str(call.op.global_symbol)
        elif call.op.name not in _CALLS:
            name = f"{_PYTHON_ONLY}{_short(call)}"
        elif call.args and isinstance(call.args[0], relax.ExternFunc):
            name = str(call.args[0].global_symbol)
        else:
            continue
        if name.startswith(_PYTHON_ONLY):
            found.setdefault(name.removeprefix(_PYTHON_ONLY))
    if any(_returns_shape(function) for function in _list_functions(lowered)):
        found.setdefault("shape (as an output of the model)")
    return list(found)


def find_culprits(module: Any, target: Any) -> list[str]:
    """Operators of an imported module that TVM fails to make code of, tried one by one after the whole failed."""
    found: dict[str, None] = {}
    for call in _list_calls(module):
        if isinstance(call.op, relax.ExternFunc) or call.op.name in _CALLS:
            continue
        try:
            with target:
                relax.transform.LegalizeOps()(_alone(call))
        except (tvm.error.InternalError, AssertionError, ValueError, RuntimeError, TypeError):
            found.setdefault(_short(call))
    return list(found)


def _alone(call: Any) -> Any:
    """A module that does nothing but this call."""
    parameters: list[Any] = []

    def fresh(argument: Any) -> Any:
        if isinstance(argument, relax.Var):
            parameters.append(relax.Var(f"x{len(parameters)}", argument.ty))
            return parameters[-1]
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([fresh(field) for field in argument.fields])
        return argument

    builder = relax.BlockBuilder()
    copied = relax.Call(call.op, [fresh(argument) for argument in call.args], call.attrs, call.ty_args)
    with builder.function("main", parameters):
        builder.emit_func_output(builder.emit(copied))
    return builder.get()


def _list_functions(module: Any) -> list[Any]:
    return [function for _, function in module.functions_items() if isinstance(function, relax.Function)]


def _list_calls(module: Any) -> list[Any]:
    """Calls of TVM's operators and of foreign functions, in their order."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and isinstance(node.op, tvm.ir.Op | relax.ExternFunc):
            found.append(node)

    for function in _list_functions(module):
        relax.analysis.post_order_visit(function, visit)
    return found


def _returns_shape(function: Any) -> bool:
    result = function.ret_ty
    parts = result.fields if isinstance(result, relax.TupleType) else [result]
    return any(isinstance(part, relax.ShapeType) for part in parts)


def _short(call: Any) -> str:
    return str(call.op.name).removeprefix("relax.")
