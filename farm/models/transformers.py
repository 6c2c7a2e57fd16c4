"""Transformers: ViT-B/16 (arXiv 2010.11929) as torchvision has it, BERT base (arXiv 1810.04805) as its authors do."""

from __future__ import annotations

from farm.models.onnx_builder import GraphBuilder

_WIDTH, _HEADS, _LAYERS, _INNER = 768, 12, 12, 3072
_VOCABULARY, _POSITIONS, _TOKENS = 30_522, 512, 128
# Of what is added to a sum at every layer: kept small, or the sum grows with depth.
_ADDED = 0.25


def vit_b16(g: GraphBuilder, x: str) -> str:
    """ViT-B/16 on (1, 3, 224, 224), 1000 classes, before any softmax."""
    x = g.conv(x, _WIDTH, 16, stride=16, gain=1.0)
    x = g.transpose(g.reshape(x, (0, _WIDTH, 196), 196), (0, 2, 1), _WIDTH)
    # The class token is the first row; writing it into zeros keeps the graph free of the batch size.
    x = g.pad(x, (0, 1, 0), (0, 0, 0))
    x = g.add(x, g.pad(g.weight((1, 1, _WIDTH), 0.5), (0, 0, 0), (0, 196, 0)))
    x = g.add(x, g.weight((1, 197, _WIDTH), 0.5))
    for _ in range(_LAYERS):
        x = g.add(x, _attend(g, g.layer_norm(x, epsilon=1e-6)))
        x = g.add(x, _feed_forward(g, g.layer_norm(x, epsilon=1e-6)))
    return g.dense(g.rows(g.layer_norm(x, epsilon=1e-6), 0, _WIDTH, axis=1), 1000)


def bert_base(g: GraphBuilder, x: str) -> tuple[str, str]:
    """BERT base, uncased, on (1, 128) numbers of words, one text without padding: all hidden states, and one pooled."""
    words = g.rows(g.weight((_VOCABULARY, _WIDTH), 1.0), x, _WIDTH)
    positions = g.rows(g.weight((_POSITIONS, _WIDTH), 0.5), range(_TOKENS), _WIDTH)
    # All words are of the first text; the second one's row is there as in the published table.
    texts = g.rows(g.weight((2, _WIDTH), 0.5), [0] * _TOKENS, _WIDTH)
    x = g.layer_norm(g.add(g.add(words, texts), positions), epsilon=1e-12)
    for _ in range(_LAYERS):
        x = g.layer_norm(g.add(_attend(g, x), x), epsilon=1e-12)
        x = g.layer_norm(g.add(_feed_forward(g, x), x), epsilon=1e-12)
    first = g.rows(x, 0, _WIDTH, axis=1)
    return g.unary("Identity", x), g.unary("Tanh", g.dense(first, _WIDTH))


def _attend(g: GraphBuilder, x: str) -> str:
    """Self-attention of several heads, each with its share of the features."""
    each = _WIDTH // _HEADS
    query, key, value = (g.reshape(g.linear(x, _WIDTH), (0, 0, _HEADS, each), each) for _ in range(3))
    # Scaled before the product, which has more elements.
    query = g.scale(g.transpose(query, (0, 2, 1, 3), each), each**-0.5)
    scores = g.matmul(query, g.transpose(key, (0, 2, 3, 1), each), each)
    mixed = g.matmul(g.unary("Softmax", scores, axis=-1), g.transpose(value, (0, 2, 1, 3), each), each)
    return g.linear(g.reshape(g.transpose(mixed, (0, 2, 1, 3), each), (0, 0, _WIDTH), _WIDTH), _WIDTH, gain=_ADDED)


def _feed_forward(g: GraphBuilder, x: str) -> str:
    return g.linear(g.gelu(g.linear(x, _INNER)), _WIDTH, gain=_ADDED)
