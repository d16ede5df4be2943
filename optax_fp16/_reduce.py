"""The one reduction: the sum of squares over a tree and over devices, in fp32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._devices import SPLIT_FROM, Axes, device_count, in_force, my_index
from ._tree import is_gradient, wide_dtype, widened

# Entries of a half-precision leaf that are widened at a time on CPU: one chunk stays in the cache.
CHUNK = 65536


def sum_of_squares(tree: Any, axes: Axes) -> jax.Array:
    """f32[]: the sum of |x|² over every gradient of the tree, wherever its shards are; 0 for an empty tree.

    One vector of one number goes over the devices. A part that several devices hold alike is split between them when it
    is large, and else counted by the first of them alone, so that nothing counts twice.
    """
    axes = in_force(axes)
    leaves = [widened(leaf) if isinstance(leaf, (float, complex)) else leaf for leaf in jax.tree.leaves(tree)]
    spread = axes.of_leaves(tree)
    parts = [(leaf, shards) for leaf, shards in zip(leaves, spread, strict=True) if is_gradient(leaf) and leaf.size]
    everywhere = frozenset(axes.names).union(*(shards for _, shards in parts))
    if not everywhere:
        return total_of([leaf for leaf, _ in parts])
    total = jnp.zeros((), jnp.float32)
    for shards in {shards for _, shards in parts}:
        alike = everywhere - shards
        total = total + _counted_once([leaf for leaf, own in parts if own == shards], alike)
    return jax.lax.psum(total, tuple(sorted(everywhere)))


def _counted_once(leaves: list[Any], alike: frozenset[Any]) -> jax.Array:
    """This device's part of the sum over leaves that the devices along `alike` all hold."""
    count = device_count(alike)
    if count == 1:
        return total_of(leaves)
    index = my_index(alike)
    split = [leaf for leaf in leaves if leaf.size >= max(SPLIT_FROM, count)]
    shares, rests = [], [leaf for leaf in leaves if leaf.size < max(SPLIT_FROM, count)]
    for leaf in split:
        share = leaf.size // count
        flat = leaf.reshape(-1)
        shares.append(jax.lax.dynamic_slice_in_dim(flat, index * share, share))
        rests.append(flat[share * count :])
    # The first device alone counts what isn't split; all compute it, which costs less than a branch.
    alone = jnp.where(index == 0, total_of(rests), jnp.zeros((), jnp.float32))
    return total_of(shares) + alone


def total_of(leaves: Sequence[Any]) -> jax.Array:
    """f32[]: the sum of squares of whole local arrays, or of arrays that sharded `jit` keeps apart."""
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        total = total + _leaf_sum(leaf)
    return total


def _leaf_sum(leaf: Any) -> jax.Array:
    wide = leaf.astype(wide_dtype(leaf.dtype))
    squares = jnp.real(wide * jnp.conj(wide)) if jnp.iscomplexobj(wide) else wide * wide
    return jnp.sum(squares).astype(jnp.float32)


def for_the_record(norm: jax.Array) -> jax.Array:
    """f32[]: the norm as a state keeps it: Inf when it isn't finite, since a NaN would set off `jax.debug_nans`."""
    return jnp.where(is_finite(norm), norm, jnp.float32(jnp.inf))


def is_finite(norm: jax.Array) -> jax.Array:
    """bool[]: whether the fp32 global norm, and so every gradient, is finite."""
    return jnp.isfinite(norm)


def global_norm(tree: Any, axes: Axes) -> jax.Array:
    """f32[]: the global norm of a tree over the devices that `axes` names."""
    return jnp.sqrt(sum_of_squares(tree, axes))
