"""One array of a distributed optimizer's state: whole, as a checkpoint holds it, and in the parts that the devices hold."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ._layout import Split, replaced
from ._messages import is_traced


class Place(NamedTuple):
    """One array of the state."""

    whole: jax.ShapeDtypeStruct
    spec: PartitionSpec
    split: Split  # over the data-parallel devices, of what they would hold without it
    blocks: tuple[int, ...]  # into how many of them other axes split each dimension

    def padding(self, count: int) -> int:
        """Entries to add along the dimension, in each block."""
        return self.split.part * count - self.split.length


def divisible(leaf: Any, place: Place, count: int) -> Any:
    """A whole array with its rows cut, or padded, as the devices hold it together."""
    dim, _, part, fold = place.split
    missing = place.padding(count)
    if dim is None or (fold == 1 and not missing):
        return leaf
    leaf = _together(leaf)
    if fold > 1:
        return _cut(leaf, dim, fold, place.blocks[dim + 1])
    blocks = _blocked(leaf, dim, place.blocks[dim])
    wide = jnp.pad(blocks, [(0, missing if each == dim + 1 else 0) for each in range(blocks.ndim)])
    return wide.reshape(replaced(leaf.shape, dim, place.blocks[dim] * part * count))


def restored(leaf: Any, place: Place, count: int) -> Any:
    """The inverse of `divisible`."""
    dim, length, _, fold = place.split
    if dim is None or (fold == 1 and not place.padding(count)):
        return leaf
    leaf = _together(leaf)
    if fold > 1:
        return _joined(leaf, dim, fold, place.blocks[dim + 1])
    blocks = _blocked(leaf, dim, place.blocks[dim])
    return jax.lax.slice_in_dim(blocks, 0, length, axis=dim + 1).reshape(place.whole.shape)


def _cut(leaf: Any, dim: int, fold: int, blocks: int) -> Any:
    """Every block's rows cut in `fold`; where no other axis splits the rows, what is in memory stays as it is."""
    before, (rows, length), after = leaf.shape[:dim], leaf.shape[dim : dim + 2], leaf.shape[dim + 2 :]
    pieces = jnp.reshape(leaf, (*before, rows, blocks, fold, length // blocks // fold, *after))
    return jnp.swapaxes(pieces, dim + 1, dim + 2).reshape(*before, rows * fold, length // fold, *after)


def _joined(leaf: Any, dim: int, fold: int, blocks: int) -> Any:
    """The inverse of `_cut`."""
    before, (rows, length), after = leaf.shape[:dim], leaf.shape[dim : dim + 2], leaf.shape[dim + 2 :]
    pieces = jnp.reshape(leaf, (*before, rows // fold, fold, blocks, length // blocks, *after))
    return jnp.swapaxes(pieces, dim + 1, dim + 2).reshape(*before, rows // fold, length * fold, *after)


def _together(leaf: Any) -> Any:
    """On a mesh of Explicit axes, the whole array on every device: JAX doesn't reshape there what lies in uneven pieces."""
    sharding = jax.typeof(leaf).sharding
    if sharding.is_fully_replicated:
        return leaf
    mesh = sharding.mesh if is_traced(leaf) else leaf.sharding.mesh
    return jax.reshard(leaf, NamedSharding(mesh, PartitionSpec()))


def _blocked(leaf: Any, dim: int, blocks: int) -> Any:
    return jnp.reshape(leaf, (*leaf.shape[:dim], blocks, leaf.shape[dim] // blocks, *leaf.shape[dim + 1 :]))


def stacked(leaf: Any, place: Place, count: int) -> Any:
    """As `pmap` holds it: the devices along a new first axis."""
    if place.split.dim is None:
        return jnp.stack([leaf] * count)
    return jnp.moveaxis(_blocked(leaf, place.split.dim, count), place.split.dim, 0)


def unstacked(leaf: Any, place: Place) -> Any:
    dim = place.split.dim
    if dim is None:
        return leaf[0]
    return jnp.moveaxis(leaf, 0, dim).reshape(replaced(leaf.shape[1:], dim, leaf.shape[0] * place.split.part))
