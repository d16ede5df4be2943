"""The trees of arrays that are measured: BERT's, and even ones of a given size and number of leaves."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Shapes = list[tuple[int, ...]]


class Width(NamedTuple):
    hidden: int
    inner: int
    layers: int


BASE = Width(768, 3072, 12)
LARGE = Width(1024, 4096, 24)
VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2


def layer_shapes(width: Width) -> Shapes:
    """One encoder layer's 16 arrays: four projections, a norm, two dense layers, a norm, each with its bias."""
    hidden, inner = width.hidden, width.inner
    attention = [(hidden, hidden), (hidden,)] * 4
    dense = [(hidden, inner), (inner,), (inner, hidden), (hidden,)]
    norm = [(hidden,), (hidden,)]
    return [*attention, *norm, *dense, *norm]


def bert_shapes(width: Width, scanned: bool = False) -> Shapes:
    """BERT's arrays: 199 for the base width and 391 for the large one, or 23 with the layers stacked for a scan."""
    hidden = width.hidden
    embeddings: Shapes = [(VOCABULARY, hidden), (POSITIONS, hidden), (SEGMENTS, hidden), (hidden,), (hidden,)]
    layer = layer_shapes(width)
    layers = [(width.layers, *shape) for shape in layer] if scanned else layer * width.layers
    return [*embeddings, *layers, (hidden, hidden), (hidden,)]


def even_shapes(entries: int, leaves: int) -> Shapes:
    """A tree of `leaves` arrays: half of them as long as a bias, the rest matrices that share what is left."""
    small = leaves // 2
    bias = min(768, max(1, entries // (4 * leaves)))
    side = max(1, math.isqrt((entries - small * bias) // (leaves - small)))
    return [(side, side), (bias,)] * small + [(side, side)] * (leaves - 2 * small)


def entries_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def tree_of(shapes: Shapes, leaf: Any) -> dict[str, Any]:
    """The arrays as a tree with a path each, `leaf(index, shape)` making them."""
    return {f"w{index:04d}": leaf(index, shape) for index, shape in enumerate(shapes)}


def abstract(shapes: Shapes, dtype: Any, sharding: Any) -> dict[str, Any]:
    return tree_of(shapes, lambda _, shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


def drawn(shapes: Shapes, dtype: Any, seed: int, scale: float) -> dict[str, Any]:
    """Gaussian arrays, each in a buffer of its own; a block of random numbers over and over, which is quick to make."""
    block = scale * np.random.default_rng(seed).standard_normal(65537)
    return tree_of(shapes, lambda index, shape: jnp.array(np.resize(np.roll(block, index), shape), dtype))
