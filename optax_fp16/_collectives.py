"""What travels between the devices of the distributed optimizer, leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp

from ._devices import axes_are_typed, varying_axes
from ._layout import Split, folded, replaced, unfolded
from ._transport import arrived, to_travel
from ._tree import widened

# JAX 0.10 gathers into a value that the types know to be the same on every device; before, only a psum does.
_GATHERS_INVARIANT = jax.__version_info__ >= (0, 10)


def scattered_mean(leaf: jax.Array, split: Split, names: tuple[Any, ...], dtype: Any) -> jax.Array:
    """f32: this device's part of the mean over devices of a gradient, which travels in `dtype` (None: fp32)."""
    if not varying_axes(leaf) & set(names) and axes_are_typed(names[0]):
        # Its type says that it is the same everywhere, so it is its own mean.
        return own_part(widened(leaf), split, names)
    count = jax.lax.axis_size(names)
    # fp32 is divided after it has travelled, in the update's own pass: before, a GPU would write every gradient once more. A sum
    # of fp32 gradients overflows only where their squares have long before.
    travelling = widened(leaf) if dtype is None else to_travel(leaf, count, dtype)
    if split.dim is None:
        total = jax.lax.psum(travelling, names)
    else:
        padded = _divisible(travelling, split, count)
        total = jax.lax.psum_scatter(padded, names, scatter_dimension=split.dim, tiled=True)
    return total / count if dtype is None else arrived(total)


def own_part(leaf: jax.Array, split: Split, names: tuple[Any, ...]) -> jax.Array:
    """This device's part of an array that every device has."""
    if split.dim is None:
        return leaf
    padded = _divisible(leaf, split, jax.lax.axis_size(names))
    start = jnp.asarray(jax.lax.axis_index(names), jnp.int32) * split.part
    return jax.lax.dynamic_slice_in_dim(padded, start, split.part, axis=split.dim)


def gathered(part: jax.Array, split: Split, names: tuple[Any, ...]) -> jax.Array:
    """The whole array from every device's part, the same on every device, and known by its type to be."""
    if split.dim is None:
        return part
    if not axes_are_typed(names[0]):
        whole = jax.lax.all_gather(part, names, axis=split.dim, tiled=True)
    elif _GATHERS_INVARIANT:
        whole = jax.lax.all_gather(part, names, axis=split.dim, tiled=True, to="invarying")
    else:
        whole = _gathered_by_sum(part, split, names)
    whole = jax.lax.slice_in_dim(whole, 0, split.length, axis=split.dim)
    return whole.reshape(unfolded(whole.shape, split.fold))


def _gathered_by_sum(part: jax.Array, split: Split, names: tuple[Any, ...]) -> jax.Array:
    count, dim = jax.lax.axis_size(names), split.dim or 0
    start = jnp.asarray(jax.lax.axis_index(names), jnp.int32) * split.part
    zeros = jnp.zeros(replaced(part.shape, dim, split.part * count), part.dtype)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, part, start, axis=dim), names)


def _divisible(leaf: jax.Array, split: Split, count: int) -> jax.Array:
    """The array with its rows cut, or padded, so that the devices divide the dimension along which it is split."""
    leaf = leaf.reshape(folded(leaf.shape, split.fold))
    missing = split.part * count - split.length
    if not missing:
        return leaf
    return jnp.pad(leaf, [(0, missing if dim == split.dim else 0) for dim in range(leaf.ndim)])
