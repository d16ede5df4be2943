"""The guard: a step is taken whole or not at all, by a flag, the way the backend likes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._devices import in_manual_axes
from ._messages import is_traced, shown
from ._tree import select

Tree = Any


def take_step(finite: jax.Array, step: Callable[[], Tree], stay: Callable[[Tree], Tree]) -> Tree:
    """`step()` if the flag holds, else `stay(shapes of what step gives)`, leaf by leaf bit-identical to one of them.

    A GPU reads and writes everything once either way, so there a select is free and a branch would cost a copy of all its
    operands. A CPU gains from not computing the step at all. On a device mesh by hand (`shard_map`, `pmap`) the step may hold
    collectives, which every device must reach, so it is a select there on any backend.

    Args:
      finite: bool[], the same on every device.
      step: makes the tree of an applied step.
      stay: makes the tree of a skipped one, alike in structure, shapes and dtypes.
    """
    if not is_traced(finite):
        return step() if finite else stay(_unplaced(jax.eval_shape(step)))

    if in_manual_axes():
        new = step()
        return select(finite, new, stay(new))

    shapes = []

    def taken() -> Tree:
        new = step()
        shapes.append(jax.tree.map(_shape, new))
        return new

    # One trace serves both: where the platform makes a flag a constant, XLA takes out the branch or the select.
    on_cpu = jax.lax.platform_dependent(cpu=lambda: jnp.bool_(True), default=lambda: jnp.bool_(False))
    new = jax.lax.cond(finite | ~on_cpu, taken, lambda: stay(shapes[0]))
    return select(finite | on_cpu, new, stay(shapes[0]))


def _shape(leaf: Any) -> Any:
    """What `jax.eval_shape` gives for a leaf."""
    if not isinstance(leaf, jax.Array):
        return leaf
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, sharding=kind.sharding if kind.sharding.mesh.explicit_axes else None
    )


def zeros_like(shapes: Tree) -> Tree:
    """Updates that change nothing, in the dtypes and shapes of those that an applied step would give."""
    made = {}  # in a trace one zero serves all leaves of its shape

    def zero(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return _zero(leaf)
        new = made[leaf] if leaf in made else _zero(leaf)
        if is_traced(new):
            made[leaf] = new
        return new

    return jax.tree.map(zero, shapes)


def _zero(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return leaf
    if dtype == jax.dtypes.float0:
        return np.zeros(leaf.shape, dtype)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _zero_key(leaf)
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return jnp.zeros_like(leaf)
    # On an Explicit mesh the type says how a leaf is sharded, and the zeros must have the same one.
    with jax.sharding.use_abstract_mesh(leaf.sharding.mesh.abstract_mesh):
        return jnp.zeros_like(leaf, device=leaf.sharding)


def _zero_key(leaf: Any) -> jax.Array:
    """A key of the leaf's kind: among updates it is no number to add, and only its type has to fit."""
    kinds = []

    def data(key: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    shape = jax.eval_shape(data, leaf)
    return jax.random.wrap_key_data(jnp.zeros(shape.shape, shape.dtype), impl=kinds[0])


def _unplaced(shapes: Tree) -> Tree:
    """Shapes without their shardings: outside of `jit` JAX places what it makes only inside of a mesh's context."""
    return jax.tree.map(
        lambda leaf: leaf.update(sharding=None) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, shapes
    )


def in_the_state_dtypes(new: Tree, old: Tree) -> Tree:
    """A new inner state in the structure and dtypes of the old one, so that it can be a scan's carry and a select's branch.

    Raises:
      TypeError: when the inner transformation changes its state's structure or shapes from step to step.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            "the inner transformation's update gives a state of another structure than its init, so a step can't be skipped "
            f"by keeping the old one: {shown(jax.tree.structure(old))} became {shown(jax.tree.structure(new))}."
        )
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    leaves = [
        leaf if _alike(leaf, before) else _in_dtype(leaf, before, lambda index=index: _path(old, index))
        for index, (leaf, before) in enumerate(pairs)
    ]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _path(tree: Tree, index: int) -> str:
    return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[index][0])


def _alike(new: Any, old: Any) -> bool:
    """Whether two arrays have one type, as most have."""
    if not isinstance(new, jax.Array) or not isinstance(old, jax.Array):
        return False
    kind = jax.typeof(old)
    return not kind.weak_type and jax.typeof(new) == kind


def _in_dtype(new: Any, old: Any, path: Callable[[], str]) -> Any:
    if not hasattr(old, "dtype") and not isinstance(old, (bool, int, float, complex)):
        return new
    if jnp.shape(new) != jnp.shape(old):
        raise TypeError(
            f"the inner transformation's state{path()} has shape {jnp.shape(old)} before the step and {jnp.shape(new)} after it, "
            "so a step can't be skipped by keeping the old one."
        )
    dtype = getattr(old, "dtype", None) or jnp.result_type(old)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return new
    return _placed_as(jnp.asarray(new).astype(dtype), old)


def _placed_as(new: Any, old: Any) -> Any:
    """On a mesh of Explicit axes, the array where its predecessor lies, which is a part of its type there."""
    where = jax.typeof(old).sharding if hasattr(old, "dtype") else None
    if where is None or where == jax.typeof(new).sharding or not where.mesh.explicit_axes:
        return new
    return jax.reshard(new, where if is_traced(new) else old.sharding)
