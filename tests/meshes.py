"""The ways to run one function on several devices that the tests go through."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

# What older ones make of the same source has other counts, and for a GPU that isn't there they don't compile.
counts_programs = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="counts programs of JAX 0.10 and newer")

# By hand: the axes in which each device runs the program on its own arrays.
WAYS = ("pmap", "typed", "untyped")


def mesh(*sizes: int, names: tuple[str, ...] = ("data", "model"), kind: Any = AxisType.Auto) -> Mesh:
    """A mesh of the first devices, one axis for each size."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(kind,) * len(sizes))


def on_devices(way: str, function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`function` on the axis "data": every argument has the devices along its first axis, and so has every result."""
    if way == "pmap":
        return jax.pmap(function, "data", devices=jax.devices()[:count])

    def one(*args: Any) -> Any:
        results = function(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], results)

    spread = jax.shard_map(one, mesh=mesh(count), in_specs=P("data"), out_specs=P("data"), check_vma=way == "typed")
    return jax.jit(spread)


def stacked(values: Any, count: int) -> Any:
    """The same values on each of the devices."""
    return jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * count), values)
