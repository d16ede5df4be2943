"""Where each array of a distributed optimizer's state lies, found by comparing shapes: no optimizer needs to be known."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._layout import WHOLE, Split, names_at, parts_of, replaced, spec_from
from ._messages import integer, shown
from ._state_parts import Place, divisible, restored, stacked, unstacked

Devices = Mesh | int


class StateBytes(NamedTuple):
    """What a state costs; see `distributed`."""

    whole: int  # of the state on one device without `distributed`
    per_device: int  # of a device's part
    padding: int  # in the parts of all devices together, where a dimension doesn't divide
    replicated: int  # in `per_device`, of arrays of one entry, which every device has


class StateLayout:
    """The layout of `init(params)` for parameters that `names` spread besides what `param_specs` say."""

    def __init__(self, init: Callable[[Any], Any], names: tuple[str, ...], param_specs: Any):
        self.init, self.names, self.param_specs = init, names, param_specs

    def specs(self, params: Any, mesh: Mesh) -> Any:
        structure, places, _ = self._places(params, mesh)
        return structure.unflatten([place.spec for place in places])

    def split(self, whole: Any, params: Any, devices: Devices) -> Any:
        structure, places, count = self._places(params, devices)
        leaves = _fitting(structure, whole, places)
        padded = [divisible(leaf, place, count) for leaf, place in zip(leaves, places, strict=True)]
        if isinstance(devices, Mesh):
            placed = [NamedSharding(devices, place.spec) for place in places]
            return structure.unflatten(jax.device_put(padded, placed))
        return structure.unflatten([stacked(leaf, place, count) for leaf, place in zip(padded, places, strict=True)])

    def whole(self, state: Any, params: Any, devices: Devices) -> Any:
        structure, places, count = self._places(params, devices)
        leaves = structure.flatten_up_to(state)
        if not isinstance(devices, Mesh):
            leaves = [unstacked(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
        return structure.unflatten([restored(leaf, place, count) for leaf, place in zip(leaves, places, strict=True)])

    def bytes(self, params: Any, devices: Devices) -> StateBytes:
        _, places, count = self._places(params, devices)
        whole = sum(_bytes(place.whole.shape, place.whole.dtype) for place in places)
        per_device = padding = replicated = 0
        for place in places:
            others = self._other_devices(place.spec, devices)
            local = _bytes(place.whole.shape, place.whole.dtype) // others
            if place.split.dim is None:
                replicated += local
                per_device += local
            else:
                row = local // place.split.length
                per_device += row * place.split.part
                padding += row * place.padding(count) * others
        return StateBytes(whole, per_device, padding, replicated)

    def _other_devices(self, spec: PartitionSpec, devices: Devices) -> int:
        names = [name for dim in range(len(spec)) for name in names_at(spec, dim) if name not in self.names]
        return math.prod(devices.shape[name] for name in names) if isinstance(devices, Mesh) else 1

    def _places(self, params: Any, devices: Devices) -> tuple[Any, list[Place], int]:
        """(structure of the state, place of each array, over how many devices it is split)."""
        sizes, count = self._sizes(devices)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
        specs = _specs_of(self.param_specs, params)
        local = _resized(params, specs, lambda name, length, path: _divided(length, sizes, name, path))
        whole, structure = jax.tree.flatten(jax.eval_shape(self.init, params))
        pairs = zip(
            jax.tree.leaves(jax.eval_shape(self.init, local)),
            jax.tree.leaves(jax.eval_shape(self.init, parts_of(local, count))),
            strict=True,
        )
        splits = [_split_between(*pair) for pair in pairs]
        others = list(dict.fromkeys(name for spec in specs for dim in range(len(spec)) for name in names_at(spec, dim)))
        grown = [self._grown(params, specs, name, whole) for name in others]
        places = []
        for leaf, split, dims in zip(
            whole, splits, zip(*grown, strict=True) if grown else [()] * len(whole), strict=True
        ):
            places.append(self._place(leaf, split, dict(zip(others, dims, strict=True)), sizes))
        return structure, places, count

    def _place(self, leaf: Any, split: Split, other_dims: dict[str, int | None], sizes: dict[str, int]) -> Place:
        names = [[name for name, own in other_dims.items() if own == each] for each in range(leaf.ndim)]
        blocks = tuple(math.prod(sizes[name] for name in each) for each in names)
        if split.dim is not None:
            names[split.dim] += self.names
        return Place(leaf, spec_from(names), split, blocks)

    def _grown(self, params: Any, specs: list[PartitionSpec], axis: str, whole: list[Any]) -> list[int | None]:
        """Along which dimension each array of the state follows what an axis splits: the one that grows with it."""
        grown = _resized(params, specs, lambda name, length, path: 2 * length if name == axis else length)
        return [
            next(iter(_differing(other, leaf)), None)
            for leaf, other in zip(whole, jax.tree.leaves(jax.eval_shape(self.init, grown)), strict=True)
        ]

    def _sizes(self, devices: Devices) -> tuple[dict[str, int], int]:
        if not isinstance(devices, Mesh):
            return dict.fromkeys(self.names, 1), integer("devices", devices, low=1)
        missing = [name for name in self.names if name not in devices.shape]
        if missing:
            raise ValueError(
                f"the mesh has no axis {missing[0]!r}: its axes are {', '.join(map(repr, devices.shape))}. distributed was made "
                f"for axis_name={shown(self.names)}."
            )
        return dict(devices.shape), math.prod(devices.shape[name] for name in self.names)


def _specs_of(param_specs: Any, params: Any) -> list[PartitionSpec]:
    """The PartitionSpec of each parameter, in order."""
    if param_specs is None:
        return [PartitionSpec()] * len(jax.tree.leaves(params))

    def is_spec(leaf: Any) -> bool:
        return isinstance(leaf, PartitionSpec)

    spread = jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), param_specs, params, is_leaf=is_spec)
    return jax.tree.leaves(spread, is_leaf=is_spec)


def _resized(params: Any, specs: list[PartitionSpec], resize: Callable[[str, int, str], int]) -> Any:
    """The parameters' shapes with `resize(axis, length, path)` where an axis splits a dimension."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    new = []
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        shape = leaf.shape
        for dim in range(len(shape)):
            for name in names_at(spec, dim):
                shape = replaced(shape, dim, resize(name, shape[dim], jax.tree_util.keystr(path)))
        new.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
    return structure.unflatten(new)


def _divided(length: int, sizes: dict[str, int], name: str, path: str) -> int:
    if name not in sizes:
        raise ValueError(f"param_specs{path} names the axis {name!r}; the mesh has {', '.join(map(repr, sizes))}.")
    if length % sizes[name]:
        raise ValueError(
            f"param_specs{path} splits {length} entries over the {sizes[name]} devices of {name!r}, unevenly."
        )
    return length // sizes[name]


def _split_between(local: Any, part: Any) -> Split:
    """How an array of the state is split, from its shapes without and with it."""
    dims = _differing(local, part)
    if not dims:
        return WHOLE
    dim, fold = dims[0], 1
    if len(dims) == 2:  # rows were cut, and the next dimension is as much shorter
        fold = local.shape[dims[1]] // part.shape[dims[1]]
    return Split(dim, local.shape[dim] * fold, part.shape[dim], fold)


def _differing(one: Any, other: Any) -> list[int]:
    """The dimensions along which two shapes differ."""
    return [dim for dim, pair in enumerate(zip(one.shape, other.shape, strict=True)) if pair[0] != pair[1]]


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _fitting(structure: Any, whole: Any, places: list[Place]) -> list[Any]:
    """The leaves of a whole state, after a look at their shapes."""
    leaves = structure.flatten_up_to(whole)
    for place, (path, leaf) in zip(places, jax.tree_util.tree_leaves_with_path(whole), strict=True):
        if jnp.shape(leaf) != place.whole.shape:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; in the whole state for these parameters it has "
                f"{place.whole.shape}. Divide what init gives outside of the step, or what whole_state gave."
            )
    return leaves
