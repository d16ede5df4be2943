"""The one reduction: the sum of squares over a tree and over devices, in fp32."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._devices import SPLIT_FROM, Axes, device_count, in_force, my_index, sum_over_devices
from ._lowering import mesh_is_shared, reduction_strategy
from ._tree import is_gradient, widened

# Entries of a half-precision leaf that are widened at a time on CPU: one chunk stays in the cache.
CHUNK = 32768

# Chunks between two visits to the running sums, which are twice a chunk's bytes. More would compile for longer.
UNROLL = 4

# Leaves that XLA for GPU reads as one array, and the entries below which a leaf is joined with others on CPU.
GROUP = 48
SMALL = 16384


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
    # In the order of the leaves: several processes must trace the same program, and a set's order differs between them.
    for shards in dict.fromkeys(shards for _, shards in parts):
        alike = everywhere - shards
        total = total + _counted_once([leaf for leaf, own in parts if own == shards], alike)
    return sum_over_devices(total, everywhere)


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


@jax.jit
def total_of(leaves: Sequence[Any]) -> jax.Array:
    """f32[]: the sum of squares of a device's own arrays, or of arrays that sharded `jit` keeps apart.

    Compiled for itself, so that a transformation that takes the norm of the same shapes again isn't traced again.
    """
    if mesh_is_shared(leaves) or (len(leaves) < 2 and not any(map(_is_fp16, leaves))):
        return _each(leaves)
    return jax.lax.switch(reduction_strategy(), (_each, _on_cpu, _on_gpu), leaves)


def _each(leaves: Sequence[Any]) -> jax.Array:
    return _added(map(_leaf_sum, leaves))


def _on_gpu(leaves: Sequence[Any]) -> jax.Array:
    """XLA's fusion swallows a concatenation of some tens of operands, so a group of leaves is one kernel, copied nowhere."""
    joined, alone = _joined(leaves, lambda leaf: True)
    return _added(_leaf_sum(jnp.concatenate(group)) for group in joined) + _each(alone)


def _on_cpu(leaves: Sequence[Any]) -> jax.Array:
    """Small leaves are joined, since each costs milliseconds to compile; fp16 is widened chunk by chunk."""
    joined, alone = _joined(leaves, lambda leaf: leaf.size < SMALL)
    whole = [jnp.concatenate(group) for group in joined] + alone
    return _added((_sum_in_chunks(leaf.reshape(-1)) if _is_fp16(leaf) else _leaf_sum(leaf)) for leaf in whole)


def _joined(leaves: Sequence[Any], small: Callable[[Any], bool]) -> tuple[list[list[Any]], list[Any]]:
    """Flat leaves of one dtype in groups of at most GROUP, and those that stay alone."""
    by_dtype: dict[Any, list[Any]] = {}
    alone = []
    for leaf in leaves:
        if small(leaf) and not jnp.iscomplexobj(leaf):
            by_dtype.setdefault(leaf.dtype, []).append(_flat(leaf))
        else:
            alone.append(leaf)
    groups = [flat[at : at + GROUP] for flat in by_dtype.values() for at in range(0, len(flat), GROUP)]
    return groups, alone


@jax.jit
def _sum_in_chunks(flat: jax.Array) -> jax.Array:
    """f32[]: the sum of squares of a flat fp16 array. XLA's CPU code for fp16 sums is 20 times slower than for fp32."""
    whole = flat.size // CHUNK
    # Without the barrier XLA would fuse the cast into the sum again.
    rest = _leaf_sum(jax.lax.optimization_barrier(widened(flat[whole * CHUNK :])))
    if not whole:
        return rest

    def squares(index: jax.Array | int) -> jax.Array:
        wide = jax.lax.dynamic_slice_in_dim(flat, index * CHUNK, CHUNK).astype(jnp.float32)
        return wide * wide

    # The loop starts from the first chunk, whose type says over which mesh axes the sums differ.
    sums = jax.lax.fori_loop(1, whole, lambda index, sums: sums + squares(index), squares(0), unroll=UNROLL)
    return jnp.sum(sums) + rest


def _added(sums: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jax.lax.add, sums, jnp.zeros((), jnp.float32))


def _flat(leaf: Any) -> Any:
    return leaf if leaf.ndim == 1 else jax.lax.reshape(leaf, (leaf.size,))


def _is_fp16(leaf: Any) -> bool:
    return leaf.dtype == jnp.float16


def _leaf_sum(leaf: Any) -> jax.Array:
    wide = widened(leaf)
    squares = jnp.real(wide * jnp.conj(wide)) if jnp.iscomplexobj(wide) else jax.lax.mul(wide, wide)
    return jax.lax.convert_element_type(jax.lax.reduce_sum(squares, range(squares.ndim)), jnp.float32)


def for_the_record(norm: jax.Array) -> jax.Array:
    """f32[]: the norm as a state keeps it: Inf when it isn't finite, since a NaN would set off `jax.debug_nans`."""
    return jnp.where(is_finite(norm), norm, jnp.float32(jnp.inf))


def is_finite(norm: jax.Array) -> jax.Array:
    """bool[]: whether the fp32 global norm, and so every gradient, is finite.

    By its bits: under fast-math flags a compiler may take every number for finite, and `isfinite` for True.
    """
    magnitude = jax.lax.bitcast_convert_type(norm, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return magnitude < jnp.int32(0x7F800000)


def global_norm(tree: Any, axes: Axes) -> jax.Array:
    """f32[]: the global norm of a tree over the devices that `axes` names."""
    return jnp.sqrt(sum_of_squares(tree, axes))
