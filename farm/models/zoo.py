"""Models that need no download: real topologies with seeded random weights. Layers are in `networks.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from farm.models import networks
from farm.models.onnx_builder import GraphBuilder

DEFAULT = "squeezenet1.1"


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One entry. `parameters` counts trained weights as the literature does: running statistics left out.

    All inputs and outputs are float32. Outputs are scores before softmax, named `scores`, shape `output_shape`.
    """

    name: str
    description: str
    input_shapes: Mapping[str, tuple[int, ...]]
    output_shape: tuple[int, ...]
    parameters: int
    network: Callable[[GraphBuilder, str], str]

    def build(self, seed: int = 0) -> bytes:
        """The model as ONNX: the same bytes for the same seed, on every machine and NumPy."""
        ((name, shape),) = self.input_shapes.items()
        builder = GraphBuilder(seed)
        scores = self.network(builder, builder.input(name, shape))
        return builder.finish(self.name, scores, "scores", self.output_shape)


_IMAGE = {"data": (1, 3, 224, 224)}

ZOO: Mapping[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            "squeezenet1.1",
            "SqueezeNet 1.1: 26 convolutions, small and quick; the default",
            _IMAGE,
            (1, 1000),
            1_235_496,
            networks.squeezenet,
        ),
        ZooModel(
            "resnet18",
            "ResNet-18: 3x3 convolutions with batch norm and residuals",
            _IMAGE,
            (1, 1000),
            11_689_512,
            networks.resnet18,
        ),
        ZooModel(
            "mobilenet_v2",
            "MobileNet v2: depthwise and 1x1 convolutions",
            _IMAGE,
            (1, 1000),
            3_504_872,
            networks.mobilenet_v2,
        ),
        ZooModel(
            "tiny-cnn",
            "a convolution of every kind on 16x16 pixels; for tests",
            {"data": (1, 3, 16, 16)},
            (1, 10),
            1_722,
            networks.tiny_cnn,
        ),
        ZooModel("mlp", "three dense layers; for tests", {"data": (1, 64)}, (1, 10), 50_826, networks.mlp),
    )
}
