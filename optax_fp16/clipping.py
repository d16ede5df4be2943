"""Clipping to a global norm that is accumulated in fp32, whatever the dtypes of the gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._devices import Axes
from ._messages import is_traced, number
from ._reduce import for_the_record, global_norm, is_finite
from ._tree import map_gradients, times, widened


class ClipByGlobalNormState(NamedTuple):
    norm_before_clip: jax.Array  # f32[]: the norm of the last gradients, as they came; Inf when it wasn't finite
    clip_ratio: jax.Array  # f32[]: what they were divided by: max(1, norm / max_norm); Inf when the norm is


def fresh_clip() -> ClipByGlobalNormState:
    return ClipByGlobalNormState(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))


def clip_record(norm: jax.Array, max_norm: Any) -> ClipByGlobalNormState:
    """The clip's state after a step."""
    kept = for_the_record(norm)
    return ClipByGlobalNormState(kept, clip_ratio_of(kept, max_norm))


def clip_ratio_of(norm: jax.Array, max_norm: Any) -> jax.Array:
    """f32[]: max(1, norm / max_norm), Inf or NaN when the norm is."""
    limit = jnp.asarray(max_norm, jnp.float32)
    ratio = jnp.where(norm > limit, norm / limit, jnp.float32(1))
    return jnp.where(is_finite(norm), ratio, norm)


def clip_factor(norm: jax.Array, max_norm: Any) -> jax.Array:
    """f32[]: what to multiply by: exactly 1 within the limit, and NaN for a norm that isn't finite.

    With max_norm / Inf = 0 an overflow of the norm would turn into gradients of zero, which nobody would notice.
    """
    limit = jnp.asarray(max_norm, jnp.float32)
    factor = jnp.where(norm > limit, limit / norm, jnp.float32(1))
    return jnp.where(is_finite(norm), factor, jnp.float32(jnp.nan))


def checked_max_norm(max_norm: Any) -> Any:
    """max_norm as a float; one that `optax.inject_hyperparams` traces is left as it is."""
    if is_traced(max_norm):
        return max_norm
    limit = number("max_norm", max_norm, "a norm of 0 or more (jnp.inf: no clipping)", low=0.0)
    return limit if limit <= float(jnp.finfo(jnp.float32).max) else math.inf  # beyond fp32 no norm is finite anyway


def clip_by_global_norm_fp32(
    max_norm: float, *, axis_name: Any = None, sharded: Any = False
) -> optax.GradientTransformationExtraArgs:
    """Scales the updates down to a global norm of at most `max_norm`, in one reduction in fp32.

    ``g ← cast(fp32(g) · min(1, max_norm / ||g||))`` with ``||g||² = Σ fp32(g)²`` over every leaf and device. The norm is that
    of the updates it is given: inside `optax.masked` or `optax.partition`, of that group alone. A norm that isn't finite stays
    visible: all updates become NaN, for `skip_if_nonfinite` to see.

    Args:
      max_norm: the limit, a number of 0 or more; `jnp.inf` never clips.
      axis_name: the axis of `pmap` or `shard_map` (or a tuple of them) over which the gradients are spread or replicated.
      sharded: whether each device holds different shards of them: a bool, or a tree of bools or PartitionSpecs.

    Returns:
      A link for `optax.chain` that keeps each leaf's dtype and leaves alone what isn't a gradient.

    Raises:
      ValueError, TypeError: for a max_norm that is negative, NaN or no number.

    >>> import jax.numpy as jnp
    >>> tx = clip_by_global_norm_fp32(1.0)
    >>> clipped, state = tx.update(jnp.full(4, 40000, jnp.float16), tx.init(None))
    >>> print(clipped, state.norm_before_clip)
    [0.5 0.5 0.5 0.5] 80000.0

    References:
      Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013; GluonNLP's `grad_global_norm`.
    """
    limit = checked_max_norm(max_norm)
    axes = Axes(axis_name, sharded)

    def init(params: Any) -> ClipByGlobalNormState:
        del params
        return fresh_clip()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del state, params, extra
        norm = global_norm(updates, axes)
        return multiplied(updates, clip_factor(norm, limit)), clip_record(norm, limit)

    return optax.GradientTransformationExtraArgs(init, update)


def multiplied(updates: Any, factor: jax.Array) -> Any:
    """The updates times an fp32 scalar, multiplied in fp32 and cast back to each leaf's own dtype last."""

    def multiply(leaf: Any) -> jax.Array:
        return times(widened(leaf), factor).astype(jnp.result_type(leaf))

    return map_gradients(multiply, updates)


def grad_global_norm(
    grads: Any, max_norm: float | None = None, *, axis_name: Any = None, sharded: Any = False
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """The global norm of a tree of gradients, in fp32, over all its leaves and devices.

    ``norm = sqrt(Σ fp32(g)²)``, ``ratio = max(1, norm / max_norm)``: dividing the gradients by the ratio clips them.

    Args:
      grads: any tree; leaves that are no gradients (None, integers, float0, typed keys) count for nothing.
      max_norm: the limit that `ratio` is for.
      axis_name, sharded: as for `clip_by_global_norm_fp32`.

    Returns:
      Without `max_norm` the norm, f32[]. With it `(norm, ratio, is_finite)`: f32[], f32[] (Inf or NaN when the norm is), bool[].

    Raises:
      ValueError, TypeError: for a max_norm that is negative, NaN or no number.

    >>> import jax.numpy as jnp
    >>> grads = {"w": jnp.full(4, 40000, jnp.float16), "step": jnp.array(3)}
    >>> print(grad_global_norm(grads))
    80000.0
    >>> print(*grad_global_norm(grads, max_norm=10.0))
    80000.0 8000.0 True

    References:
      GluonNLP's `grad_global_norm`.
    """
    limit = None if max_norm is None else checked_max_norm(max_norm)
    norm = global_norm(grads, Axes(axis_name, sharded))
    return norm if limit is None else (norm, clip_ratio_of(norm, limit), is_finite(norm))
