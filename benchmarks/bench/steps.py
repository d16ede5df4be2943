"""The optimizer steps that are compared, ours and the peers': `step(params, opt_state, grads) -> (params, opt_state)`.

Gradients come scaled by SCALE. Every step unscales them, checks them, clips them to a global norm of 1, takes an AdamW step and
keeps everything as it was when they aren't finite. The order of arguments and results is the one that lets XLA reuse buffers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import optax

import optax_fp16 as fp16

SCALE = 2.0**15
MAX_NORM = 1.0
LEARNING_RATE = 1e-4


class Step(NamedTuple):
    init: Callable[[Any], Any]  # params -> opt_state
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def adamw() -> Any:
    return optax.adamw(LEARNING_RATE)


def applied(tx: Any) -> Step:
    """`update` and `optax.apply_updates`, the way every Optax transformation is used."""

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Step(tx.init, step)


def guarded(tx: Any) -> Step:
    """`optax_fp16.apply_gradients`: both under one guard."""

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        return fp16.apply_gradients(tx, grads, opt_state, params)

    return Step(tx.init, step)


def bare() -> Step:
    """AdamW alone: no scale, no check, no clipping."""
    return applied(adamw())


def recipe() -> Any:
    return fp16.mixed_precision(adamw(), max_norm=MAX_NORM)


def masters() -> Any:
    return fp16.mixed_precision(adamw(), max_norm=MAX_NORM, half_params=True)


def nested() -> Any:
    clipped = optax.chain(fp16.clip_by_global_norm_fp32(MAX_NORM), adamw())
    return optax.chain(fp16.dynamic_loss_scale(), fp16.skip_if_nonfinite(clipped))


def links() -> Any:
    return optax.chain(
        fp16.dynamic_loss_scale(), fp16.clip_by_global_norm_fp32(MAX_NORM), fp16.skip_if_nonfinite(adamw())
    )


def clipped_adamw() -> Any:
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw())


def apply_if_finite() -> Step:
    """Optax alone: a fixed scale, `apply_if_finite` around the clip and AdamW."""
    unscale = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g.astype(jnp.float32) / SCALE, updates))
    return applied(optax.chain(unscale, optax.apply_if_finite(clipped_adamw(), max_consecutive_errors=1000)))


@jax.custom_vjp
def _loss(params: Any, grads: Any) -> jax.Array:
    """A loss whose gradients are given, so that a peer which insists on differentiating runs as it is."""
    del params, grads
    return jnp.zeros((), jnp.float32)


_loss.defvjp(lambda params, grads: (_loss(params, grads), grads), lambda grads, _: (grads, grads))


def dynamic_scale() -> Step:
    """Flax's DynamicScale, used as its documentation says: the step is taken, then params and state are chosen leaf by leaf."""
    tx = clipped_adamw()

    def init(params: Any) -> Any:
        return flax.training.dynamic_scale.DynamicScale(scale=SCALE), tx.init(params)

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        scaler, tx_state = opt_state
        scaler, finite, _, grads = scaler.value_and_grad(_loss)(params, grads)
        updates, new_state = tx.update(grads, tx_state, params)
        new_params = optax.apply_updates(params, updates)
        kept_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, tx_state)
        kept_params = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_params, params)
        return kept_params, (scaler, kept_state)

    return Step(init, step)


def jmp_scale() -> Step:
    """jmp's DynamicLossScale, used as its README says; as arrays between steps, since `lower` can't take its class apart."""
    tx = clipped_adamw()

    def init(params: Any) -> Any:
        return (jnp.asarray(SCALE, jnp.float32), jnp.zeros((), jnp.int32)), tx.init(params)

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        (scale, counter), tx_state = opt_state
        scaler = jmp.DynamicLossScale(scale, counter)
        grads = scaler.unscale(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, tx_state, params)
        new_params = optax.apply_updates(params, updates)
        kept = jmp.select_tree(finite, (new_params, new_state), (params, tx_state))
        scaler = scaler.adjust(finite)
        return kept[0], ((scaler.loss_scale, scaler.counter), kept[1])

    return Step(init, step)
