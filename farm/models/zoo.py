"""Models that need no download: real topologies with seeded random weights.

Their table: `zoo.yaml`. Their layers: `networks.py` and beside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

from farm.models import networks
from farm.models.onnx_builder import GraphBuilder

DEFAULT = "squeezenet1.1"


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One entry. `parameters` counts trained weights as the literature does: running statistics left out.

    `flop` is that of convolutions and matrix products, an FMA counting as two. `published` says what others
    count and where. Inputs and outputs are float32. Outputs are scores before softmax, by name.
    """

    name: str
    description: str
    input_shapes: Mapping[str, tuple[int, ...]]
    output_shapes: Mapping[str, tuple[int, ...]]
    parameters: int
    flop: int
    network: Callable[[GraphBuilder, str], str | tuple[str, ...]]
    published: str = ""

    def build(self, seed: int = 0) -> bytes:
        """The model as ONNX: the same bytes for the same seed, on every machine and NumPy."""
        return self._write(GraphBuilder(seed))

    def outline(self) -> bytes:
        """The same graph, its weights with shapes and without values: quick however large it is; nothing can run it."""
        return self._write(GraphBuilder(None))

    def _write(self, builder: GraphBuilder) -> bytes:
        ((name, shape),) = self.input_shapes.items()
        made = self.network(builder, builder.input(name, shape))
        ends = (made,) if isinstance(made, str) else made
        return builder.finish(
            self.name,
            {output: (end, shape) for (output, shape), end in zip(self.output_shapes.items(), ends, strict=True)},
        )


def _read_zoo() -> Iterator[ZooModel]:
    text = Path(__file__).with_name("zoo.yaml").read_text(encoding="utf-8")
    for name, entry in yaml.load(text, _LOADER).items():  # noqa: S506 - a safe loader, which the rule cannot see
        inputs, outputs = ({key: tuple(shape) for key, shape in entry.pop(ends).items()} for ends in _ENDS)
        network = getattr(networks, entry.pop("network"))
        yield ZooModel(name, entry.pop("description"), inputs, outputs, network=network, **entry)


_ENDS = ("inputs", "outputs")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ZOO: Mapping[str, ZooModel] = {model.name: model for model in _read_zoo()}
