"""Models that need no download: real topologies with seeded random weights. Layers: `networks.py` and beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from farm.models import networks
from farm.models.onnx_builder import GraphBuilder

DEFAULT = "squeezenet1.1"


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One entry. `parameters` counts trained weights as the literature does: running statistics left out.

    `flop` is that of convolutions and matrix products, an FMA counting as two. `published` says what others
    count and where. Inputs are of `input_dtype`, outputs float32. Outputs are scores before softmax, by name.
    """

    name: str
    description: str
    input_shapes: Mapping[str, tuple[int, ...]]
    output_shapes: Mapping[str, tuple[int, ...]]
    parameters: int
    flop: int
    network: Callable[[GraphBuilder, str], str | tuple[str, ...]]
    published: str = ""
    input_dtype: str = "float32"

    def build(self, seed: int = 0) -> bytes:
        """The model as ONNX: the same bytes for the same seed, on every machine and NumPy."""
        return self._write(GraphBuilder(seed))

    def outline(self) -> bytes:
        """The same graph, its weights with shapes and without values: quick however large it is; nothing can run it."""
        return self._write(GraphBuilder(None))

    def _write(self, builder: GraphBuilder) -> bytes:
        ((name, shape),) = self.input_shapes.items()
        made = self.network(builder, builder.input(name, shape, self.input_dtype))
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
            "torchvision, SqueezeNet1_1_Weights: 1,235,496 parameters, 0.35 G FMAs",
        ),
        ZooModel(
            "resnet18",
            "ResNet-18: 3x3 convolutions with batch norm and residuals",
            _IMAGE,
            _CLASSES,
            11_689_512,
            3_628_146_688,
            networks.resnet18,
            "torchvision, ResNet18_Weights: 11,689,512 parameters, 1.81 G FMAs",
        ),
        ZooModel(
            "resnet50",
            "ResNet-50: bottlenecks of 1x1 and 3x3 convolutions",
            _IMAGE,
            _CLASSES,
            25_557_032,
            8_178_368_512,
            networks.resnet50,
            "torchvision, ResNet50_Weights: 25,557,032 parameters, 4.09 G FMAs",
        ),
        ZooModel(
            "resnet152",
            "ResNet-152: fifty bottlenecks; deep",
            _IMAGE,
            _CLASSES,
            60_192_808,
            23_027_253_248,
            networks.resnet152,
            "torchvision, ResNet152_Weights: 60,192,808 parameters, 11.51 G FMAs",
        ),
        ZooModel(
            "vgg11",
            "VGG11: eight 3x3 convolutions and dense layers of 123 million weights",
            _IMAGE,
            _CLASSES,
            132_863_336,
            15_218_180_096,
            networks.vgg11,
            "torchvision, VGG11_Weights: 132,863,336 parameters, 7.61 G FMAs",
        ),
        ZooModel(
            "mobilenet_v2",
            "MobileNet v2: depthwise and 1x1 convolutions",
            _IMAGE,
            _CLASSES,
            3_504_872,
            601_548_544,
            networks.mobilenet_v2,
            "torchvision, MobileNet_V2_Weights: 3,504,872 parameters, 0.30 G FMAs",
        ),
        ZooModel(
            "inception_v3",
            "Inception v3: 1x7, 7x1 and 5x5 convolutions in parallel branches",
            {"data": (1, 3, 299, 299)},
            _CLASSES,
            23_834_568,
            11_426_432_192,
            networks.inception_v3,
            "torchvision, Inception_V3_Weights: 27,161,264 parameters, 3,326,696 of them in the auxiliary classifier; "
            "5.71 G FMAs",
        ),
        ZooModel(
            "yolov4-tiny",
            "YOLOv4-tiny: a detector with two heads, undecoded",
            {"data": (1, 3, 416, 416)},
            {"coarse": (1, 255, 13, 13), "fine": (1, 255, 26, 26)},
            6_056_606,
            6_907_876_352,
            networks.yolov4_tiny,
            "AlexeyAB/darknet, README: 6.9 GFLOP; Open Model Zoo, yolo-v4-tiny-tf: 6.0535 M parameters, batch norm "
            "folded",
        ),
        ZooModel(
            "yolox_s",
            "YOLOX-s: a detector without anchors, three heads, undecoded",
            {"data": (1, 3, 640, 640)},
            {"stride8": (1, 85, 80, 80), "stride16": (1, 85, 40, 40), "stride32": (1, 85, 20, 20)},
            8_968_255,
            26_685_542_400,
            networks.yolox_s,
            "Megvii YOLOX, README: 9.0 M parameters, 26.8 GFLOP",
        ),
        ZooModel(
            "vit_b16",
            "ViT-B/16: a transformer over 196 patches of an image",
            _IMAGE,
            _CLASSES,
            86_567_656,
            35_127_656_448,
            networks.vit_b16,
            "torchvision, ViT_B_16_Weights: 86,567,656 parameters, 17.56 G FMAs",
        ),
        ZooModel(
            "bert_base",
            "BERT base, uncased: a transformer over 128 words, one text without padding",
            {"input_ids": (1, 128)},
            {"last_hidden_state": (1, 128, 768), "pooled": (1, 768)},
            109_482_240,
            22_348_431_360,
            networks.bert_base,
            "Hugging Face, BertModel of bert-base-uncased: 109,482,240 parameters; TinyBERT (arXiv 1909.10351): 22.5 "
            "GFLOP with 128 words, element-wise operators counted too",
            "int64",
        ),
        ZooModel(
            "cifar_resnet20",
            "ResNet-20 on 32x32 pixels",
            {"data": (1, 3, 32, 32)},
            {"scores": (1, 10)},
            272_474,
            81_626_368,
            networks.cifar_resnet20,
            "chenyaofo/pytorch-cifar-models, README: 0.27 M parameters, 40.81 M FMAs",
        ),
        ZooModel(
            "mnist_cnn",
            "two convolutions and two dense layers on 28x28 pixels",
            {"data": (1, 1, 28, 28)},
            {"scores": (1, 10)},
            1_199_882,
            23_984_896,
            networks.mnist_cnn,
            "pytorch/examples, mnist: the layers; 1,199,882 parameters, FLOP are not said",
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
