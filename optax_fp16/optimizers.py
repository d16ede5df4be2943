"""The Adam that BERT was trained with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._messages import floating_dtype, is_traced, number, shown
from ._tree import is_gradient, map_gradients, wide_dtype, widened


def bert_adam(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Any = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam without bias correction and with decoupled weight decay: the BERTAdam that BERT was trained with.

    ``m ← b1·m + (1-b1)·g``, ``v ← b2·v + (1-b2)·g²``, ``update = -lr·(m / (sqrt(v) + eps) + weight_decay·p)``.
    Without the correction the first step is 0.1 / sqrt(0.001) ≈ 3 times as long as Adam's; a warm-up makes up for it.
    The decay is multiplied by the learning rate, and so follows its schedule.

    Args:
      learning_rate: a number of 0 or more, or a schedule: a function of the count of steps taken, i32[].
      b1: how much of the first moment stays, in [0, 1).
      b2: how much of the second moment stays, in [0, 1).
      eps: added to the denominator, 0 or more.
      weight_decay: 0 or more; 0 needs no parameters in `update`.
      mask: which parameters decay: a tree of bools (a prefix of the parameters will do) or a function of the parameters
        that gives one. None: all. BERT leaves out biases and LayerNorm.
      mu_dtype: what the first moment is kept in. None: as the second, in fp32 or the parameter's wider dtype.

    Returns:
      An optimizer whose state is `optax.ScaleByAdamState(count, mu, nu)`. All arithmetic is in fp32; each update has
      the dtype of its gradient. Leaves that are no gradients come back untouched.

    Raises:
      ValueError, TypeError: at construction for an argument out of its range; at `update` for a mask that isn't made of
        bools, or when there is decay and no parameters are given.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> tx = bert_adam(0.1, weight_decay=0.5, mask={"kernel": True, "bias": False})
    >>> params = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
    >>> grads = {"kernel": jnp.array([1.0]), "bias": jnp.array([1.0])}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> print(f"{updates['bias'][0]:.4f} {updates['kernel'][0]:.4f}")
    -0.3162 -0.4162

    References:
      Devlin et al., BERT, 2019 (`AdamWeightDecayOptimizer`); GluonNLP's and pytorch-pretrained-BERT's `BertAdam`;
      Zhang et al., Revisiting Few-sample BERT Fine-tuning, ICLR 2021, on what the missing correction does.
    """
    rate = learning_rate if callable(learning_rate) else _knob("learning_rate", learning_rate, _RATE, low=0.0)
    b1 = _knob("b1", b1, "a number in [0, 1)", low=0.0, below=1.0)
    b2 = _knob("b2", b2, "a number in [0, 1)", low=0.0, below=1.0)
    eps = _knob("eps", eps, "a number of 0 or more", low=0.0)
    decay = _knob("weight_decay", weight_decay, "a number of 0 or more", low=0.0)
    first_dtype = None if mu_dtype is None else floating_dtype("mu_dtype", mu_dtype)
    decaying = is_traced(decay) or decay > 0

    def init(params: Any) -> optax.ScaleByAdamState:
        mu = jax.tree.map(lambda leaf: _first_moment(leaf, first_dtype), params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, jax.tree.map(_second_moment, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, optax.ScaleByAdamState]:
        del extra
        decays = decay_flags(params, updates)
        mu = map_gradients(lambda g, m: _average(b1, widened(g), m), updates, state.mu)
        nu = map_gradients(lambda g, v: _average(b2, _squared(widened(g)), v), updates, state.nu)
        lr = rate(state.count) if callable(rate) else rate

        def step(g: Any, m: jax.Array, v: jax.Array, decayed: bool, *param: Any) -> jax.Array:
            direction = m / (jnp.sqrt(v) + _like(eps, v)).astype(m.dtype)
            if decayed:
                direction = direction + _like(decay, m) * widened(param[0])
            return (_like(lr, m) * -direction).astype(jnp.result_type(g))

        steps = map_gradients(step, updates, mu, nu, decays, *([params] if decaying else []))
        # A leaf that is no gradient came through map_gradients as it was; its moment stays too.
        mu, nu = (
            jax.tree.map(lambda g, new, old: new.astype(old.dtype) if is_gradient(g) else old, updates, now, before)
            for now, before in ((mu, state.mu), (nu, state.nu))
        )
        return steps, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    def decay_flags(params: Any, updates: Any) -> Any:
        if not decaying:
            return jax.tree.map(lambda _: False, updates)
        if params is None:
            raise ValueError(
                "bert_adam with weight_decay needs the parameters: write tx.update(grads, state, params), "
                "or bert_adam(..., weight_decay=0.0)."
            )
        return _spread(True if mask is None else mask(params) if callable(mask) else mask, updates)

    return optax.GradientTransformationExtraArgs(init, update)


_RATE = "a number of 0 or more, or a schedule (a function of the step count)"


def _knob(name: str, value: Any, allowed: str, **limits: float) -> Any:
    """A hyper-parameter as a float; one that `optax.inject_hyperparams` traces is left as it is."""
    return value if is_traced(value) else number(name, value, allowed, **limits)


def _like(value: Any, leaf: jax.Array) -> jax.Array:
    """A hyper-parameter as a scalar of the leaf's dtype."""
    return jnp.asarray(value, leaf.dtype)


def _first_moment(leaf: Any, dtype: Any) -> jax.Array:
    if not is_gradient(leaf):
        return jnp.zeros(jnp.shape(leaf), jnp.float32)
    wide = wide_dtype(jnp.result_type(leaf))
    return jnp.zeros_like(leaf, dtype=wide if dtype is None or jnp.issubdtype(wide, jnp.complexfloating) else dtype)


def _second_moment(leaf: Any) -> jax.Array:
    """Zeros for the mean of |g|², which is real for a complex parameter too."""
    if not is_gradient(leaf):
        return jnp.zeros(jnp.shape(leaf), jnp.float32)
    return jnp.zeros_like(leaf, dtype=jnp.finfo(wide_dtype(jnp.result_type(leaf))).dtype)


def _squared(g: jax.Array) -> jax.Array:
    return jnp.real(g * jnp.conj(g)) if jnp.iscomplexobj(g) else g * g


def _average(keep: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    # 1 - 0.999 in fp32 is off by 1e-5, so it is taken in Python unless the number is traced.
    return _like(keep, new) * old.astype(new.dtype) + _like(1 - keep, new) * new


def _spread(mask: Any, tree: Any) -> Any:
    """The mask, a tree of bools that is a prefix of the tree, with one bool for each leaf of it."""
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(f"mask must be a tree of bools, or a function that gives one, not one with {shown(leaf)}.")
    return jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), mask, tree)
