"""The distributed optimizer: the same step as without it, with 1/N of the state on each device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from tests.meshes import WAYS, mesh

# Along the second dimension, the first, padded along the second, padded, whole, whole.
SHAPES = {"wide": (6, 8), "tall": (8, 3), "odd": (5, 3), "bias": (3,), "scalar": (), "one": (1,)}


def parameters(dtype=np.float32, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def gradients(devices, shapes=SHAPES, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(devices, *shape)).astype(np.float32) for name, shape in shapes.items()}


def recipe(**knobs):
    knobs = {"max_norm": 0.5, "loss_scale": fp16.dynamic_loss_scale(8.0, growth_interval=3), **knobs}
    return fp16.mixed_precision(optax.adamw(0.05, weight_decay=0.1), **knobs)


def trained(way, tx, params, devices, steps, grads_at):
    """Parameters after steps in which device i has the gradients `grads_at(params, i, step)`, as numpy, and the last state."""

    def run(params, index):
        def step(carry, number):
            params, state = carry
            own = jax.lax.pcast(params, "data", to="varying") if way == "typed" else params
            return fp16.apply_gradients(tx, grads_at(own, index[0], number), state, params), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))
        return params, fp16.metrics_of(state)

    index = jnp.arange(devices)
    if way == "pmap":
        spread = jax.pmap(run, "data", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:devices])
        return jax.tree.map(np.asarray, spread(params, index[:, None]))
    spread = jax.shard_map(run, mesh=mesh(devices), in_specs=(P(), P("data")), out_specs=P(), check_vma=way == "typed")
    return jax.tree.map(np.asarray, jax.jit(spread)(params, index))


def pull(params, index, step):
    """Gradients of a sum of squares around a target that differs between the devices."""
    away = (index + 1).astype(jnp.float32) * jnp.float32(0.3)
    return jax.tree.map(lambda leaf: 8 * (leaf.astype(jnp.float32) - away), params)


def alone(tx, params, devices, steps, grads_at):
    """The same on one device, from the mean gradients."""

    def step(carry, number):
        params, state = carry
        each = [grads_at(params, jnp.int32(index), number) for index in range(devices)]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / jnp.float32(devices), *each)
        return fp16.apply_gradients(tx, mean, state, params), None

    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0])
    params, state = run(params)
    return jax.tree.map(np.asarray, (params, fp16.metrics_of(state)))


@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_are_those_of_one_device(way):
    tx = fp16.distributed(recipe(), "data")
    params, metrics = trained(way, tx, parameters(), 4, 50, pull)
    right, right_metrics = alone(recipe(), parameters(), 4, 50, pull)
    for name in right:
        np.testing.assert_allclose(params[name], right[name], rtol=1e-6, atol=1e-6)
    for name in right_metrics:
        np.testing.assert_allclose(metrics[name], right_metrics[name], rtol=1e-6)
