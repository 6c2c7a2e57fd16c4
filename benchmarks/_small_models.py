"""Thirty held-out small ONNX models: what importer, graph pipeline and schedules meet outside of zoos.

Each is one idea with some layers around it, built with seeded weights; sizes are odd on purpose. All take one float32
tensor `x` and give one, `y`. `python benchmarks/_small_models.py` checks that ONNX Runtime runs every one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import _machine
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from farm.models.onnx_builder import GraphBuilder

SEED = 14


class Layers(GraphBuilder):
    """The zoo's builder, with operators of any name and convolutions of any dimension."""

    def op(self, kind: str, *inputs: str, channels: int | None = None, **attributes: object) -> str:
        """A node with one output; `channels`, where they are not those of the first input."""
        return self._node(kind, inputs, self.channels(inputs[0]) if channels is None else channels, **attributes)

    def constant(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> str:
        return self._constant(np.asarray(values, dtype))

    def integers(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def matrix(self, *shape: int, gain: float = 1.0) -> str:
        """Normal values for a product over the second-last dimension, as `x @ matrix` has it."""
        return self.weight(shape, math.sqrt(gain / shape[-2]))

    def vector(self, size: int, mean: float = 0.0) -> str:
        return self.constant(mean + self._normal((size,), 0.1))

    def _normal(self, shape: tuple[int, ...], std: float) -> npt.NDArray[np.float64]:
        assert self._random is not None  # every small model has a seed
        return self._random.standard_normal(shape) * std

    def convolve(
        self,
        x: str,
        out: int,
        kernel: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        groups: int = 1,
        gain: float = 2.0,
    ) -> str:
        """With bias, of as many dimensions as `kernel`; unless `pads` says otherwise, stride 1 keeps the size."""
        ones = [1] * len(kernel)
        dilations = dilations or ones
        same = [(size - 1) * dilation // 2 for size, dilation in zip(kernel, dilations, strict=True)]
        inside = self.channels(x) // groups
        weight = self.weight((out, inside, *kernel), math.sqrt(gain / (inside * math.prod(kernel))))
        return self._node(
            "Conv",
            [x, weight, self.vector(out)],
            out,
            kernel_shape=list(kernel),
            strides=list(strides or ones),
            pads=list(pads or same * 2),
            dilations=list(dilations),
            group=groups,
        )

    def deconvolve(self, x: str, out: int, kernel: int, stride: int, pad: int, *, groups: int = 1) -> str:
        inside = self.channels(x)
        std = math.sqrt(2.0 * stride * stride * groups / (inside * kernel * kernel))
        weight = self.weight((inside, out // groups, kernel, kernel), std)
        return self._node(
            "ConvTranspose",
            [x, weight, self.vector(out)],
            out,
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[pad] * 4,
            group=groups,
        )

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.integers(*shape), channels=shape[1])

    def transpose(self, x: str, *order: int) -> str:
        return self.op("Transpose", x, perm=list(order))

    def linear(self, x: str, features: int, out: int, gain: float = 1.0) -> str:
        """A dense layer over the last dimension, written as exporters of transformers do."""
        return self.op("Add", self.op("MatMul", x, self.matrix(features, out, gain=gain)), self.vector(out))

    def layer_norm(self, x: str, features: int) -> str:
        return self.op("LayerNormalization", x, self.vector(features, 1.0), self.vector(features), axis=-1)

    def gelu(self, x: str) -> str:
        gate = self.op("Erf", self.op("Mul", x, self.constant(math.sqrt(0.5))))
        return self.op("Mul", x, self.op("Mul", self.op("Add", gate, self.constant(1.0)), self.constant(0.5)))

    def squeeze_excite(self, x: str, hidden: int) -> str:
        pooled = self.op("GlobalAveragePool", x)
        gate = self.convolve(self.relu(self.convolve(pooled, hidden, (1, 1))), self.channels(x), (1, 1))
        return self.op("Mul", x, self.op("HardSigmoid", gate, alpha=1 / 6, beta=0.5))

    def resize(self, x: str, factor: float, mode: str) -> str:
        scales = self.constant([1, 1, factor, factor])
        extra = {"coordinate_transformation_mode": "half_pixel"}
        return self.op("Resize", x, "", scales, mode=mode, **extra)

    def quantise(self, x: str, scale: float) -> str:
        """To unsigned bytes and back."""
        by = self.constant(scale), self.constant(128, np.uint8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, *by), *by)

    def quantised_weight(self, shape: tuple[int, ...], fan_in: int) -> str:
        """Signed bytes with a scale, as weights of their own precision."""
        values = np.clip(np.rint(self._normal(shape, 40.0)), -127, 127)
        scale = self.constant(math.sqrt(2.0 / fan_in) / 40.0)
        return self.op(
            "DequantizeLinear", self.constant(values, np.int8), scale, self.constant(0, np.int8), channels=shape[0]
        )


def odd_channels(g: Layers, x: str) -> str:
    for out in (37, 53, 19):
        x = g.relu(g.convolve(x, out, (3, 3)))
    return x


def grouped(g: Layers, x: str) -> str:
    y = g.relu(g.convolve(x, 96, (1, 1)))
    y = g.relu(g.convolve(y, 96, (3, 3), groups=8))
    return g.relu(g.add(x, g.convolve(y, 112, (1, 1), gain=1.0)))


def dilated(g: Layers, x: str) -> str:
    for rate in (1, 2, 5):
        x = g.relu(g.convolve(x, 44, (3, 3), dilations=(rate, rate)))
    return x


def depthwise_5x5(g: Layers, x: str) -> str:
    for stride, out in ((1, 40), (2, 80)):
        y = g.op("HardSwish", g.convolve(x, 120, (1, 1)))
        y = g.op("HardSwish", g.convolve(y, 120, (5, 5), groups=120, strides=(stride, stride)))
        x = g.convolve(g.squeeze_excite(y, 32), out, (1, 1), gain=1.0)
    return x


def depthwise_dilated(g: Layers, x: str) -> str:
    x = g.relu6(g.convolve(x, 72, (3, 3), groups=72, dilations=(2, 2)))
    x = g.relu6(g.convolve(x, 50, (1, 1)))
    return g.relu6(g.convolve(x, 100, (3, 3), groups=50))


def convnext(g: Layers, x: str) -> str:
    """Depthwise 7x7, then dense layers over channels in the last place."""
    y = g.transpose(g.convolve(x, 48, (7, 7), groups=48), 0, 2, 3, 1)
    y = g.gelu(g.linear(g.layer_norm(y, 48), 48, 192, gain=2.0))
    return g.add(x, g.transpose(g.linear(y, 192, 48), 0, 3, 1, 2))


def rows_and_columns(g: Layers, x: str) -> str:
    for kernel in ((1, 7), (7, 1), (1, 3), (3, 1)):
        x = g.relu(g.convolve(x, 72, kernel))
    return x


def asymmetric_padding(g: Layers, x: str) -> str:
    """Padding as TensorFlow's SAME has it for even sizes, and more irregular."""
    x = g.relu(g.convolve(x, 32, (3, 3), strides=(2, 2), pads=(0, 0, 1, 1)))
    x = g.relu(g.convolve(x, 56, (4, 4), pads=(1, 1, 2, 2)))
    return g.relu(g.convolve(x, 40, (3, 5), strides=(2, 1), pads=(0, 3, 2, 1)))


def deconvolution(g: Layers, x: str) -> str:
    x = g.relu(g.deconvolve(x, 48, 4, 2, 1))
    x = g.relu(g.deconvolve(x, 20, 3, 2, 0))
    return g.op("Tanh", g.convolve(x, 3, (3, 3), gain=1.0))


def deconvolution_2x2(g: Layers, x: str) -> str:
    """A step of a U-Net: up, joined with what came before, convolved."""
    down = g.relu(g.convolve(g.max_pool(x, 2, stride=2), 64, (3, 3)))
    return g.relu(g.convolve(g.concat(x, g.deconvolve(down, 36, 2, 2, 0)), 36, (3, 3)))


def sub_pixel(g: Layers, x: str) -> str:
    """Super-resolution: 5x5, 3x3, then channels become pixels."""
    x = g.op("Tanh", g.convolve(x, 56, (5, 5), gain=1.0))
    x = g.op("Tanh", g.convolve(x, 28, (3, 3), gain=1.0))
    return g.op("DepthToSpace", g.convolve(x, 27, (3, 3), gain=1.0), blocksize=3, channels=3)


def resize_linear(g: Layers, x: str) -> str:
    low = g.relu(g.convolve(x, 42, (3, 3), strides=(2, 2)))
    up = g.resize(low, 2.0, "linear")
    return g.relu(g.convolve(g.concat(x, up), 24, (3, 3)))


def resize_nearest(g: Layers, x: str) -> str:
    """Two levels of a feature pyramid."""
    low = g.relu(g.convolve(x, 80, (3, 3), strides=(2, 2)))
    side = g.convolve(x, 80, (1, 1), gain=1.0)
    return g.relu(g.convolve(g.add(side, g.upsample(low, 2)), 60, (3, 3)))


def style(g: Layers, x: str) -> str:
    """Mirrored borders, 9x9 and instance norms."""
    x = g.op("Pad", x, g.integers(0, 0, 4, 4, 0, 0, 4, 4), mode="reflect")
    x = g.convolve(x, 30, (9, 9), pads=(0, 0, 0, 0))
    x = g.relu(g.op("InstanceNormalization", x, g.vector(30, 1.0), g.vector(30)))
    x = g.convolve(x, 30, (3, 3), gain=1.0)
    return g.op("InstanceNormalization", x, g.vector(30, 1.0), g.vector(30))


def group_norm(g: Layers, x: str) -> str:
    """As opset 17 writes it: an instance norm over the groups."""
    y = g.convolve(x, 64, (3, 3))
    y = g.op("InstanceNormalization", g.reshape(y, 1, 8, -1), g.constant(np.ones(8)), g.constant(np.zeros(8)))
    y = g.reshape(y, 1, 64, 26, 26)
    gamma, beta = (g.constant(1 + 0.1 * np.arange(64).reshape(64, 1, 1) / (i + 3)) for i in range(2))
    y = g.op("Add", g.op("Mul", y, gamma), beta)
    return g.op("Mul", y, g.op("Sigmoid", y))


def mlp(g: Layers, x: str) -> str:
    for size in (500, 300):
        x = g.relu(g.dense(x, size, gain=2.0))
    return g.op("Softmax", g.dense(x, 10), axis=-1)


def mlp_batch(g: Layers, x: str) -> str:
    x = g.op("Sigmoid", g.linear(x, 91, 233))
    x = g.op("Elu", g.linear(x, 233, 157, gain=2.0), alpha=1.0)
    return g.linear(x, 157, 7)


def attention(g: Layers, x: str) -> str:
    """Four heads over 65 tokens of 96."""
    heads = []
    for order in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        heads.append(g.transpose(g.reshape(g.linear(x, 96, 96), 1, 65, 4, 24), *order))
    scores = g.op("Mul", g.op("MatMul", heads[0], heads[1]), g.constant(1 / math.sqrt(24)))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), heads[2])
    joined = g.reshape(g.transpose(mixed, 0, 2, 1, 3), 1, 65, 96)
    return g.layer_norm(g.add(x, g.linear(joined, 96, 96)), 96)


def feed_forward(g: Layers, x: str) -> str:
    y = g.gelu(g.linear(g.layer_norm(x, 112), 112, 448, gain=2.0))
    return g.add(x, g.linear(y, 448, 112))


def mixer(g: Layers, x: str) -> str:
    """Dense layers over tokens, then over features."""
    y = g.transpose(g.layer_norm(x, 80), 0, 2, 1)
    y = g.transpose(g.linear(g.gelu(g.linear(y, 49, 100, gain=2.0)), 100, 49), 0, 2, 1)
    return g.add(x, g.linear(g.layer_norm(g.add(x, y), 80), 80, 80))


def sound(g: Layers, x: str) -> str:
    """One-dimensional convolutions that shrink a signal."""
    for out, kernel, stride in ((24, 9, 4), (48, 5, 2), (72, 3, 2)):
        x = g.relu(g.convolve(x, out, (kernel,), strides=(stride,)))
    return g.op("GlobalAveragePool", x)


def gated_sound(g: Layers, x: str) -> str:
    """One-dimensional, dilated, gated, causal."""
    for rate in (1, 2, 4):
        keep, gate = (g.convolve(x, 40, (3,), dilations=(rate,), pads=(2 * rate, 0), gain=1.0) for _ in range(2))
        y = g.op("Mul", g.op("Tanh", keep), g.op("Sigmoid", gate))
        x = g.add(x, g.convolve(y, 40, (1,), gain=1.0))
    return x


def volume(g: Layers, x: str) -> str:
    """Three-dimensional convolutions and a pool."""
    x = g.relu(g.convolve(x, 12, (3, 3, 3)))
    x = g.op("MaxPool", x, kernel_shape=[2, 2, 2], strides=[2, 2, 2])
    return g.relu(g.convolve(x, 28, (3, 3, 3)))


def clip(g: Layers, x: str) -> str:
    """Space first, then time, as networks for film do."""
    x = g.relu(g.convolve(x, 36, (1, 3, 3), strides=(1, 2, 2)))
    x = g.relu(g.convolve(x, 44, (3, 1, 1)))
    return g.op("GlobalAveragePool", x)


def pools(g: Layers, x: str) -> str:
    """Each kind of pool, and nothing that would hide it."""
    a = g.max_pool(x, 3, stride=2, pad=1)
    b = g.average_pool(x, 3, stride=2, pad=1)
    y = g.max_pool(g.add(a, b), 3, stride=2, ceil=True)
    y = g.op("AveragePool", y, kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2], count_include_pad=0)
    return g.concat(g.op("GlobalMaxPool", y), g.op("GlobalAveragePool", y))


def detector_head(g: Layers, x: str) -> str:
    """Scores and boxes at two scales, in one list."""
    lists = []
    for level in (x, g.relu(g.convolve(x, 64, (3, 3), strides=(2, 2)))):
        side = 19 if level == x else 10
        boxes, scores = (g.convolve(level, 6 * n, (3, 3), gain=1.0) for n in (4, 21))
        boxes = g.reshape(g.transpose(boxes, 0, 2, 3, 1), 1, side * side * 6, 4)
        scores = g.op("Softmax", g.reshape(g.transpose(scores, 0, 2, 3, 1), 1, side * side * 6, 21), axis=-1)
        lists.append(g.op("Concat", boxes, scores, axis=2))
    return g.concat(*lists)


def box_decoder(g: Layers, x: str) -> str:
    """What comes behind a detector: sigmoids, a grid added, exponentials."""
    x = g.reshape(g.convolve(x, 3 * 13, (1, 1), gain=1.0), 1, 3, 13, 20, 20)

    def take(begin: int, end: int) -> str:
        return g.op("Slice", x, g.integers(begin), g.integers(end), g.integers(2))

    grid = np.stack(np.meshgrid(np.arange(20), np.arange(20)))[None, None]
    centre = g.op("Mul", g.op("Add", g.op("Sigmoid", take(0, 2)), g.constant(grid)), g.constant(16.0))
    anchors = np.array([[10, 13], [16, 30], [33, 23]]).reshape(1, 3, 2, 1, 1)
    size = g.op("Mul", g.op("Exp", take(2, 4)), g.constant(anchors))
    joined = g.op("Concat", centre, size, g.op("Sigmoid", take(4, 13)), axis=2)
    return g.reshape(g.transpose(joined, 0, 1, 3, 4, 2), 1, 1200, 13)


def shuffle(g: Layers, x: str) -> str:
    """Half of the channels through a depthwise branch, then shuffled."""
    y = g.relu(g.convolve(g.take_channels(x, 58, 116), 58, (1, 1)))
    y = g.convolve(y, 58, (3, 3), groups=58, gain=1.0)
    y = g.concat(g.take_channels(x, 0, 58), g.relu(g.convolve(y, 58, (1, 1))))
    y = g.op("Transpose", g.reshape(y, 1, 2, 58, 28, 28), perm=[0, 2, 1, 3, 4])
    return g.reshape(y, 1, 116, 28, 28)


def dense_block(g: Layers, x: str) -> str:
    for _ in range(4):
        y = g.relu(g.batch_norm(x))
        x = g.concat(x, g.convolve(y, 18, (3, 3), gain=1.0))
    return g.average_pool(x, 2, stride=2)


def quantised(g: Layers, x: str) -> str:
    """Bytes between convolutions, as tools for quantisation leave them."""
    x = g.quantise(x, 0.03)
    for _ in range(2):
        weight = g.quantised_weight((48, 48, 3, 3), 48 * 9)
        x = g.relu(g.op("Conv", x, weight, g.vector(48), kernel_shape=[3, 3], pads=[1] * 4))
        x = g.quantise(x, 0.03)
    return g.op("GlobalAveragePool", x)


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """`tolerance`: how far outputs may be apart, as a share of the peak; roundings may fall to either side."""

    network: Callable[[Layers, str], str]
    shape: tuple[int, ...]
    tolerance: float = 1e-4

    @property
    def name(self) -> str:
        return self.network.__name__

    def build(self, seed: int = SEED) -> bytes:
        """The model as ONNX: the same bytes for the same seed."""
        layers = Layers(seed)
        end = self.network(layers, layers.input("x", self.shape))
        model = onnx.load_model_from_string(layers.finish(self.name, {"y": (end, None)}))
        model = onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=True)
        del model.graph.value_info[:]
        return bytes(model.SerializeToString(deterministic=True))


MODELS = {
    model.name: model
    for model in (
        SmallModel(odd_channels, (1, 3, 41, 41)),
        SmallModel(grouped, (1, 112, 28, 28)),
        SmallModel(dilated, (1, 12, 33, 33)),
        SmallModel(depthwise_5x5, (1, 40, 28, 28)),
        SmallModel(depthwise_dilated, (1, 72, 30, 30)),
        SmallModel(convnext, (1, 48, 28, 28)),
        SmallModel(rows_and_columns, (1, 72, 17, 17)),
        SmallModel(asymmetric_padding, (1, 3, 64, 64)),
        SmallModel(deconvolution, (1, 96, 12, 12)),
        SmallModel(deconvolution_2x2, (1, 36, 40, 40)),
        SmallModel(sub_pixel, (1, 1, 60, 60)),
        SmallModel(resize_linear, (1, 21, 40, 40)),
        SmallModel(resize_nearest, (1, 40, 26, 26)),
        SmallModel(style, (1, 3, 48, 48)),
        SmallModel(group_norm, (1, 32, 26, 26)),
        SmallModel(mlp, (1, 784)),
        SmallModel(mlp_batch, (33, 91)),
        SmallModel(attention, (1, 65, 96)),
        SmallModel(feed_forward, (1, 50, 112)),
        SmallModel(mixer, (1, 49, 80)),
        SmallModel(sound, (1, 1, 8000)),
        SmallModel(gated_sound, (1, 40, 500)),
        SmallModel(volume, (1, 2, 12, 28, 28)),
        SmallModel(clip, (1, 3, 8, 48, 48)),
        SmallModel(pools, (1, 64, 57, 57)),
        SmallModel(detector_head, (1, 64, 19, 19)),
        SmallModel(box_decoder, (1, 96, 20, 20)),
        SmallModel(shuffle, (1, 116, 28, 28)),
        SmallModel(dense_block, (1, 40, 20, 20)),
        SmallModel(quantised, (1, 48, 28, 28), tolerance=2e-2),
    )
}


def check() -> None:
    """Run every model in ONNX Runtime. Raises RuntimeError for an output that is not finite or does not vary."""
    for model in MODELS.values():
        data = model.build()
        onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        values = np.random.default_rng(SEED).standard_normal(model.shape).astype("float32")
        (output,) = session.run(None, {"x": values})
        if not np.isfinite(output).all() or output.std() < 1e-3:
            raise RuntimeError(f"{model.name}: outputs from {output.min():.3g} to {output.max():.3g}")
        _machine.say(f"{model.name}: {len(data):,} bytes, {model.shape} > {output.shape}, spread {output.std():.3g}")


if __name__ == "__main__":
    check()
