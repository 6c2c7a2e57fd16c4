"""What a kernel is called with: its arguments as a trace names them, and seeded values for them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from device_agent.protocol import TensorSpec
from farm.errors import InternalError
from farm.measure.arrays import Arrays  # which makes NumPy know the name bfloat16

Arguments = Sequence[tuple[Sequence[int], str]]


def make_inputs(arguments: Arguments, seed: int) -> Arrays:
    """Values for all arguments of a function, the output's included; the same for the same seed.

    Whole numbers may be indices: they stay below the sizes of what they could be indices of.
    """
    random = np.random.default_rng(seed)
    arrays: Arrays = {}
    kinds = [np.dtype(dtype) for _, dtype in arguments]
    # bfloat16 is of kind V.
    floats = [shape for (shape, _), dtype in zip(arguments, kinds, strict=True) if dtype.kind in "fV"]
    sizes = [size for shape in floats for size in shape if size > 1]
    bound = min([10, *sizes])
    for index, ((shape, _), dtype) in enumerate(zip(arguments, kinds, strict=True)):
        values = random.integers(0, bound, shape) if dtype.kind in "iub" else random.standard_normal(shape)
        arrays[f"arg_{index:03d}"] = values.astype(dtype)
    return arrays


def read_arguments(trace_json: str) -> tuple[TensorSpec, ...]:
    """What a candidate's function takes when it is timed, from its trace: packed weights have their packed shape.

    The form is MetaSchedule's (`TensorInfo.as_json`: kind, dtype, shape). Raises InternalError.
    """
    try:
        _, _, _, arguments = json.loads(trace_json)
        return tuple(TensorSpec(tuple(map(int, shape)), str(dtype)) for _, dtype, shape in arguments)
    except (ValueError, TypeError) as error:
        raise InternalError(f"a trace's arguments cannot be read: {error}") from error
