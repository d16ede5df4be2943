"""The training step and the evaluation step, on all local devices at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_fp16 as fp16

AXIS = "devices"
Batch = dict[str, Any]
LossOf = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]


def train_step(loss_of: LossOf, tx: optax.GradientTransformation, *, seed: int, accumulate: int) -> Callable[..., Any]:
    """The compiled `step(params, opt_state, batch, number) -> (params, opt_state, metrics)`; donates its first two.

    Args:
      loss_of: `loss_of(params, part, key)` gives the part's *share* of the loss and of every metric: those of all
        parts of a batch add up to the batch's. The weights that make it a mean come with the batch.
      tx: takes gradients that are the same on every device of the axis `AXIS`.
      seed: dropout depends on it, the step's number, the device and the micro-batch.
      accumulate: micro-batches that each device goes through one after the other.

    The batch comes from `split(batch, accumulate)`; params and opt_state are held by every device.
    """

    def step(params: Any, opt_state: Any, batch: Batch, number: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        keys = dropout_keys(seed, number, accumulate)
        devices = jax.lax.psum(1, AXIS)

        def share(params: Any, part: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, metrics = loss_of(params, part, key)
            return loss * devices, metrics  # the mean over devices of the gradients is then that of the whole batch

        def micro_batch(part: Batch, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            (_, metrics), grads = fp16.value_and_grad(share, opt_state, has_aux=True)(params, part, key)
            return grads, metrics

        grads, metrics = _sum_over(micro_batch, batch, keys)
        grads = fp16.pmean_gradients(grads, AXIS)
        params, opt_state = fp16.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, {**jax.lax.psum(metrics, AXIS), **fp16.metrics_of(opt_state)}

    return jax.pmap(step, AXIS, in_axes=(None, None, 0, None), out_axes=(None, None, None), donate_argnums=(0, 1))


def dropout_keys(seed: int, number: jax.Array, accumulate: int) -> jax.Array:
    """A key for each micro-batch of the step on this device; of the generator that compiles in half the time."""
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)
    return jax.random.split(jax.random.fold_in(key, jax.lax.axis_index(AXIS)), accumulate)


def _sum_over(micro_batch: Callable[..., Any], batch: Batch, keys: jax.Array) -> Any:
    """The sum of `micro_batch(part, key)` over the leading axis, one part at a time in memory."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    if keys.shape[0] == 1:
        return micro_batch(first, keys[0])
    zeros = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(micro_batch, first, keys[0]))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, micro_batch(*part)), None

    return jax.lax.scan(add, zeros, (batch, keys))[0]


def on_every_device(tree: Any) -> Any:
    """`tree` as `train_step` returns it; from any other placement its second call would compile a second time."""
    devices = np.arange(jax.local_device_count())
    return jax.pmap(lambda tree, _: tree, AXIS, in_axes=(None, 0), out_axes=None)(tree, devices)


def split(batch: dict[str, np.ndarray], accumulate: int) -> Batch:
    """[B, ...] to [devices, accumulate, B / (devices * accumulate), ...]."""
    devices = jax.local_device_count()
    return {name: x.reshape(devices, accumulate, -1, *x.shape[1:]) for name, x in batch.items()}


def sums_of(loss_of: LossOf) -> Callable[[Any, dict[str, np.ndarray]], dict[str, float]]:
    """A function that gives the metrics of `loss_of`, without dropout, summed over a batch [B, ...]."""

    def sums(params: Any, batch: Batch) -> dict[str, jax.Array]:
        return jax.lax.psum(loss_of(params, jax.tree.map(lambda leaf: leaf[0], batch), None)[1], AXIS)

    compiled = jax.pmap(sums, AXIS, in_axes=(None, 0), out_axes=None)
    return lambda params, batch: {name: float(value) for name, value in compiled(params, split(batch, 1)).items()}
