"""How much of the gradients is too small for fp16 at the current loss scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._devices import Axes, in_force, my_index
from ._messages import one_of
from ._tree import gradient_leaves, in_one_pass, is_gradient, widened

SMALLEST_NORMAL = 2.0**-14
ROUNDS_TO_ZERO = 2.0**-25  # half of fp16's smallest number; a tie goes to zero
FP32_MAX = float(jnp.finfo(jnp.float32).max)


class UnderflowState(NamedTuple):
    """What became of small gradients in the last backward pass: in total, and leaf by leaf if asked for."""

    underflow_share: jax.Array  # f32[]: entries that are zero or subnormal in fp16, out of all
    underflow_zero_share: jax.Array  # f32[]: those of them that are zero
    underflow_free_scale: jax.Array  # f32[]: the smallest power of two times the scale at which no non-zero one is
    underflow_by_leaf: jax.Array | None  # f32[leaves, 2], the share and the free scale of each, or None


def checked_mode(underflow: Any) -> str | None:
    return one_of("underflow", underflow, (None, "total", "per_leaf"))


def fresh_underflow(mode: str | None, params: Any) -> UnderflowState | None:
    """The state before the first step: None costs nothing, "total" three numbers, "per_leaf" two more for each leaf.

    Raises:
      ValueError: for "per_leaf" without parameters, which say how many leaves there are.
    """
    if mode is None:
        return None
    if mode == "per_leaf" and params is None:
        raise ValueError('underflow="per_leaf" needs the parameters at init: call tx.init(params), not tx.init(None).')
    return UnderflowState(
        underflow_share=jnp.zeros((), jnp.float32),
        underflow_zero_share=jnp.zeros((), jnp.float32),
        underflow_free_scale=jnp.zeros((), jnp.float32),
        underflow_by_leaf=jnp.zeros((len(gradient_leaves(params)), 2), jnp.float32) if mode == "per_leaf" else None,
    )


class _Counts(NamedTuple):
    entries: jax.Array  # f32[leaves]
    zeros: jax.Array  # f32[leaves]
    low: jax.Array  # f32[leaves]: zeros and subnormals
    smallest: jax.Array  # f32[leaves]: the smallest magnitude above zero, Inf if there is none


def watched(scale_state: Any, grads: Any, scale: jax.Array, axes: Axes) -> Any:
    """A loss scale's state after a step, with what the step says about underflow, if it is to be kept.

    ::

        x = fp32(gradient of the scaled loss)
        low = #(|x| < 2^-14);    zero = #(|x| <= 2^-25);    m = min |x| > 0
        share = low / entries;   zero_share = zero / entries;   free_scale = S · 2^ceil(log2(2^-14 / m))

    Args:
      scale_state: a DynamicLossScaleState or StaticLossScaleState; without underflow it comes back as it is.
      grads: gradients of the scaled loss, as they came.
      scale: f32[], the scale of their forward pass.
      axes: over which devices they are spread.
    """
    state = scale_state.underflow
    if state is None or not gradient_leaves(grads):
        return scale_state
    counts = _counted(grads, in_force(axes))
    free = _free_scale(counts.smallest, scale)
    entries = jnp.maximum(counts.entries, 1)
    total = jnp.maximum(jnp.sum(counts.entries), 1)
    by_leaf = state.underflow_by_leaf
    if by_leaf is not None:
        now = jnp.stack([counts.low / entries, free], axis=1)
        if now.shape != by_leaf.shape:
            raise ValueError(
                f'underflow="per_leaf" began with {by_leaf.shape[0]} leaves and is given gradients of {now.shape[0]}: '
                "give tx.init the parameters that you differentiate by."
            )
        by_leaf = now
    new = UnderflowState(jnp.sum(counts.low) / total, jnp.sum(counts.zeros) / total, jnp.max(free), by_leaf)
    return scale_state._replace(underflow=new)


def _counted(grads: Any, axes: Axes) -> _Counts:
    """The counts of each gradient over all devices: one sum and one minimum go between them.

    What several devices hold alike is counted by the first of them.
    """
    pairs = zip(jax.tree.leaves(grads), axes.of_leaves(grads), strict=True)
    parts = [(leaf, shards) for leaf, shards in pairs if is_gradient(leaf)]
    everywhere = frozenset(axes.names).union(*(shards for _, shards in parts))
    counts = [_counted_once(*_leaf_counts(leaf), everywhere - shards) for leaf, shards in parts]
    sums, smallest = map(jnp.stack, zip(*counts, strict=True))
    if everywhere:
        names = tuple(sorted(everywhere))
        sums, smallest = jax.lax.psum(sums, names), jax.lax.pmin(smallest, names)
    entries, zeros, low = sums.T
    return _Counts(entries, zeros, low, smallest)


def _counted_once(sums: jax.Array, smallest: jax.Array, alike: frozenset[Any]) -> tuple[jax.Array, jax.Array]:
    if not alike:
        return sums, smallest
    first = my_index(alike) == 0
    return jnp.where(first, sums, jnp.zeros_like(sums)), jnp.where(first, smallest, jnp.full_like(smallest, jnp.inf))


def _leaf_counts(leaf: Any) -> tuple[jax.Array, jax.Array]:
    """f32[3]: entries, zeros in fp16, zeros and subnormals; and f32[]: the smallest magnitude above zero.

    The two parts of a complex number count apart.
    """
    wide = widened(leaf)
    size = jnp.abs(jnp.stack([wide.real, wide.imag]) if jnp.iscomplexobj(wide) else wide).astype(jnp.float32)
    zeros, low, smallest = in_one_pass(
        ((size <= ROUNDS_TO_ZERO).astype(jnp.uint32), jnp.add, jnp.uint32(0)),
        ((size < SMALLEST_NORMAL).astype(jnp.uint32), jnp.add, jnp.uint32(0)),
        (jnp.where(size > 0, size, jnp.inf), jnp.minimum, jnp.float32(jnp.inf)),
    )
    counts = [jnp.asarray(count, jnp.float32) for count in (size.size, zeros, low)]
    return jnp.stack(counts), smallest


def _free_scale(smallest: jax.Array, scale: jax.Array) -> jax.Array:
    """f32: 0 where there is nothing but zeros, from which no scale can be read."""
    _, exponent = jnp.frexp(smallest)  # smallest = f · 2^exponent with f in [0.5, 1)
    needed = jnp.minimum(jnp.ldexp(scale, -13 - exponent), jnp.float32(FP32_MAX))
    return jnp.where(jnp.isfinite(smallest), needed, jnp.float32(0))
