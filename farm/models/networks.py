"""The zoo's networks, layer by layer as published. Weights come from `onnx_builder.py`, names from `zoo.py`.

Each function builds on (1, 3, H, W) or (1, features) and returns the tensor that holds the scores, before any softmax:
a softmax would hide small errors and saturate on large ones. Inception, YOLO and transformers have their own modules.
"""

from __future__ import annotations

from farm.models.onnx_builder import GraphBuilder

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
    """ResNet-18 (arXiv 1512.03385), 1000 classes; batch norm is left as nodes of its own."""
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
    """ResNet-50, 1000 classes; as torchvision's, whose stages shrink in their 3x3 and not in their first 1x1."""
    return _bottlenecks(g, x, (3, 4, 6, 3))


def resnet50_original(g: GraphBuilder, x: str) -> str:
    """ResNet-50 as its authors have it: stages shrink in their first 1x1, so that every 3x3 has a stride of 1."""
    return _bottlenecks(g, x, (3, 4, 6, 3), shrinks_first=True)


def resnet152(g: GraphBuilder, x: str) -> str:
    """ResNet-152, 1000 classes; as torchvision's."""
    return _bottlenecks(g, x, (3, 8, 36, 3), added=0.2)


def _bottlenecks(
    g: GraphBuilder, x: str, stages: tuple[int, ...], added: float = 0.5, *, shrinks_first: bool = False
) -> str:
    """`added` scales what a block adds to the sum, which grows with depth."""
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
    for channels in _VGG11:
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
