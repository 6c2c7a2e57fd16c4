"""Models that need no download: real topologies with seeded random weights. Layers: `networks.py` and beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from farm.models import inception, networks, yolo
from farm.models.onnx_builder import GraphBuilder

DEFAULT = "squeezenet1.1"


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One entry. `parameters` counts trained weights as the literature does: running statistics left out.

    `flop` is that of convolutions and dense layers, a multiply-add counted as two. `published` says what others count
    and where. All inputs and outputs are float32. Outputs are scores before softmax, by name.
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
        ((name, shape),) = self.input_shapes.items()
        builder = GraphBuilder(seed)
        made = self.network(builder, builder.input(name, shape))
        ends = (made,) if isinstance(made, str) else made
        return builder.finish(
            self.name,
            {output: (end, shape) for (output, shape), end in zip(self.output_shapes.items(), ends, strict=True)},
        )


_IMAGE = {"data": (1, 3, 224, 224)}
_CLASSES = {"scores": (1, 1000)}

ZOO: Mapping[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            "squeezenet1.1",
            "SqueezeNet 1.1: 26 convolutions, small and quick; the default",
            _IMAGE,
            _CLASSES,
            1_235_496,
            698_303_872,
            networks.squeezenet,
            "torchvision, SqueezeNet1_1_Weights: 1,235,496 parameters, 0.35 G multiply-adds",
        ),
        ZooModel(
            "resnet18",
            "ResNet-18: 3x3 convolutions with batch norm and residuals",
            _IMAGE,
            _CLASSES,
            11_689_512,
            3_628_146_688,
            networks.resnet18,
            "torchvision, ResNet18_Weights: 11,689,512 parameters, 1.81 G multiply-adds",
        ),
        ZooModel(
            "resnet50",
            "ResNet-50: bottlenecks of 1x1 and 3x3 convolutions",
            _IMAGE,
            _CLASSES,
            25_557_032,
            8_178_368_512,
            networks.resnet50,
            "torchvision, ResNet50_Weights: 25,557,032 parameters, 4.09 G multiply-adds",
        ),
        ZooModel(
            "mobilenet_v2",
            "MobileNet v2: depthwise and 1x1 convolutions",
            _IMAGE,
            _CLASSES,
            3_504_872,
            601_548_544,
            networks.mobilenet_v2,
            "torchvision, MobileNet_V2_Weights: 3,504,872 parameters, 0.30 G multiply-adds",
        ),
        ZooModel(
            "inception_v3",
            "Inception v3: 1x7, 7x1 and 5x5 convolutions in parallel branches",
            {"data": (1, 3, 299, 299)},
            _CLASSES,
            23_834_568,
            11_426_432_192,
            inception.inception_v3,
            "torchvision, Inception_V3_Weights: 27,161,264 parameters, 3,326,696 of them in the auxiliary classifier; "
            "5.71 G multiply-adds",
        ),
        ZooModel(
            "yolov4-tiny",
            "YOLOv4-tiny: a detector with two heads, undecoded",
            {"data": (1, 3, 416, 416)},
            {"coarse": (1, 255, 13, 13), "fine": (1, 255, 26, 26)},
            6_056_606,
            6_907_876_352,
            yolo.yolov4_tiny,
            "AlexeyAB/darknet, README: 6.9 GFLOP; Open Model Zoo, yolo-v4-tiny-tf: 6.0535 M parameters, batch norm "
            "folded",
        ),
        ZooModel(
            "tiny-cnn",
            "a convolution of every kind on 16x16 pixels; for tests",
            {"data": (1, 3, 16, 16)},
            {"scores": (1, 10)},
            1_722,
            165_184,
            networks.tiny_cnn,
        ),
        ZooModel(
            "mlp",
            "three dense layers; for tests",
            {"data": (1, 64)},
            {"scores": (1, 10)},
            50_826,
            100_864,
            networks.mlp,
        ),
    )
}
