"""Flax's TrainState with the guarded step."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import optax_fp16 as fp16
from optax_fp16.flax import TrainState

DEFAULTS = {"apply_fn": nn.Dense(1).apply, "params": {"w": jnp.array([1.0, 2.0])}}


def test_a_bad_step_leaves_the_parameters_and_the_schedule_but_counts():
    schedule = lambda count: 1.0 / (1 + jnp.float32(count))  # noqa: E731
    state = TrainState.create(tx=fp16.mixed_precision(optax.sgd(schedule), loss_scale=4.0), **DEFAULTS)
    seen = []
    for grad in (4.0, jnp.inf, 4.0):
        state = state.apply_gradients(grads={"w": jnp.array([grad, 0.0])})
        seen.append(float(state.params["w"][0]))
    assert seen == [0.0, 0.0, -0.5]
    assert state.step == 3
    assert (state.metrics["applied_total"], state.metrics["skipped_total"]) == (2, 1)


def test_its_properties_are_the_functions_of_its_state():
    state = TrainState.create(tx=optax.chain(fp16.dynamic_loss_scale(64.0), optax.sgd(1.0)), **DEFAULTS)
    assert state.loss_scale == 64.0
    assert state.scale_loss(jnp.float16(0.5)) == 32.0
    assert state.metrics["loss_scale"] == 64.0


def test_without_anything_of_ours_it_is_flaxs_own(loose):
    tx = optax.adamw(0.1)
    ours, plain = (kind.create(tx=tx, **DEFAULTS) for kind in (TrainState, train_state.TrainState))
    grads = {"w": jnp.array([0.3, -0.7])}
    step = jax.jit(lambda state: state.apply_gradients(grads=grads))
    for _ in range(3):
        ours, plain = step(ours), step(plain)
    np.testing.assert_array_equal(ours.params["w"], plain.params["w"])
    assert ours.step == plain.step
    with pytest.raises(ValueError, match="no loss scale"):
        ours.loss_scale  # noqa: B018


def test_further_fields_are_replaced_and_the_state_is_a_scan_carry():
    class WithStatistics(TrainState):
        batch_stats: dict

    tx = fp16.mixed_precision(optax.adam(0.1), max_norm=1.0)
    state = WithStatistics.create(tx=tx, batch_stats={"mean": jnp.zeros(1)}, **DEFAULTS)

    def step(state, grad):
        return state.apply_gradients(grads={"w": grad}, batch_stats={"mean": grad[:1]}), state.loss_scale

    grads = jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [3.0, 4.0]])
    state, scales = jax.jit(lambda s: jax.lax.scan(step, s.replace(step=jnp.int32(0)), grads))(state)
    np.testing.assert_array_equal(scales, [2.0**15, 2.0**15, 2.0**14])
    np.testing.assert_array_equal(state.batch_stats["mean"], [3.0])
    assert state.step == 3


def test_without_flax_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.training", None)
    monkeypatch.delitem(sys.modules, "optax_fp16.flax")
    with pytest.raises(ImportError, match=r"pip install 'optax_fp16\[flax\]'"):
        importlib.import_module("optax_fp16.flax")
