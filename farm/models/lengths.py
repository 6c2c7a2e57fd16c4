"""Sizes of a model's open dimensions: another batch, and the range of `--shape tokens=1..512@32,128,512`.

A range has the sizes that are compiled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx

from farm.errors import UsageError
from farm.models.inputs import InputSpec, parse_shapes, read_inputs, resolve_inputs

if TYPE_CHECKING:
    from farm.models.source import ModelSource

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:@(\d+(?:,\d+)*))?")
# Each default size is a quarter of the next; smaller ones than this save too little.
_STEP, _LEAST_SIZE, _MOST_SIZES = 4, 8, 3


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The dimension `name` has from `least` to the greatest of the ascending `sizes`, which are compiled.

    `text` is the option, `axes` are its places in the inputs, by the input's name.
    """

    text: str
    name: str
    least: int
    sizes: tuple[int, ...]
    axes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def bind(
        self, inputs: Sequence[InputSpec], given: Mapping[str, tuple[int, ...]], batch: int | None = None
    ) -> Lengths:
        """Find the dimension in a model's inputs. Raises UsageError where none has it, or `given` or `batch` fix it."""
        axes = {
            spec.name: found
            for spec in inputs
            if (found := tuple(at for at, size in enumerate(spec.shape) if size == self.name))
        }
        if not axes:
            names = sorted({size for spec in inputs for size in spec.shape if isinstance(size, str) and size != "?"})
            raise UsageError(
                f"the model has no open dimension {self.name!r}", f"Its open dimensions: {', '.join(names) or 'none'}."
            )
        if fixed := [name for name in given if name in axes or name == self.name]:
            raise UsageError(f"--shape gives the dimension {self.name!r} twice: as a range and by {fixed[0]!r}")
        if batch is not None and any(0 in each for each in axes.values()):
            raise UsageError(f"--shape gives a range to {self.name!r}, the dimension that --batch {batch} sets")
        return dataclasses.replace(self, axes=axes)

    def fix(self, size: int) -> str:
        """Return the option for one size."""
        return f"{self.name}={size}"

    def set_length(self, inputs: Iterable[InputSpec], length: int) -> tuple[InputSpec, ...]:
        """Return the inputs with another length."""
        return tuple(
            dataclasses.replace(
                spec,
                shape=tuple(length if at in self.axes.get(spec.name, ()) else d for at, d in enumerate(spec.shape)),
            )
            for spec in inputs
        )

    def reopen(self, model: onnx.ModelProto) -> None:
        """Leave the dimension open in a model whose input shapes were fixed."""
        for value in model.graph.input:
            for at in self.axes.get(value.name, ()):
                value.type.tensor_type.shape.dim[at].dim_param = self.name


def split_shapes(texts: Iterable[str]) -> tuple[list[str], Lengths | None]:
    """Return the `--shape` options without ranges, and the range among them. Raises UsageError."""
    plain: list[str] = []
    found: list[Lengths] = []
    for text in texts:
        name, _, numbers = text.rpartition("=")
        if ".." in numbers:
            found.append(_parse_range(text, name.strip(), numbers.replace(" ", "")))
        else:
            plain.append(text)
    if len(found) > 1:
        raise UsageError(f"--shape gives a range to both {found[0].name!r} and {found[1].name!r}; one can have one")
    return plain, found[0] if found else None


def _parse_range(text: str, name: str, numbers: str) -> Lengths:
    matched = _RANGE.fullmatch(numbers)
    if matched is None or not name:
        raise UsageError(f"--shape {text!r} is not NAME=1..512 or NAME=1..512@32,128,512")
    least, end = int(matched[1]), int(matched[2])
    if not 1 <= least <= end:
        raise UsageError(f"--shape {text!r}: a range goes from at least 1 to a greater length, not {least} to {end}")
    sizes = tuple(map(int, matched[3].split(","))) if matched[3] else _choose_sizes(least, end)
    if sizes[0] < least or sizes[-1] != end or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"--shape {text!r}: the sizes after @ do not ascend within the range to its end, {end}")
    return Lengths(text, name, least, sizes)


def _choose_sizes(least: int, end: int) -> tuple[int, ...]:
    """Return powers of two below the end, and the end."""
    quarters = [2 ** round(math.log2(end / _STEP**turn)) for turn in range(_MOST_SIZES - 1, 0, -1)]
    return (*(size for size in quarters if max(least, _LEAST_SIZE) <= size < end), end)


def set_batch(source: ModelSource, shapes: Sequence[str], batch: int) -> tuple[onnx.ModelProto, tuple[InputSpec, ...]]:
    """Return the model with first dimension `batch` in its inputs. Raises UsageError where it fixes another one.

    An open first dimension is the batch; one of 1 is taken for it.
    """
    model = source.load()
    given = parse_shapes(shapes)
    opened = []
    for spec in read_inputs(model):
        first = spec.shape[0] if spec.shape else None
        # An input may be called like a dimension that is given.
        is_given = spec.name in given and len(given[spec.name]) == len(spec.shape)
        if is_given or first == batch or first is None:
            opened.append(spec)
        elif isinstance(first, str) or first == 1:
            opened.append(dataclasses.replace(spec, shape=(batch, *spec.shape[1:])))
        else:
            raise UsageError(
                f"--batch {batch}: the model's input {spec} has a first dimension of {first}",
                "Export the model with an open batch dimension.",
            )
    inputs = resolve_inputs(opened, given, model)
    if batch > 1 and (wrong := [spec for spec in inputs if spec.static_shape[:1] != (batch,)]):
        raise UsageError(f"--batch {batch} and --shape disagree about the input {wrong[0]}", "Remove one of them.")
    if any(spec.shape != was.shape for spec, was in zip(inputs, read_inputs(model), strict=True)):
        _forget_shapes(model, inputs)
    return model, inputs


def _forget_shapes(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> None:
    """Write the inputs' shapes into the model and drop the shapes derived from them."""
    shapes = {spec.name: spec.static_shape for spec in inputs}
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dimension.dim_value = size
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
