"""Where an optimizer's state lies under sharded `jit`, so that the compiler does what the distributed optimizer does."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._devices import Axes
from ._layout import names_at, spec_from, split_of
from ._messages import is_traced, shown
from ._tree import is_gradient


def zero_shardings(tree: Any, mesh: Mesh, axis: Any) -> Any:
    """The sharding of every leaf with one of its dimensions split over the data-parallel devices besides what it has already.

    The dimension is the first whose length, on each device so far, the devices divide. A leaf without such a dimension keeps
    what it has. Place the state so, and the gradients too, and the compiler reduce-scatters gradients and gathers parameters::

        shardings = zero_shardings(jax.eval_shape(tx.init, params), mesh, "data")
        parts = zero_shardings(params, mesh, "data")
        state = jax.jit(tx.init, out_shardings=shardings)(params)

        def step(params, state, batch):
            grads = jax.lax.with_sharding_constraint(jax.grad(loss)(params, batch), parts)
            return apply_gradients(tx, grads, state, params)

        step = jax.jit(step, out_shardings=(where the params are, shardings), donate_argnums=(0, 1))

    (On a mesh of Explicit axes `jax.reshard` takes the place of `with_sharding_constraint`.) Norms stay those of whole arrays, so
    `optax.lamb` and the rest of Optax are right. Where parameters are split already, by tensor parallelism, `jax.eval_shape`
    doesn't know how; take the parameters' shardings for the state's::

        shardings = optax.tree.map_params(
            tx, lambda leaf, sharding: sharding, jax.eval_shape(tx.init, params), zero_shardings(params, mesh, "data"),
            transform_non_params=lambda leaf: NamedSharding(mesh, PartitionSpec()))

    Args:
      tree: arrays or shapes: an optimizer state, parameters or gradients. A leaf's own NamedSharding is kept and added to.
      mesh: the mesh.
      axis: its data-parallel axis, or a tuple of them.

    Returns:
      A tree of NamedShardings.

    Raises:
      ValueError, TypeError: for an axis that the mesh hasn't, or a leaf that lies on another mesh, by its path.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> placed = zero_shardings({"w": jnp.zeros((3, 4)), "step": jnp.zeros((), jnp.int32)}, mesh, "data")
    >>> print([len(placed[name].spec) for name in ("w", "step")], placed["w"].spec[1])
    [2, 0] data

    References:
      Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
    """
    names = Axes(axis).names
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, not {shown(mesh)}.")
    missing = [name for name in names if name not in mesh.shape]
    if missing or not names:
        raise ValueError(
            f"axis must name an axis of the mesh, one of {', '.join(map(repr, mesh.shape))}, not {shown(axis)}."
        )

    def place(path: Any, leaf: Any) -> NamedSharding:
        spec = _present(path, leaf, mesh)
        ndim = len(leaf.shape) if is_gradient(leaf) else 0
        held = [list(names_at(spec, dim)) for dim in range(ndim)]
        if not ndim or any(name in names for each in held for name in each):
            return NamedSharding(mesh, spec)
        local = [
            length // math.prod(mesh.shape[name] for name in each)
            for length, each in zip(leaf.shape, held, strict=True)
        ]
        split = split_of(local, math.prod(mesh.shape[name] for name in names), in_place=True)
        if split.dim is not None:
            held[split.dim] += names
        return NamedSharding(mesh, spec_from(held))

    return jax.tree_util.tree_map_with_path(place, tree)


def _present(path: Any, leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How a leaf is split so far."""
    sharding = getattr(jax.typeof(leaf) if is_traced(leaf) else leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return PartitionSpec()
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"the leaf{jax.tree_util.keystr(path)} lies on another mesh, {shown(sharding.mesh)}, than {shown(mesh)}; put the "
            "tree on the mesh first, by jax.device_put."
        )
    return sharding.spec
