"""The zoo's networks as published; `onnx_builder.py` draws the weights and `zoo.py` names the models.

Each function builds on (1, 3, H, W) or (1, features) and returns the scores before any softmax, which would hide small
errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from farm.models.onnx_builder import GraphBuilder

_YOLOX_WIDTH = 32
_HIDDEN = 128
_CLASSES = 80


def yolox_s(g: GraphBuilder, x: str) -> tuple[str, ...]:
    """Build on (1, 3, H, W); per stride 8, 16 and 32 four coordinates, one score and 80 classes."""
    fine, middle, coarse = _backbone(g, x)
    return tuple(_decoupled_head(g, level) for level in _pyramid(g, fine, middle, coarse))


def _backbone(g: GraphBuilder, x: str) -> tuple[str, str, str]:
    """CSPDarknet: the features at strides 8, 16 and 32."""
    # The four pixels of each 2x2 square become channels.
    corners = [g.every_second(x, row, column) for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    x = _silu_conv(g, g.concat(*corners), _YOLOX_WIDTH)
    x = _cross_stage(g, _silu_conv(g, x, 2 * _YOLOX_WIDTH, stride=2), 2 * _YOLOX_WIDTH, 1, shortcut=True)
    fine = _cross_stage(g, _silu_conv(g, x, 4 * _YOLOX_WIDTH, stride=2), 4 * _YOLOX_WIDTH, 3, shortcut=True)
    middle = _cross_stage(g, _silu_conv(g, fine, 8 * _YOLOX_WIDTH, stride=2), 8 * _YOLOX_WIDTH, 3, shortcut=True)
    x = _pool_pyramid(g, _silu_conv(g, middle, 16 * _YOLOX_WIDTH, stride=2), 16 * _YOLOX_WIDTH)
    return fine, middle, _cross_stage(g, x, 16 * _YOLOX_WIDTH, 1)


def _pyramid(g: GraphBuilder, fine: str, middle: str, coarse: str) -> tuple[str, str, str]:
    """Go up from the coarse features to the fine ones and down again."""
    top = _silu_conv(g, coarse, 8 * _YOLOX_WIDTH, kernel=1)
    joined = _cross_stage(g, g.concat(g.upsample(top, 2), middle), 8 * _YOLOX_WIDTH, 1)
    narrow = _silu_conv(g, joined, 4 * _YOLOX_WIDTH, kernel=1)
    at_8 = _cross_stage(g, g.concat(g.upsample(narrow, 2), fine), 4 * _YOLOX_WIDTH, 1)
    at_16 = _cross_stage(g, g.concat(_silu_conv(g, at_8, 4 * _YOLOX_WIDTH, stride=2), narrow), 8 * _YOLOX_WIDTH, 1)
    at_32 = _cross_stage(g, g.concat(_silu_conv(g, at_16, 8 * _YOLOX_WIDTH, stride=2), top), 16 * _YOLOX_WIDTH, 1)
    return at_8, at_16, at_32


def _decoupled_head(g: GraphBuilder, x: str) -> str:
    """Compute classes in one branch, box and score in the other."""
    x = _silu_conv(g, x, _HIDDEN, kernel=1)
    classes = _silu_conv(g, _silu_conv(g, x, _HIDDEN), _HIDDEN)
    boxes = _silu_conv(g, _silu_conv(g, x, _HIDDEN), _HIDDEN)
    ends = [(boxes, 4), (boxes, 1), (classes, _CLASSES)]
    return g.concat(*(g.conv(end, channels, 1, gain=0.2) for end, channels in ends))


def _cross_stage(g: GraphBuilder, x: str, channels: int, blocks: int, *, shortcut: bool = False) -> str:
    """Send half of the channels through bottlenecks and half past them."""
    inside, beside = (_silu_conv(g, x, channels // 2, kernel=1) for _ in range(2))
    for _ in range(blocks):
        y = _silu_conv(g, _silu_conv(g, inside, channels // 2, kernel=1), channels // 2)
        inside = g.add(y, inside) if shortcut else y
    return _silu_conv(g, g.concat(inside, beside), channels, kernel=1)


def _pool_pyramid(g: GraphBuilder, x: str, channels: int) -> str:
    x = _silu_conv(g, x, channels // 2, kernel=1)
    pools = (g.max_pool(x, kernel, stride=1, pad=kernel // 2) for kernel in (5, 9, 13))
    return _silu_conv(g, g.concat(x, *pools), channels, kernel=1)


def _silu_conv(g: GraphBuilder, x: str, channels: int, *, kernel: int = 3, stride: int = 1) -> str:
    y = g.conv(x, channels, kernel, stride=stride, pad=kernel // 2, bias=False)
    return g.silu(g.batch_norm(y, epsilon=1e-3))


# Three boxes of four coordinates, one score and 80 classes.
_HEAD_CHANNELS = 3 * (4 + 1 + 80)


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
_VOCABULARY, _POSITIONS, _TOKENS = 30_522, 512, 128
# Scale of each residual, so that their sum does not grow with depth.
_ADDED = 0.25


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
        x = g.add(x, _feed_forward(g, g.layer_norm(x, epsilon=1e-6)))
    return g.dense(g.rows(g.layer_norm(x, epsilon=1e-6), 0, _EMBEDDING, axis=1), 1000)


def bert_base(g: GraphBuilder, x: str) -> tuple[str, str]:
    """BERT base, uncased, on (1, 128) token ids, one text without padding: all hidden states, and the pooled one."""
    words = g.rows(g.weight((_VOCABULARY, _EMBEDDING), 1.0), x, _EMBEDDING)
    positions = g.rows(g.weight((_POSITIONS, _EMBEDDING), 0.5), range(_TOKENS), _EMBEDDING)
    # All tokens are of the first text; the second row is there as in the published table.
    texts = g.rows(g.weight((2, _EMBEDDING), 0.5), [0] * _TOKENS, _EMBEDDING)
    x = g.layer_norm(g.add(g.add(words, texts), positions), epsilon=1e-12)
    for _ in range(_LAYERS):
        x = g.layer_norm(g.add(_attend(g, x), x), epsilon=1e-12)
        x = g.layer_norm(g.add(_feed_forward(g, x), x), epsilon=1e-12)
    first = g.rows(x, 0, _EMBEDDING, axis=1)
    return g.unary("Identity", x), g.unary("Tanh", g.dense(first, _EMBEDDING))


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


def _feed_forward(g: GraphBuilder, x: str) -> str:
    return g.linear(g.gelu(g.linear(x, _INNER)), _EMBEDDING, gain=_ADDED)


Kernel = int | tuple[int, int]


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


# (squeeze, expand) channels of the eight fire modules of SqueezeNet 1.1; "M" is a pooling step.
_FIRES: tuple[tuple[int, int] | str, ...] = (
    *((16, 64), (16, 64), "M"),
    *((32, 128), (32, 128), "M"),
    *((48, 192), (48, 192), (64, 256), (64, 256)),
)

# Channels of VGG11's convolutions (configuration A of arXiv 1409.1556); "M" is a pooling step.
_VGG11: tuple[int | str, ...] = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")

# (expansion, channels, repeats, stride) of MobileNet v2, table 2 of arXiv 1801.04381.
_INVERTED_RESIDUALS = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


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


def resnet50(g: GraphBuilder, x: str) -> str:
    """ResNet-50, 1000 classes, as in torchvision: stages shrink in their 3x3 convolution."""
    return _bottlenecks(g, x, (3, 4, 6, 3))


def resnet50_original(g: GraphBuilder, x: str) -> str:
    """ResNet-50 as published: stages shrink in their first 1x1, so that every 3x3 has stride 1."""
    return _bottlenecks(g, x, (3, 4, 6, 3), shrinks_first=True)


def resnet152(g: GraphBuilder, x: str) -> str:
    """ResNet-152, 1000 classes; as torchvision's."""
    return _bottlenecks(g, x, (3, 8, 36, 3), added=0.2)


def _bottlenecks(
    g: GraphBuilder, x: str, stages: tuple[int, ...], added: float = 0.5, *, shrinks_first: bool = False
) -> str:
    """`added` scales each residual, whose sum grows with depth."""
    x = g.relu(g.batch_norm(g.conv(x, 64, 7, stride=2, pad=3, bias=False)))
    x = g.max_pool(x, 3, stride=2, pad=1)
    for stage, (channels, blocks) in enumerate(zip((64, 128, 256, 512), stages, strict=True)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            strides = (stride, 1) if shrinks_first else (1, stride)
            x = _bottleneck(g, x, channels, strides, added)
    return g.dense(g.global_average(x), 1000)


def _bottleneck(g: GraphBuilder, x: str, channels: int, strides: tuple[int, int], added: float) -> str:
    stride = max(strides)
    y = g.relu(g.batch_norm(g.conv(x, channels, 1, stride=strides[0], bias=False)))
    y = g.relu(g.batch_norm(g.conv(y, channels, 3, stride=strides[1], pad=1, bias=False)))
    y = g.batch_norm(g.conv(y, 4 * channels, 1, bias=False, gain=1.0), scale=added)
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


def vgg11(g: GraphBuilder, x: str) -> str:
    """VGG11, 1000 classes; 123 of its 133 million weights are dense layers'."""
    return vgg(g, x, _VGG11)


def vgg(g: GraphBuilder, x: str, layers: Sequence[int | str]) -> str:
    """A network of arXiv 1409.1556: channels of 3x3 convolutions, and "M" for a pool; 1000 classes."""
    for channels in layers:
        x = g.max_pool(x, 2, stride=2) if isinstance(channels, str) else g.relu(g.conv(x, channels, 3, pad=1))
    x = g.flatten(x, g.channels(x) * 7 * 7)
    for _ in range(2):
        x = g.relu(g.dense(x, 4096, gain=2.0))
    return g.dense(x, 1000)


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


# EfficientNet-Lite0 (github.com/tensorflow/tpu, efficientnet/lite): kernel, stride, expansion, channels, repeats.
_LITE0 = (
    *((3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3)),
    *((5, 1, 6, 112, 3), (5, 2, 6, 192, 4), (3, 1, 6, 320, 1)),
)
_LITE_EPSILON = 1e-3


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


def mnist_cnn(g: GraphBuilder, x: str) -> str:
    """The network of PyTorch's MNIST example, without dropout; 10 digits."""
    x = g.relu(g.conv(x, 32, 3))
    x = g.max_pool(g.relu(g.conv(x, 64, 3)), 2, stride=2)
    x = g.relu(g.dense(g.flatten(x, 64 * 12 * 12), 128, gain=2.0))
    return g.dense(x, 10)


def mlp(g: GraphBuilder, x: str) -> str:
    """Three dense layers, 10 classes."""
    for features in (256, 128):
        x = g.relu(g.dense(x, features, gain=2.0))
    return g.dense(x, 10)
