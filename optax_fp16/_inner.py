"""Transformations with one function more: `apply`, which gives the new parameters themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from ._messages import transformation
from ._tree import gradient_leaves, to_fp32, wide_dtype


class ApplyTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation (a pair of `init` and `update`) with `apply(grads, state, params, **extra) -> (params, state)`.

    `apply` is `update` and `optax.apply_updates` under one guard. It is an attribute, since `optax.chain` unpacks a pair.
    `kept(state, params) -> params` gives the parameters that belong to a state, from the state where it holds them.
    """

    apply: Callable[..., tuple[Any, Any]]
    kept: Callable[[Any, Any], Any]

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        apply: Callable[..., Any],
        kept: Callable[[Any, Any], Any] = lambda state, params: params,
    ):
        self = super().__new__(cls, init, update)
        self.apply = apply
        self.kept = kept
        return self


def apply_of(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """The transformation's own `apply`, or `update` followed by `optax.apply_updates`."""
    if isinstance(tx, ApplyTransformation):
        return tx.apply
    tx = optax.with_extra_args_support(tx)

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = optaxs_own(tx.update)(grads, state, params, **extra)
        return optaxs_own(optax.apply_updates)(params, updates), state

    return apply


def optaxs_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Optax's, which counts on JAX's standard promotion of dtypes and ranks, under the caller's strict rules."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return call


def checked_inner(inner: Any) -> Any:
    """The wrapped transformation, made to tolerate extra arguments, or an error that says what `inner` has to be."""
    inner = transformation("inner", inner)
    return inner if isinstance(inner, ApplyTransformation) else optax.with_extra_args_support(inner)


class MasterWeightsState(NamedTuple):
    master_params: (
        Any  # fp32 copies of the half-precision params, or their int16 remainders; MaskedNode for an fp32 one
    )
    master_inner_state: Any  # the state of `inner`, for fp32 params


def keeps_masters(state: Any) -> bool:
    """Whether somewhere in an optimizer state there are masters, whose owner must see the parameters as they are."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MasterWeightsState))
    return any(isinstance(node, MasterWeightsState) for node in nodes)


def init_inner(inner: Any, params: Any) -> Any:
    """The state of `inner`, for fp32 parameters unless it keeps masters: in half precision Adam's nu would be 0 or Inf."""
    state = optaxs_own(inner.init)(params)
    half = any(wide_dtype(leaf.dtype) != leaf.dtype for leaf in gradient_leaves(params) if hasattr(leaf, "dtype"))
    return optaxs_own(inner.init)(to_fp32(params)) if half and not keeps_masters(state) else state


def update_inner(inner: Any, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """(updates, new state) of `inner`, which sees fp32 gradients, and fp32 parameters unless it keeps masters."""
    seen = params if params is None or keeps_masters(state) else to_fp32(params)
    return optaxs_own(inner.update)(to_fp32(grads), state, seen, **extra)


def apply_inner(inner: Any, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """(new params in their own dtypes, new state) of `inner`, by its own `apply` where it has one."""
    if isinstance(inner, ApplyTransformation):
        return inner.apply(to_fp32(grads), state, params, **extra)
    updates, state = update_inner(inner, grads, state, params, extra)
    return optaxs_own(optax.apply_updates)(params, updates), state


def kept_params(inner: Any, state: Any, params: Any) -> Any:
    """The parameters of a skipped step: as they were, but made from fp32 masters where there are some.

    They are the same bits, and the masters are read anyway: a GPU's select is spared reading the parameters too.
    """
    return inner.kept(state, params) if isinstance(inner, ApplyTransformation) else params
