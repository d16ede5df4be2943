"""Half-precision parameters outside, fp32 masters inside."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._inner import ApplyTransformation, MasterWeightsState, checked_inner, optaxs_own
from ._tree import is_gradient, to_fp32, wide_dtype, widened


def master_weights(inner: Any) -> ApplyTransformation:
    """Keeps fp32 masters of half-precision parameters, so that updates below half precision's resolution add up.

    ::

        masters, inner_state = inner(fp32(g), masters)
        params = half(masters);   updates = fp32(half(masters)) - fp32(params before)

    Each fp16 or bf16 leaf gets an fp32 master; an fp32 leaf is its own, and costs no second copy. `inner` sees fp32 parameters
    and fp32 gradients only. Updates are fp32, against Optax's habit of giving them the gradients' dtype: only so does
    `optax.apply_updates` end on the rounded masters (bit for bit, unless one step shrinks a weight more than 4,000 times over;
    `apply` is exact always).

    Args:
      inner: the optimizer, such as `optax.adamw(1e-4)`.

    Returns:
      A transformation with `apply(grads, state, params) -> (params, state)` besides `init` and `update`. Its state is a
      `MasterWeightsState`.

    Raises:
      TypeError: when inner isn't an Optax transformation.
      ValueError: from `update`, when it isn't given the parameters.

    >>> import jax.numpy as jnp, optax
    >>> tx = master_weights(optax.sgd(1.0))
    >>> params = jnp.array([1.0], jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(10):
    ...     params, state = tx.apply(jnp.array([-1e-4]), state, params)
    >>> print(params, params.dtype)
    [1.001] float16

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018; apex's optimization level O2.
    """
    inner = checked_inner(inner)

    def init(params: Any) -> MasterWeightsState:
        masters = jax.tree.map(_master, params)
        return MasterWeightsState(masters, optaxs_own(inner.init)(to_fp32(params)))

    def step(grads: Any, state: MasterWeightsState, params: Any, extra: dict[str, Any]) -> tuple[Any, Any, Any]:
        if params is None:
            raise ValueError("master_weights needs the parameters: call tx.update(grads, state, params).")
        current = _merged(state.master_params, params)
        updates, inner_state = optaxs_own(inner.update)(to_fp32(grads), state.master_inner_state, current, **extra)
        new = optaxs_own(optax.apply_updates)(current, updates)
        masters = jax.tree.map(_keep, state.master_params, new, is_leaf=_is_masked)
        return updates, new, MasterWeightsState(masters, inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        inner_updates, new, state = step(updates, state, params, extra)
        return jax.tree.map(_difference, params, new, inner_updates), state

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        _, new, state = step(grads, state, params, extra)
        return jax.tree.map(_rounded, params, new), state

    return ApplyTransformation(init, update, apply)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def is_half(leaf: Any) -> bool:
    """Whether a parameter has less than fp32's precision, so that it needs a master."""
    return is_gradient(leaf) and wide_dtype(jnp.result_type(leaf)) != jnp.result_type(leaf)


def _master(param: Any) -> Any:
    if is_half(param):
        return widened(param)
    # optax.tree.map_params initialises with a placeholder that isn't an array, and looks for it in the state.
    return optax.MaskedNode() if hasattr(param, "dtype") else param


def _merged(masters: Any, params: Any) -> Any:
    return jax.tree.map(lambda m, p: p if _is_masked(m) else m, masters, params, is_leaf=_is_masked)


def _keep(old: Any, new: Any) -> Any:
    return old if _is_masked(old) else new


def _rounded(param: Any, new: Any) -> Any:
    return new.astype(param.dtype) if is_half(param) else new


def _difference(param: Any, new: Any, update: Any) -> Any:
    """The fp32 update that takes a half-precision parameter onto its rounded master."""
    return widened(new.astype(param.dtype)) - widened(param) if is_half(param) else update
