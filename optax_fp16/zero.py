"""The distributed optimizer (ZeRO): each device updates its part of every parameter and keeps its part of the state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._collectives import gathered, own_part, scattered_mean
from ._devices import Axes, Both, all_bound, shards_declared
from ._elementwise import REFUSAL, WholeArrayError, whole_array_computations
from ._inner import ApplyTransformation, apply_inner, checked_inner, init_inner, keeps_masters, update_inner
from ._layout import Split, splits_of
from ._messages import floating_dtype
from ._state_layout import StateBytes, StateLayout
from ._tree import is_gradient, to_fp32, wide_dtype, widened


class DistributedTransformation(ApplyTransformation):
    """What `distributed` returns: a transformation, and what places, saves and measures its state from outside of the step."""

    layout: StateLayout

    def state_specs(self, params: Any, mesh: jax.sharding.Mesh) -> Any:
        """The state's `PartitionSpec`s, for `shard_map`'s in_specs and out_specs.

        Args:
          params: the parameters, whole, or their shapes.
          mesh: with the axis in it.
        """
        return self.layout.specs(params, mesh)

    def split_state(self, whole: Any, params: Any, devices: jax.sharding.Mesh | int) -> Any:
        """The state for a number of devices from a whole one, which `init` gives outside of the step and checkpoints hold.

        Args:
          whole: the state for whole parameters.
          params: the parameters, whole, or their shapes.
          devices: the mesh of `shard_map`, on which the state is placed; or a number, for the stacked arrays of `pmap`.
        """
        return self.layout.split(whole, params, devices)

    def whole_state(self, state: Any, params: Any, devices: jax.sharding.Mesh | int) -> Any:
        """The inverse of `split_state`: the same whatever the number of devices, and so what to write in a checkpoint.

        Under `shard_map` the arrays stay where they are; only those that had to be cut or padded are computed anew.
        """
        return self.layout.whole(state, params, devices)

    def state_bytes(self, params: Any, devices: jax.sharding.Mesh | int) -> StateBytes:
        """What the state costs, by arithmetic on shapes: on each device, as padding, and left replicated."""
        return self.layout.bytes(params, devices)


class _Knobs(NamedTuple):
    inner: Any
    names: tuple[Any, ...]
    transport: Any
    others: Axes
    accepted: set[Any]  # the kinds of trees for which `inner` was seen to work entry by entry


def distributed(
    inner: Any, axis_name: Any, *, transport: Any = None, param_specs: Any = None
) -> DistributedTransformation:
    """Spreads the optimizer over the data-parallel devices (ZeRO): 1/N of moments and masters on each, for the same step.

    ::

        g      = this device's part of the mean of the gradients over the devices     (reduce-scatter, in `transport`)
        p, s   = inner(g, s, this device's part of the parameters)                    (norms inside: one scalar all-reduce)
        params = every device's p                                                     (all-gather, in the parameters' dtype)

    Every array is split in parts that keep its rank and its place in the tree, so that weight-decay masks go on working: along
    its first dimension if the devices divide it or pieces of its rows, else along another. It goes outermost, so that a loss
    scale, the clip and the skip inside of it see the mean gradients, and take their norm over all devices whatever axis they
    name themselves::

        tx = distributed(mixed_precision(optax.adamw(1e-4), max_norm=1.0, half_params=True), "data", transport=jnp.float16)

    Inside `pmap` and `shard_map` `init` gives this device's part of the state. Outside it gives the whole one, which is what a
    checkpoint holds and what `split_state` divides.

    Args:
      inner: an optimizer that works entry by entry, such as `optax.adamw(1e-4)`, alone or in this package's wrappers.
      axis_name: the data-parallel axis of `pmap` or `shard_map`, or a tuple of them.
      transport: what gradients travel in: None for fp32, or `jnp.float16` or `jnp.bfloat16` for half the traffic. For fp16 keep
        the loss scale inside, so that what travels is scaled.
      param_specs: a tree of PartitionSpecs (a prefix of the parameters') over the mesh's other axes, where parameters are split
        by tensor or pipeline parallelism already.

    Returns:
      A transformation with `apply` besides `init` and `update`, and with `state_specs`, `split_state`, `whole_state` and
      `state_bytes`. Hand `update` or `apply` each device's own gradients: where `shard_map` types its axes, differentiate by
      `jax.lax.pcast(params, axis_name, to="varying")`, since JAX would sum them before you see them otherwise. Its state is that
      of `inner`.

    Raises:
      TypeError, ValueError: for a wrong argument; ValueError from `init`, when `inner` computes over whole arrays, as
        `optax.lamb` and `optax.clip_by_global_norm` do; from `update`, outside of the axis or with a whole state.

    >>> import jax, jax.numpy as jnp, numpy as np, optax
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> tx = distributed(optax.sgd(0.5, momentum=0.9), "data")
    >>> params = jnp.zeros(4)
    >>> specs = tx.state_specs(params, mesh)
    >>> state = tx.split_state(tx.init(params), params, mesh)
    >>> print(tx.state_bytes(params, mesh))
    StateBytes(whole=16, per_device=8, padding=0, replicated=0)
    >>> step = jax.shard_map(tx.apply, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
    >>> params, state = jax.jit(step)(jnp.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]), state, params)
    >>> print(params)
    [-1. -1. -1. -1.]

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (stage 1 and, as the
      gradients are reduced into parts, 2); Megatron-LM's distributed optimizer.
    """
    inner = checked_inner(inner)
    names = Axes(axis_name).names
    if not names:
        raise ValueError("axis_name must name the data-parallel axis, such as 'data'; it is empty.")
    travelling = None if transport is None else floating_dtype("transport", transport)
    others = Axes(None, False if param_specs is None else param_specs, called="param_specs")
    knobs = _Knobs(inner, names, travelling, others, set())
    layout = StateLayout(lambda params: init_inner(inner, params), names, param_specs)

    def init(params: Any) -> Any:
        if all_bound(names):
            return init_inner(inner, _own(params, splits_of(params, jax.lax.axis_size(names)), names))
        _refuse_early(knobs, params)
        return init_inner(inner, params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return _step(knobs, _updates, updates, state, params, extra)

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return _step(knobs, _params, grads, state, params, extra)

    tx = DistributedTransformation(init, update, apply)
    tx.layout = layout
    return tx


def _step(
    knobs: _Knobs, finish: Callable[..., Any], grads: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    Axes(knobs.names).check_bound()
    count = jax.lax.axis_size(knobs.names)
    splits = splits_of(grads, count)
    parts = _map(lambda leaf, split: scattered_mean(leaf, split, knobs.names, knobs.transport), grads, splits)
    own = None if params is None else _own(params, splits_of(params, count), knobs.names)
    _check_state(knobs, state, parts if own is None else own)
    spread = jax.tree.unflatten(jax.tree.structure(grads), [split.dim is not None for split in splits])
    with shards_declared(Both(Axes(knobs.names, spread), knobs.others)):
        _refuse_whole_arrays(knobs, _kind(grads, extra), parts, state, own, extra)
        return finish(knobs, splits, parts, state, params, own, extra)


def _params(
    knobs: _Knobs, splits: list[Split], parts: Any, state: Any, params: Any, own: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    new, state = apply_inner(knobs.inner, parts, state, own, extra)
    return _whole(new, splits_of(params, jax.lax.axis_size(knobs.names)), knobs.names), state


def _updates(
    knobs: _Knobs, splits: list[Split], parts: Any, state: Any, params: Any, own: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    updates, new_state = update_inner(knobs.inner, parts, state, own, extra)
    if not keeps_masters(state):
        return _whole(updates, splits, knobs.names), new_state

    def gather(update: Any, split: Split, part: Any, param: Any) -> Any:
        if param.dtype == wide_dtype(param.dtype):
            return gathered(update, split, knobs.names)
        # The rounded masters travel, in half precision; the difference to the parameters is exact on every device.
        new = (widened(part) + update).astype(param.dtype)
        return widened(gathered(new, split, knobs.names)) - widened(param)

    return _map(gather, updates, splits, own, params), new_state


def _own(tree: Any, splits: list[Split], names: tuple[Any, ...]) -> Any:
    return _map(lambda leaf, split: own_part(leaf, split, names), tree, splits)


def _whole(tree: Any, splits: list[Split], names: tuple[Any, ...]) -> Any:
    return _map(lambda leaf, split: gathered(leaf, split, names), tree, splits)


def _map(function: Callable[..., Any], tree: Any, splits: list[Split], *rest: Any) -> Any:
    """The tree with `function(leaf, split, *others)` for the leaves that are gradients or parameters."""
    leaves, structure = jax.tree.flatten(tree)
    columns = zip(leaves, splits, *(jax.tree.leaves(other) for other in rest), strict=True)
    return structure.unflatten([function(*each) if is_gradient(each[0]) else each[0] for each in columns])


def _check_state(knobs: _Knobs, state: Any, own: Any) -> None:
    """Refuse a state that isn't this device's part."""
    right = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda tree: init_inner(knobs.inner, tree), own))
    given = jax.tree.leaves(state)
    for (path, leaf), other in zip(right, given, strict=False):  # another structure is for Optax to complain of
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} has shape {jnp.shape(other)}; this device's part has {jnp.shape(leaf)}. Make "
                "the state by init inside of the pmap or shard_map, or divide a whole one: tx.split_state(state, params, mesh), "
                "with tx.state_specs(params, mesh) as shard_map's in_specs and out_specs for it."
            )


def _refuse_whole_arrays(
    knobs: _Knobs, kind: Any, parts: Any, state: Any, own: Any, extra: dict[str, Any], axis_env: Any = None
) -> None:
    """Refuse an `inner` that isn't for parts; once for a kind of tree, since it takes as long as the step's own trace."""
    if kind in knobs.accepted:
        return

    def update(grads: Any, state: Any, params: Any) -> Any:
        return update_inner(knobs.inner, grads, state, params, extra)

    if found := whole_array_computations(update, knobs.names, parts, state, own, axis_env=axis_env):
        raise WholeArrayError(REFUSAL.format(what=", ".join(found)))
    knobs.accepted.add(kind)


def _kind(tree: Any, extra: dict[str, Any]) -> Any:
    """What decides how `inner` computes, and can be compared."""
    return jax.tree.structure(tree), tuple(map(jnp.shape, jax.tree.leaves(tree))), frozenset(extra)


def _refuse_early(knobs: _Knobs, params: Any) -> None:
    """Refuse at `init` already, where `inner` can be traced with nothing but parameters: its first step looks again."""
    try:
        shapes = jax.eval_shape(to_fp32, params)
        state = jax.eval_shape(lambda tree: init_inner(knobs.inner, tree), params)
        with shards_declared(Axes(knobs.names)):
            env = [(name, 2) for name in knobs.names]
            _refuse_whole_arrays(knobs, _kind(params, {}), shapes, state, shapes, {}, env)
    except WholeArrayError:
        raise
    except Exception:  # it needs other axes, or more arguments, or params stands for something else
        return
