"""Models that need no download: real topologies with seeded random weights.

Their table: `zoo.yaml`; `onnx_builder.py` draws the weights. Each network, as published, builds on (1, 3, H, W) or
(1, features) and returns the scores before any softmax, which would hide small errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

from farm.models.onnx_builder import GraphBuilder

# Three boxes of four coordinates, one score and 80 classes.
_HEAD_CHANNELS = 3 * (4 + 1 + 80)
# Scale of each residual, so that their sum does not grow with depth.
_ADDED = 0.25
Kernel = int | tuple[int, int]
# (squeeze, expand) channels of the eight fire modules of SqueezeNet 1.1; "M" is a pooling step.
_FIRES: tuple[tuple[int, int] | str, ...] = (
    *((16, 64), (16, 64), "M"),
    *((32, 128), (32, 128), "M"),
    *((48, 192), (48, 192), (64, 256), (64, 256)),
)
# (expansion, channels, repeats, stride) of MobileNet v2, table 2 of arXiv 1801.04381.
_INVERTED_RESIDUALS = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
# EfficientNet-Lite0 (github.com/tensorflow/tpu, efficientnet/lite): kernel, stride, expansion, channels, repeats.
_LITE0 = (
    *((3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3)),
    *((5, 1, 6, 112, 3), (5, 2, 6, 192, 4), (3, 1, 6, 320, 1)),
)
_LITE_EPSILON = 1e-3
DEFAULT = "squeezenet1.1"
_ENDS = ("inputs", "outputs")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yolov4_tiny(g: GraphBuilder, x: str) -> tuple[str, str]:
    """Build on (1, 3, H, W); the two heads, at strides 32 and 16."""
    x = _leaky_conv(g, _leaky_conv(g, x, 32, stride=2), 64, stride=2)
    for channels in (64, 128, 256):
        x, side = _stage(g, x, channels)
    x = _leaky_conv(g, _leaky_conv(g, x, 512), 256, kernel=1)
    coarse = _head(g, _leaky_conv(g, x, 512))
    fine = g.concat(g.upsample(_leaky_conv(g, x, 128, kernel=1), 2), side)
    return coarse, _head(g, _leaky_conv(g, fine, 256))


def _stage(g: GraphBuilder, x: str, channels: int) -> tuple[str, str]:
    """Send half of the channels through two convolutions, join and pool; also return the last 1x1 convolution."""
    x = _leaky_conv(g, x, channels)
    half = g.take_channels(x, channels // 2, channels)
    first = _leaky_conv(g, half, channels // 2)
    second = _leaky_conv(g, first, channels // 2)
    joined = _leaky_conv(g, g.concat(second, first), channels, kernel=1)
    return g.max_pool(g.concat(x, joined), 2, stride=2), joined


def _leaky_conv(g: GraphBuilder, x: str, channels: int, *, kernel: int = 3, stride: int = 1) -> str:
    y = g.conv(x, channels, kernel, stride=stride, pad=kernel // 2, bias=False)
    return g.leaky_relu(g.batch_norm(y), 0.1)


def _head(g: GraphBuilder, x: str) -> str:
    return g.conv(x, _HEAD_CHANNELS, 1, gain=1.0)


_EMBEDDING, _HEADS, _LAYERS, _INNER = 768, 12, 12, 3072


def vit_b16(g: GraphBuilder, x: str) -> str:
    """ViT-B/16 on (1, 3, 224, 224), 1000 classes, before any softmax."""
    x = g.conv(x, _EMBEDDING, 16, stride=16, gain=1.0)
    x = g.transpose(g.reshape(x, (0, _EMBEDDING, 196), 196), (0, 2, 1), _EMBEDDING)
    # The class token is the first row; writing it into zeros keeps the graph free of the batch size.
    x = g.pad(x, (0, 1, 0), (0, 0, 0))
    x = g.add(x, g.pad(g.weight((1, 1, _EMBEDDING), 0.5), (0, 0, 0), (0, 196, 0)))
    x = g.add(x, g.weight((1, 197, _EMBEDDING), 0.5))
    for _ in range(_LAYERS):
        x = g.add(x, _attend(g, g.layer_norm(x, epsilon=1e-6)))
        x = g.add(x, g.linear(g.gelu(g.linear(g.layer_norm(x, epsilon=1e-6), _INNER)), _EMBEDDING, gain=_ADDED))
    return g.dense(g.row(g.layer_norm(x, epsilon=1e-6), 0, _EMBEDDING), 1000)


def _attend(g: GraphBuilder, x: str) -> str:
    """Multi-head self-attention."""
    each = _EMBEDDING // _HEADS
    query, key, value = (g.reshape(g.linear(x, _EMBEDDING), (0, 0, _HEADS, each), each) for _ in range(3))
    # Scaled before the product, which has more elements.
    query = g.scale(g.transpose(query, (0, 2, 1, 3), each), each**-0.5)
    scores = g.matmul(query, g.transpose(key, (0, 2, 3, 1), each), each)
    mixed = g.matmul(g.unary("Softmax", scores, axis=-1), g.transpose(value, (0, 2, 1, 3), each), each)
    return g.linear(
        g.reshape(g.transpose(mixed, (0, 2, 1, 3), each), (0, 0, _EMBEDDING), _EMBEDDING), _EMBEDDING, gain=_ADDED
    )


def inception_v3(g: GraphBuilder, x: str) -> str:
    """Build on (1, 3, 299, 299); 1000 classes, before any softmax."""
    x = _conv(g, x, 32, 3, stride=2)
    x = _conv(g, x, 32, 3)
    x = _conv(g, x, 64, 3, pad=1)
    x = g.max_pool(x, 3, stride=2)
    x = _conv(g, _conv(g, x, 80, 1), 192, 3)
    x = g.max_pool(x, 3, stride=2)
    for pooled in (32, 64, 64):
        x = _five(g, x, pooled)
    x = _shrink_to_17(g, x)
    for channels in (128, 160, 160, 192):
        x = _seven(g, x, channels)
    x = _shrink_to_8(g, x)
    for _ in range(2):
        x = _split(g, x)
    return g.dense(g.global_average(x), 1000)


def _conv(g: GraphBuilder, x: str, channels: int, kernel: Kernel, *, stride: int = 1, pad: Kernel = 0) -> str:
    return g.relu(g.batch_norm(g.conv(x, channels, kernel, stride=stride, pad=pad, bias=False), epsilon=1e-3))


def _five(g: GraphBuilder, x: str, pooled: int) -> str:
    """Figure 5 of the paper, with one 5x5 kept."""
    five = _conv(g, _conv(g, x, 48, 1), 64, 5, pad=2)
    double = _conv(g, _conv(g, _conv(g, x, 64, 1), 96, 3, pad=1), 96, 3, pad=1)
    return g.concat(_conv(g, x, 64, 1), five, double, _pool(g, x, pooled))


def _shrink_to_17(g: GraphBuilder, x: str) -> str:
    double = _conv(g, _conv(g, _conv(g, x, 64, 1), 96, 3, pad=1), 96, 3, stride=2)
    return g.concat(_conv(g, x, 384, 3, stride=2), double, g.max_pool(x, 3, stride=2))


def _seven(g: GraphBuilder, x: str, channels: int) -> str:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    seven = _down(g, _across(g, _conv(g, x, channels, 1), channels), 192)
    double = _across(g, _down(g, _conv(g, x, channels, 1), channels), channels)
    double = _across(g, _down(g, double, channels), 192)
    return g.concat(_conv(g, x, 192, 1), seven, double, _pool(g, x, 192))


def _across(g: GraphBuilder, x: str, channels: int) -> str:
    return _conv(g, x, channels, (1, 7), pad=(0, 3))


def _down(g: GraphBuilder, x: str, channels: int) -> str:
    return _conv(g, x, channels, (7, 1), pad=(3, 0))


def _shrink_to_8(g: GraphBuilder, x: str) -> str:
    three = _conv(g, _conv(g, x, 192, 1), 320, 3, stride=2)
    seven = _conv(g, _down(g, _across(g, _conv(g, x, 192, 1), 192), 192), 192, 3, stride=2)
    return g.concat(three, seven, g.max_pool(x, 3, stride=2))


def _split(g: GraphBuilder, x: str) -> str:
    """Figure 7: 1x3 and 3x1 side by side."""
    three = _conv(g, x, 384, 1)
    double = _conv(g, _conv(g, x, 448, 1), 384, 3, pad=1)
    return g.concat(_conv(g, x, 320, 1), *_sides(g, three), *_sides(g, double), _pool(g, x, 192))


def _sides(g: GraphBuilder, x: str) -> tuple[str, str]:
    return _conv(g, x, 384, (1, 3), pad=(0, 1)), _conv(g, x, 384, (3, 1), pad=(1, 0))


def _pool(g: GraphBuilder, x: str, channels: int) -> str:
    return _conv(g, g.average_pool(x, 3, stride=1, pad=1), channels, 1)


def squeezenet(g: GraphBuilder, x: str) -> str:
    """SqueezeNet 1.1 (arXiv 1602.07360 and its authors' later revision), 1000 classes."""
    x = g.relu(g.conv(x, 64, 3, stride=2))
    x = g.max_pool(x, 3, stride=2, ceil=True)
    for fire in _FIRES:
        if isinstance(fire, str):
            x = g.max_pool(x, 3, stride=2, ceil=True)
            continue
        squeeze, expand = fire
        x = g.relu(g.conv(x, squeeze, 1))
        x = g.concat(g.relu(g.conv(x, expand, 1)), g.relu(g.conv(x, expand, 3, pad=1)))
    return g.global_average(g.relu(g.conv(x, 1000, 1)))


def resnet18(g: GraphBuilder, x: str) -> str:
    """ResNet-18 (arXiv 1512.03385), 1000 classes, with batch normalisation as nodes."""
    x = g.relu(g.batch_norm(g.conv(x, 64, 7, stride=2, pad=3, bias=False)))
    x = g.max_pool(x, 3, stride=2, pad=1)
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            x = _basic_block(g, x, channels, stride=2 if stage and not block else 1)
    return g.dense(g.global_average(x), 1000)


def _basic_block(g: GraphBuilder, x: str, channels: int, stride: int) -> str:
    y = g.relu(g.batch_norm(g.conv(x, channels, 3, stride=stride, pad=1, bias=False)))
    y = g.batch_norm(g.conv(y, channels, 3, pad=1, bias=False, gain=1.0), scale=0.5)
    if stride != 1 or g.channels(x) != channels:
        x = g.batch_norm(g.conv(x, channels, 1, stride=stride, bias=False, gain=1.0))
    return g.relu(g.add(y, x))


def resnet50(g: GraphBuilder, x: str, *, shrinks_first: bool = False) -> str:
    """ResNet-50, 1000 classes, as in torchvision: stages shrink in their 3x3 convolution.

    As published they shrink in their first 1x1 (`shrinks_first`), so that every 3x3 has stride 1.
    """
    x = g.relu(g.batch_norm(g.conv(x, 64, 7, stride=2, pad=3, bias=False)))
    x = g.max_pool(x, 3, stride=2, pad=1)
    for stage, (channels, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _bottleneck(g, x, channels, (stride, 1) if shrinks_first else (1, stride))
    return g.dense(g.global_average(x), 1000)


def _bottleneck(g: GraphBuilder, x: str, channels: int, strides: tuple[int, int]) -> str:
    stride = max(strides)
    y = g.relu(g.batch_norm(g.conv(x, channels, 1, stride=strides[0], bias=False)))
    y = g.relu(g.batch_norm(g.conv(y, channels, 3, stride=strides[1], pad=1, bias=False)))
    y = g.batch_norm(g.conv(y, 4 * channels, 1, bias=False, gain=1.0), scale=0.5)
    if stride != 1 or g.channels(x) != 4 * channels:
        x = g.batch_norm(g.conv(x, 4 * channels, 1, stride=stride, bias=False, gain=1.0))
    return g.relu(g.add(y, x))


def cifar_resnet20(g: GraphBuilder, x: str) -> str:
    """ResNet-20 for CIFAR-10 (section 4.2 of arXiv 1512.03385) with projections where a stage begins; 10 classes."""
    x = g.relu(g.batch_norm(g.conv(x, 16, 3, pad=1, bias=False)))
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(3):
            x = _basic_block(g, x, channels, stride=2 if stage and not block else 1)
    return g.dense(g.global_average(x), 10)


def mobilenet_v2(g: GraphBuilder, x: str) -> str:
    """MobileNet v2 at width 1.0, 1000 classes."""
    x = g.relu6(g.batch_norm(g.conv(x, 32, 3, stride=2, pad=1, bias=False)))
    for expansion, channels, repeats, stride in _INVERTED_RESIDUALS:
        for repeat in range(repeats):
            x = _inverted_residual(g, x, expansion, channels, stride if repeat == 0 else 1)
    x = g.relu6(g.batch_norm(g.conv(x, 1280, 1, bias=False)))
    return g.dense(g.global_average(x), 1000)


def _inverted_residual(g: GraphBuilder, x: str, expansion: int, channels: int, stride: int) -> str:
    hidden = g.channels(x) * expansion
    y = x
    if expansion != 1:
        y = g.relu6(g.batch_norm(g.conv(y, hidden, 1, bias=False)))
    y = g.relu6(g.batch_norm(g.conv(y, hidden, 3, stride=stride, pad=1, groups=hidden, bias=False)))
    y = g.batch_norm(g.conv(y, channels, 1, bias=False, gain=1.0))
    return g.add(x, y) if stride == 1 and g.channels(x) == channels else y


def efficientnet_lite0(g: GraphBuilder, x: str) -> str:
    """EfficientNet-Lite0, 1000 classes; TensorFlow's padding puts the odd pixel last."""
    x = _lite_conv(g, x, 32, 3, stride=2)
    for kernel, stride, expansion, channels, repeats in _LITE0:
        for repeat in range(repeats):
            y = x if expansion == 1 else _lite_conv(g, x, g.channels(x) * expansion, 1)
            y = _lite_conv(g, y, g.channels(y), kernel, stride=1 if repeat else stride, groups=g.channels(y))
            y = g.batch_norm(g.conv(y, channels, 1, bias=False, gain=1.0), epsilon=_LITE_EPSILON)
            x = g.add(x, y) if repeat else y
    return g.dense(g.global_average(_lite_conv(g, x, 1280, 1)), 1000)


def _lite_conv(g: GraphBuilder, x: str, channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> str:
    pads = (kernel - stride) // 2, kernel // 2
    y = g.conv(x, channels, kernel, stride=stride, pad=pads[0], pad_end=pads[1], groups=groups, bias=False)
    return g.relu6(g.batch_norm(y, epsilon=_LITE_EPSILON))


def tiny_cnn(g: GraphBuilder, x: str) -> str:
    """One of each: convolution, batch norm, pooling, depthwise, residual, dense; 10 classes."""
    x = g.relu(g.batch_norm(g.conv(x, 8, 3, pad=1, bias=False)))
    x = g.max_pool(x, 2, stride=2)
    y = g.relu(g.conv(x, 8, 3, pad=1, groups=8))
    x = g.add(x, g.conv(y, 8, 1, gain=1.0))
    x = g.relu(g.conv(x, 16, 3, stride=2, pad=1))
    return g.dense(g.global_average(x), 10)


def mlp(g: GraphBuilder, x: str) -> str:
    """Three dense layers, 10 classes."""
    for features in (256, 128):
        x = g.relu(g.dense(x, features, gain=2.0))
    return g.dense(x, 10)


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
        network = globals()[entry.pop("network")]
        yield ZooModel(name, entry.pop("description"), inputs, outputs, network=network, **entry)


ZOO: Mapping[str, ZooModel] = {model.name: model for model in _read_zoo()}
