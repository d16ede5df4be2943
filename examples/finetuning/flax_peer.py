"""The same training step as users of `flax.training.dynamic_scale.DynamicScale` write it, for comparison."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from optax_fp16 import bert_adam
from training.optimizer import decayed, schedule_of
from training.step import AXIS, Batch, LossOf, dropout_keys


class FlaxState(NamedTuple):
    """What is carried from step to step besides the parameters."""

    dynamic_scale: DynamicScale
    opt_state: Any
    skipped_total: jax.Array  # i32[]


def flax_ways(loss_of: LossOf, args: argparse.Namespace) -> tuple[Callable[[Any], FlaxState], Callable[..., Any]]:
    """(`init(params)`, compiled `step(params, state, batch, number)`), to be used as an optimizer's and `train_step`'s."""
    tx = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity(),
        bert_adam(schedule_of(args), eps=1e-6, weight_decay=args.weight_decay, mask=decayed),
    )

    def init(params: Any) -> FlaxState:
        scale = DynamicScale(growth_interval=args.growth_interval, scale=jnp.float32(args.init_scale))
        return FlaxState(scale, tx.init(params), jnp.int32(0))

    def step(params: Any, state: FlaxState, batch: Batch, number: jax.Array) -> tuple[Any, FlaxState, dict[str, Any]]:
        part = jax.tree.map(lambda leaf: leaf[0], batch)
        key = dropout_keys(0, number, 1)[0]
        devices = jax.lax.psum(1, AXIS)

        def share(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, metrics = loss_of(params, part, key)
            return loss * devices, metrics

        gradient = state.dynamic_scale.value_and_grad(share, has_aux=True, axis_name=AXIS)
        dynamic_scale, finite, (_, metrics), grads = gradient(params)
        updates, opt_state = tx.update(grads, state.opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state.opt_state))
        skipped = state.skipped_total + jnp.where(finite, 0, 1)
        metrics = {**jax.lax.psum(metrics, AXIS), "skipped_total": skipped}
        return params, FlaxState(dynamic_scale, opt_state, skipped), metrics

    return init, jax.pmap(step, AXIS, in_axes=(None, None, 0, None), out_axes=(None,) * 3, donate_argnums=(0, 1))
