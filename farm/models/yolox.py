"""YOLOX-s (arXiv 2107.08430): a detector without anchors, in depth 0.33 and width 0.5; 80 classes.

The boxes are not decoded and the scores are before their sigmoid: both are left to the caller.
"""

from __future__ import annotations

from farm.models.onnx_builder import GraphBuilder

_WIDTH = 32
_HIDDEN = 128
_CLASSES = 80


def yolox_s(g: GraphBuilder, x: str) -> tuple[str, ...]:
    """Build on (1, 3, H, W); per stride 8, 16 and 32 four coordinates, one score and 80 classes."""
    fine, middle, coarse = _backbone(g, x)
    return tuple(_head(g, level) for level in _pyramid(g, fine, middle, coarse))


def _backbone(g: GraphBuilder, x: str) -> tuple[str, str, str]:
    """CSPDarknet: the features at strides 8, 16 and 32."""
    # The four pixels of each 2x2 square side by side as channels.
    corners = [g.every_second(x, row, column) for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    x = _conv(g, g.concat(*corners), _WIDTH)
    x = _cross_stage(g, _conv(g, x, 2 * _WIDTH, stride=2), 2 * _WIDTH, 1, shortcut=True)
    fine = _cross_stage(g, _conv(g, x, 4 * _WIDTH, stride=2), 4 * _WIDTH, 3, shortcut=True)
    middle = _cross_stage(g, _conv(g, fine, 8 * _WIDTH, stride=2), 8 * _WIDTH, 3, shortcut=True)
    x = _pool_pyramid(g, _conv(g, middle, 16 * _WIDTH, stride=2), 16 * _WIDTH)
    return fine, middle, _cross_stage(g, x, 16 * _WIDTH, 1)


def _pyramid(g: GraphBuilder, fine: str, middle: str, coarse: str) -> tuple[str, str, str]:
    """Up from the coarse features to the fine ones, and down again."""
    top = _conv(g, coarse, 8 * _WIDTH, kernel=1)
    joined = _cross_stage(g, g.concat(g.upsample(top, 2), middle), 8 * _WIDTH, 1)
    narrow = _conv(g, joined, 4 * _WIDTH, kernel=1)
    at_8 = _cross_stage(g, g.concat(g.upsample(narrow, 2), fine), 4 * _WIDTH, 1)
    at_16 = _cross_stage(g, g.concat(_conv(g, at_8, 4 * _WIDTH, stride=2), narrow), 8 * _WIDTH, 1)
    at_32 = _cross_stage(g, g.concat(_conv(g, at_16, 8 * _WIDTH, stride=2), top), 16 * _WIDTH, 1)
    return at_8, at_16, at_32


def _head(g: GraphBuilder, x: str) -> str:
    """Classes on one side, box and score on the other."""
    x = _conv(g, x, _HIDDEN, kernel=1)
    classes = _conv(g, _conv(g, x, _HIDDEN), _HIDDEN)
    boxes = _conv(g, _conv(g, x, _HIDDEN), _HIDDEN)
    ends = [(boxes, 4), (boxes, 1), (classes, _CLASSES)]
    return g.concat(*(g.conv(end, channels, 1, gain=0.2) for end, channels in ends))


def _cross_stage(g: GraphBuilder, x: str, channels: int, blocks: int, *, shortcut: bool = False) -> str:
    """Half of the channels through a number of bottlenecks, half past them."""
    inside, beside = (_conv(g, x, channels // 2, kernel=1) for _ in range(2))
    for _ in range(blocks):
        y = _conv(g, _conv(g, inside, channels // 2, kernel=1), channels // 2)
        inside = g.add(y, inside) if shortcut else y
    return _conv(g, g.concat(inside, beside), channels, kernel=1)


def _pool_pyramid(g: GraphBuilder, x: str, channels: int) -> str:
    x = _conv(g, x, channels // 2, kernel=1)
    pools = (g.max_pool(x, kernel, stride=1, pad=kernel // 2) for kernel in (5, 9, 13))
    return _conv(g, g.concat(x, *pools), channels, kernel=1)


def _conv(g: GraphBuilder, x: str, channels: int, *, kernel: int = 3, stride: int = 1) -> str:
    y = g.conv(x, channels, kernel, stride=stride, pad=kernel // 2, bias=False)
    return g.silu(g.batch_norm(y, epsilon=1e-3))
