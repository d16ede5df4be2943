"""Which dimension of an array is split over the devices, as data that knows nothing of optimizers."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ._tree import is_gradient


class Split(NamedTuple):
    """How one array is spread over N devices: every device has `part` entries along dimension `dim`."""

    dim: int | None  # None: every device has the whole array
    length: int = 0  # entries along the dimension
    part: int = 0  # of them on each device, the last ones padding where N doesn't divide the length
    fold: int = 1  # into how many rows each of the array's was cut first; `length` counts them


WHOLE = Split(None)


def split_of(shape: Sequence[int], count: int, *, in_place: bool = False) -> Split:
    """The split that leaves least on each device; of equals, the one along the first dimension.

    Where N doesn't divide the first dimension but does divide its entries in runs, each row is cut into `fold` rows first: every
    device then has one stretch of the memory, and nothing is transposed to send it. Where no dimension divides, padding one
    costs `ceil(length / N)` rows on each device and leaving the array whole costs all of them, so only arrays of one entry stay
    whole.

    Args:
      shape: of the array.
      count: N.
      in_place: as a sharding splits: no cutting of rows and no padding.
    """
    if not in_place and (fold := _fold(shape, count)):
        length = shape[0] * fold
        return Split(0, length, length // count, fold)
    best, least = WHOLE, math.prod(shape)
    for dim, length in enumerate(shape):
        if not length or (in_place and length % count):
            continue
        part = -(-length // count)
        entries = math.prod(shape) // length * part
        if entries < least:
            best, least = Split(dim, length, part), entries
    return best


def _fold(shape: Sequence[int], count: int) -> int:
    """Into how many rows to cut each row, so that N divides their number; 0 where that isn't needed or can't be."""
    if len(shape) < 2 or not math.prod(shape) or not shape[0] % count:
        return 0
    fold = count // math.gcd(shape[0], count)
    # With N rows of each, a part would be as long as the array, and couldn't be told from one split along the other dimension.
    fold = 2 * fold if fold == count else fold
    return 0 if shape[1] % fold else fold


def folded(shape: Sequence[int], fold: int) -> tuple[int, ...]:
    """The array's shape after its rows were cut, which changes nothing in memory."""
    return (shape[0] * fold, shape[1] // fold, *shape[2:]) if fold > 1 else tuple(shape)


def unfolded(shape: Sequence[int], fold: int) -> tuple[int, ...]:
    """The inverse of `folded`."""
    return (shape[0] // fold, shape[1] * fold, *shape[2:]) if fold > 1 else tuple(shape)


def splits_of(tree: Any, count: int) -> list[Split]:
    """For each leaf of the tree, in order; leaves that aren't gradients stay whole."""
    return [split_of(leaf.shape, count) if is_gradient(leaf) else WHOLE for leaf in jax.tree.leaves(tree)]


def parts_of(tree: Any, count: int) -> Any:
    """The tree of shapes that one of `count` devices holds of a tree of arrays or shapes."""
    leaves, structure = jax.tree.flatten(tree)
    splits = splits_of(tree, count)
    return structure.unflatten([_part(leaf, split) for leaf, split in zip(leaves, splits, strict=True)])


def _part(leaf: Any, split: Split) -> Any:
    if split.dim is None:
        return leaf
    return jax.ShapeDtypeStruct(replaced(folded(leaf.shape, split.fold), split.dim, split.part), leaf.dtype)


def replaced(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def names_at(spec: PartitionSpec | None, dim: int) -> tuple[str, ...]:
    """The mesh axes over which a spec splits a dimension, the major one first."""
    part = spec[dim] if spec is not None and dim < len(spec) else None
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return part if isinstance(part, tuple) else (part,)


def spec_from(names: Sequence[Sequence[str]]) -> PartitionSpec:
    """A PartitionSpec from the axes at each dimension, without the trailing Nones that compare unequal."""
    parts: list[Any] = [tuple(each) or None for each in names]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
