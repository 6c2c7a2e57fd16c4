"""YOLOv4-tiny (arXiv 2011.08036), layer by layer as its authors' yolov4-tiny.cfg; 80 classes, 3 boxes per cell.

The boxes are not decoded: that is left to the caller, as where the model is usually exported.
"""

from __future__ import annotations

from farm.models.onnx_builder import GraphBuilder

# Three boxes of four coordinates, one score and 80 classes.
_HEAD_CHANNELS = 3 * (4 + 1 + 80)


def yolov4_tiny(g: GraphBuilder, x: str) -> tuple[str, str]:
    """Build on (1, 3, H, W); the two heads, at strides 32 and 16."""
    x = _conv(g, _conv(g, x, 32, stride=2), 64, stride=2)
    for channels in (64, 128, 256):
        x, side = _stage(g, x, channels)
    x = _conv(g, _conv(g, x, 512), 256, kernel=1)
    coarse = _head(g, _conv(g, x, 512))
    fine = g.concat(g.upsample(_conv(g, x, 128, kernel=1), 2), side)
    return coarse, _head(g, _conv(g, fine, 256))


def _stage(g: GraphBuilder, x: str, channels: int) -> tuple[str, str]:
    """Half of the channels go through two convolutions, all are joined and pooled. The second is the last 1x1's."""
    x = _conv(g, x, channels)
    half = g.take_channels(x, channels // 2, channels)
    first = _conv(g, half, channels // 2)
    second = _conv(g, first, channels // 2)
    joined = _conv(g, g.concat(second, first), channels, kernel=1)
    return g.max_pool(g.concat(x, joined), 2, stride=2), joined


def _conv(g: GraphBuilder, x: str, channels: int, *, kernel: int = 3, stride: int = 1) -> str:
    y = g.conv(x, channels, kernel, stride=stride, pad=kernel // 2, bias=False)
    return g.leaky_relu(g.batch_norm(y), 0.1)


def _head(g: GraphBuilder, x: str) -> str:
    return g.conv(x, _HEAD_CHANNELS, 1, gain=1.0)
