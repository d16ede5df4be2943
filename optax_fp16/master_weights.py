"""Half-precision parameters outside, fp32 masters inside."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._inner import ApplyTransformation, MasterWeightsState, checked_inner, optaxs_own
from ._messages import boolean
from ._remainders import is_remainder, joined, remainder_zeros, split
from ._tree import is_gradient, to_fp32, wide_dtype, widened


def master_weights(inner: Any, *, remainder: bool = False) -> ApplyTransformation:
    """Keeps fp32 masters of half-precision parameters, so that updates below half precision's resolution add up.

    ::

        masters, inner_state = inner(fp32(g), masters)
        params = half(masters);   updates = fp32(half(masters)) - fp32(params before)

    Each fp16 or bf16 leaf gets an fp32 master; an fp32 leaf is its own, and costs no second copy. `inner` sees fp32 parameters
    and fp32 gradients only. Updates are fp32, against Optax's habit of giving them the gradients' dtype: only so does
    `optax.apply_updates` end on the rounded masters (bit for bit, unless one step shrinks a weight more than 4,000 times over;
    `apply` is exact always).

    With `remainder`, a bf16 parameter is itself the upper half of its master, and the state keeps the lower 16 bits alone:
    2 bytes per parameter less, and the same masters bit for bit. The price: a master exactly between two bf16 numbers rounds
    away from zero, not to the even one (65,537 masters round to an even number, which is one more than 16 bits tell apart).
    The parameters must then come back as they left: a change made outside is a change of the master.

    Args:
      inner: the optimizer, such as `optax.adamw(1e-4)`.
      remainder: keep int16 remainders for bf16 parameters instead of masters; fp16 ones keep whole masters.

    Returns:
      A transformation with `apply(grads, state, params) -> (params, state)` besides `init` and `update`. Its state is a
      `MasterWeightsState`.

    Raises:
      TypeError: when inner isn't an Optax transformation, or remainder isn't a bool.
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
      Micikevicius et al., Mixed Precision Training, ICLR 2018; apex's optimization level O2, and the parameter remainders of
      its `DistributedFusedAdam`.
    """
    inner = checked_inner(inner)
    boolean("remainder", remainder)

    def init(params: Any) -> MasterWeightsState:
        masters = jax.tree.map(lambda param: _master(param, remainder), params)
        return MasterWeightsState(masters, optaxs_own(inner.init)(to_fp32(params)))

    def step(grads: Any, state: MasterWeightsState, params: Any, extra: dict[str, Any]) -> tuple[Any, Any, Any]:
        if params is None:
            raise ValueError("master_weights needs the parameters: call tx.update(grads, state, params).")
        current = jax.tree.map(_current, state.master_params, params, is_leaf=_is_masked)
        updates, inner_state = optaxs_own(inner.update)(to_fp32(grads), state.master_inner_state, current, **extra)
        new = optaxs_own(optax.apply_updates)(current, updates)
        masters = jax.tree.map(_kept, state.master_params, new, is_leaf=_is_masked)
        return updates, new, MasterWeightsState(masters, inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        old = state.master_params
        inner_updates, new, state = step(updates, state, params, extra)
        return jax.tree.map(_difference, params, old, new, inner_updates), state

    def apply(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        old = state.master_params
        _, new, state = step(grads, state, params, extra)
        return jax.tree.map(_rounded, params, old, new), state

    def kept(state: Any, params: Any) -> Any:
        return jax.tree.map(_read_back, state.master_params, params, is_leaf=_is_masked)

    return ApplyTransformation(init, update, apply, kept)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def is_half(leaf: Any) -> bool:
    """Whether a parameter has less than fp32's precision, so that it needs a master."""
    return is_gradient(leaf) and wide_dtype(jnp.result_type(leaf)) != jnp.result_type(leaf)


def _master(param: Any, remainder: bool) -> Any:
    """What the state keeps for a parameter at the start."""
    if is_half(param):
        return remainder_zeros(param) if remainder and param.dtype == jnp.bfloat16 else widened(param)
    # optax.tree.map_params initialises with a placeholder that isn't an array, and looks for it in the state.
    return optax.MaskedNode() if hasattr(param, "dtype") else param


def _current(kept: Any, param: Any) -> Any:
    """The fp32 parameter that `inner` sees."""
    if _is_masked(kept):
        return param
    return joined(param, kept) if is_remainder(kept) else kept


def _read_back(kept: Any, param: Any) -> Any:
    """The parameter that a master rounds to; itself where there is no master, or only the bits that it lacks."""
    return param if _is_masked(kept) or is_remainder(kept) or not is_half(param) else kept.astype(param.dtype)


def _kept(old: Any, new: Any) -> Any:
    if _is_masked(old):
        return old
    return split(new)[1] if is_remainder(old) else new


def _rounded(param: Any, kept: Any, new: Any) -> Any:
    if not is_half(param):
        return new
    return split(new)[0] if is_remainder(kept) else new.astype(param.dtype)


def _difference(param: Any, kept: Any, new: Any, update: Any) -> Any:
    """The fp32 update that takes a half-precision parameter onto its rounded master."""
    return widened(_rounded(param, kept, new)) - widened(param) if is_half(param) else update
