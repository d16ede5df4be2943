"""A step whose gradients aren't finite is skipped whole, and counted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._devices import Axes
from ._guard import in_the_state_dtypes, take_step, zeros_like
from ._inner import ApplyTransformation, apply_inner, apply_of, checked_inner, init_inner, kept_params, update_inner
from ._messages import state_with, transformation
from ._reduce import for_the_record, global_norm, is_finite
from ._scalars import read_at_once

_ORDER = """skip_if_nonfinite is around a loss scale, which it would freeze for ever: the overflow that must lower the scale
would be the step that is skipped. Put the loss scale outside:

    optax.chain(
        optax_fp16.dynamic_loss_scale(),
        optax_fp16.skip_if_nonfinite(optax.chain(optax_fp16.clip_by_global_norm_fp32(1.0), optax.adamw(1e-4))),
    )

or use optax_fp16.mixed_precision(optax.adamw(1e-4), max_norm=1.0), which is that order."""


class SkipIfNonfiniteState(NamedTuple):
    inner_state: Any  # the state of `inner`, bit-identical across a skipped step
    skipped_total: jax.Array  # i32[]: steps skipped in all
    skipped_in_a_row: jax.Array  # i32[]: steps skipped since the last one applied
    applied_total: jax.Array  # i32[]: steps applied in all
    grad_norm: jax.Array  # f32[]: the norm of the last gradients, as they came; Inf when it wasn't finite
    grads_finite: jax.Array  # bool[]: whether they were finite


def fresh_guard(inner_state: Any) -> SkipIfNonfiniteState:
    skipped, in_a_row, applied = (jnp.zeros((), jnp.int32) for _ in range(3))
    return SkipIfNonfiniteState(
        inner_state, skipped, in_a_row, applied, jnp.zeros((), jnp.float32), jnp.ones((), jnp.bool_)
    )


def counted(state: SkipIfNonfiniteState, inner_state: Any, norm: jax.Array, finite: jax.Array) -> SkipIfNonfiniteState:
    """The guard's state after a step."""
    increment = optax.safe_increment
    return SkipIfNonfiniteState(
        inner_state=inner_state,
        skipped_total=jnp.where(finite, state.skipped_total, increment(state.skipped_total)),
        skipped_in_a_row=jnp.where(finite, jnp.zeros((), jnp.int32), increment(state.skipped_in_a_row)),
        applied_total=jnp.where(finite, increment(state.applied_total), state.applied_total),
        grad_norm=for_the_record(norm),
        grads_finite=finite,
    )


def guarded_update(
    inner: Any, finite: jax.Array, ready: Callable[[], Any], inner_state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """(updates, inner state): the inner step's on the gradients that `ready` makes, or zeros and the state as it was."""

    def step() -> tuple[Any, Any]:
        updates, new_state = update_inner(inner, ready(), inner_state, params, extra)
        return updates, in_the_state_dtypes(new_state, inner_state)

    return take_step(finite, step, lambda shapes: (zeros_like(shapes[0]), inner_state))


def guarded_apply(
    inner: Any, finite: jax.Array, ready: Callable[[], Any], inner_state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """(params, inner state): after the inner step on the gradients that `ready` makes, or both as they were."""

    def step() -> tuple[Any, Any]:
        new_params, new_state = apply_inner(inner, ready(), inner_state, params, extra)
        return in_the_state_dtypes(new_params, params), in_the_state_dtypes(new_state, inner_state)

    return take_step(finite, step, lambda shapes: (kept_params(inner, inner_state, params), inner_state))


def refuse_inner_loss_scale(inner_state: Any) -> None:
    for path, _ in jax.tree_util.tree_leaves_with_path(inner_state):
        if any(getattr(key, "name", None) == "loss_scale" for key in path):
            raise ValueError(_ORDER)


def skip_if_nonfinite(inner: Any, *, axis_name: Any = None, sharded: Any = False) -> ApplyTransformation:
    """Skips a step whole when its gradients aren't finite: zero updates, and the state of `inner` untouched.

    ::

        norm = ||fp32(g)||  over every leaf and device
        if isfinite(norm):  updates, inner_state = inner.update(g, inner_state, params);  applied_total += 1
        else:               updates = 0;  skipped_total += 1;  skipped_in_a_row += 1

    It never gives up: no NaN is ever applied. Everything in `inner` stands still across a skipped step, bit for bit: moments,
    counts, schedules, accumulators, random keys. `inner` sees fp32 gradients, and fp32 parameters, and starts from those.

    Args:
      inner: the transformation to guard, such as `optax.adamw(1e-4)`; not one with a loss scale inside.
      axis_name: the axis of `pmap` or `shard_map` (or a tuple of them) whose devices must agree.
      sharded: whether each device holds different shards of the gradients: a bool, or a tree of bools or PartitionSpecs.

    Returns:
      A transformation with `apply(grads, state, params) -> (params, state)` besides `init` and `update`: the same step,
      parameters included, under one guard. Its state is a `SkipIfNonfiniteState`.

    Raises:
      TypeError: when inner isn't an Optax transformation.
      ValueError: from `init`, when there is a loss scale inside.

    >>> import jax.numpy as jnp, optax
    >>> tx = skip_if_nonfinite(optax.sgd(1.0))
    >>> params = jnp.array([1.0, 2.0])
    >>> state = tx.init(params)
    >>> params, state = tx.apply(jnp.array([0.5, jnp.nan]), state, params)
    >>> print(params, state.skipped_total, state.applied_total)
    [1. 2.] 1 0
    >>> params, state = tx.apply(jnp.array([0.5, 0.5]), state, params)
    >>> print(params, state.skipped_total, state.applied_total)
    [0.5 1.5] 1 1

    References:
      The overflow check of GluonNLP's `FP16Trainer`; unlike `optax.apply_if_finite` it never applies a NaN.
    """
    inner = checked_inner(inner)
    axes = Axes(axis_name, sharded)

    def init(params: Any) -> SkipIfNonfiniteState:
        inner_state = init_inner(inner, params)
        refuse_inner_loss_scale(inner_state)
        return fresh_guard(inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        state = read_at_once(state_with("skipped_total", state))
        norm = global_norm(updates, axes)
        finite = is_finite(norm)
        new, inner_state = guarded_update(inner, finite, lambda: updates, state.inner_state, params, extra)
        return new, counted(state, inner_state, norm, finite)

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        state = read_at_once(state_with("skipped_total", state))
        norm = global_norm(grads, axes)
        finite = is_finite(norm)
        params, inner_state = guarded_apply(inner, finite, lambda: grads, state.inner_state, params, extra)
        return params, counted(state, inner_state, norm, finite)

    return ApplyTransformation(init, update, apply)


def apply_gradients(tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """Updates and applies in one guarded step, the fastest way for each backend.

    ``tx.apply(grads, opt_state, params)`` where `tx` has it (`skip_if_nonfinite`, `mixed_precision`), else ``tx.update`` and
    `optax.apply_updates`. Donate params and state to the compiled step, and return them in the order they came in.

    Args:
      tx: any Optax transformation.
      grads: gradients of the scaled loss, if `tx` has a loss scale.
      opt_state: from `tx.init(params)`.
      params: the parameters.
      **extra: passed on to `tx`.

    Returns:
      (params, opt_state), both as they were if the step was skipped, but for the counters and the scale.

    Raises:
      TypeError: when tx isn't an Optax transformation.

    >>> import jax.numpy as jnp, optax
    >>> tx = skip_if_nonfinite(optax.sgd(0.5))
    >>> params, state = apply_gradients(tx, jnp.array([1.0]), tx.init(jnp.array([1.0])), jnp.array([1.0]))
    >>> print(params)
    [0.5]
    """
    return apply_of(transformation("tx", tx))(grads, opt_state, params, **extra)
