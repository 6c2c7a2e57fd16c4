"""Inception v3 (arXiv 1512.00567) as torchvision has it, without the auxiliary classifier, which only training uses."""

from __future__ import annotations

from farm.models.onnx_builder import GraphBuilder

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
