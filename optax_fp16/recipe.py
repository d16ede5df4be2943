"""The recipe: loss scale, one norm, clip, skip and masters, in the one right order and with one reduction."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ._devices import Axes
from ._inner import ApplyTransformation, checked_inner, init_inner
from ._messages import boolean, is_traced, shown, state_with
from ._reduce import global_norm, is_finite
from ._scalars import read_at_once
from ._tree import map_gradients, times, widened
from .clipping import ClipByGlobalNormState, checked_max_norm, clip_factor, clip_record, fresh_clip
from .loss_scale import LossScaleTransformation, dynamic_loss_scale, static_loss_scale
from .master_weights import master_weights
from .skipping import (
    SkipIfNonfiniteState,
    counted,
    fresh_guard,
    guarded_apply,
    guarded_update,
    refuse_inner_loss_scale,
)
from .underflow import watched


class MixedPrecisionState(NamedTuple):
    scale_state: Any  # DynamicLossScaleState or StaticLossScaleState
    clip_state: ClipByGlobalNormState
    guard_state: SkipIfNonfiniteState


class _Knobs(NamedTuple):
    inner: Any
    max_norm: Any
    scale: LossScaleTransformation
    axes: Axes


def mixed_precision(
    inner: Any,
    *,
    max_norm: float | None = None,
    loss_scale: Any = None,
    half_params: bool = False,
    axis_name: Any = None,
    sharded: Any = False,
) -> ApplyTransformation:
    """Everything that half-precision training needs around an optimizer, with one reduction over the gradients.

    ::

        norm = ||fp32(scaled gradients)|| / S               over every leaf and device; the only reduction
        if isfinite(norm):
            g = fp32(scaled gradients) · min(1, max_norm / norm) / S
            params, inner_state = inner(g)                  through fp32 masters, if half_params
        S = next(S, isfinite(norm))

    Args:
      inner: the optimizer, such as `optax.adamw(1e-4)`; it sees fp32 gradients and fp32 parameters.
      max_norm: clip the true gradients to this global norm; None: no clipping.
      loss_scale: None for `dynamic_loss_scale()`, a number for a static one, or `dynamic_loss_scale(...)` or
        `static_loss_scale(...)` with knobs of their own. 1.0 is for bf16 and fp32, which need none.
      half_params: keep fp32 masters of fp16 or bf16 parameters (`master_weights`).
      axis_name: the axis of `pmap` or `shard_map` (or a tuple of them) whose devices must agree.
      sharded: whether each device holds different shards of the gradients: a bool, or a tree of bools or PartitionSpecs.

    Returns:
      A transformation with `apply(grads, state, params) -> (params, state)` besides `init` and `update`; hand it the gradients
      of the scaled loss. Its state is a `MixedPrecisionState`.

    Raises:
      ValueError, TypeError: for a wrong argument, which the message names; ValueError from `init`, for a loss scale in `inner`.

    >>> import jax.numpy as jnp, optax
    >>> tx = mixed_precision(optax.sgd(1.0), max_norm=1.0, loss_scale=8.0)
    >>> params = jnp.array([1.0, 1.0])
    >>> params, state = tx.apply(jnp.array([24.0, 32.0]), tx.init(params), params)
    >>> print(params)
    [0.39999998 0.19999999]

    References:
      GluonNLP's `FP16Trainer`; Micikevicius et al., Mixed Precision Training, ICLR 2018.
    """
    inner = checked_inner(inner)
    if boolean("half_params", half_params):
        inner = master_weights(inner)
    limit = None if max_norm is None else checked_max_norm(max_norm)
    knobs = _Knobs(inner, limit, _scale_link(loss_scale), Axes(axis_name, sharded))

    def init(params: Any) -> MixedPrecisionState:
        inner_state = init_inner(inner, params)
        refuse_inner_loss_scale(inner_state)
        return MixedPrecisionState(knobs.scale.init(params), fresh_clip(), fresh_guard(inner_state))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return _step(guarded_update, knobs, updates, state, params, extra)

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return _step(guarded_apply, knobs, grads, state, params, extra)

    return ApplyTransformation(init, update, apply)


def _step(
    guarded: Any, knobs: _Knobs, grads: Any, state: MixedPrecisionState, params: Any, extra: Any
) -> tuple[Any, Any]:
    state = read_at_once(state_with("scale_state", state))
    scale = state.scale_state.loss_scale
    norm = global_norm(grads, knobs.axes) / scale
    finite = is_finite(norm)
    limit = jnp.inf if knobs.max_norm is None else knobs.max_norm
    factor = clip_factor(norm, limit)
    guard = state.guard_state

    def ready() -> Any:  # inside of the guard: before it, a CPU would write them to memory first
        # One multiplication, exact but for the clip when S is a power of two; XLA for CPU would write quotients to memory too.
        multiplier = read_at_once((1 if knobs.max_norm is None else factor) / scale)
        return map_gradients(lambda leaf: times(widened(leaf), multiplier), grads)

    new, inner_state = guarded(knobs.inner, finite, ready, guard.inner_state, params, extra)
    return new, MixedPrecisionState(
        watched(knobs.scale.adjust(state.scale_state, finite), grads, scale, knobs.axes),
        clip_record(norm, limit),
        counted(guard, inner_state, norm, finite),
    )


def _scale_link(loss_scale: Any) -> LossScaleTransformation:
    if loss_scale is None:
        return dynamic_loss_scale()
    if isinstance(loss_scale, LossScaleTransformation):
        return loss_scale
    if is_traced(loss_scale) or isinstance(loss_scale, (tuple, str, bool)) or callable(loss_scale):
        raise TypeError(
            "loss_scale must be None (dynamic), a number (static), or what dynamic_loss_scale(...) or static_loss_scale(...) "
            f"returns, not {shown(loss_scale)}."
        )
    try:
        return static_loss_scale(loss_scale)
    except (ValueError, TypeError) as error:
        raise type(error)(f"loss_scale as a number: {error}") from None
