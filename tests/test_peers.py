"""What the comparison in the README says of the peers, and what the package does instead."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import optax_fp16 as fp16

pytestmark = pytest.mark.usefixtures("loose")


def clipped(tx, updates):
    return tx.update(updates, tx.init(updates))[0]


@pytest.mark.parametrize(
    ("updates", "theirs", "ours"),
    [
        (np.full((3, 3), 100, np.float16), 0.0, 1 / 3),
        (np.full(10000, 1e-4, np.float16), 1e-4, 1e-5),
    ],
    ids=["the norm overflows fp16: updates become zero", "the squares underflow fp16: it never clips"],
)
def test_optax_clips_fp16_gradients_wrongly_and_we_do_not(updates, theirs, ours):
    max_norm = 1.0 if updates.size == 9 else 1e-3
    updates = jnp.asarray(updates)
    np.testing.assert_allclose(clipped(optax.clip_by_global_norm(max_norm), updates), theirs, rtol=1e-2)
    np.testing.assert_allclose(clipped(fp16.clip_by_global_norm_fp32(max_norm), updates), ours, rtol=1e-2)


def test_optax_loses_the_norm_of_many_bf16_leaves_and_we_do_not():
    leaves = [jnp.ones(1, jnp.bfloat16)] * 1000
    assert float(optax.tree.norm(leaves)) < 17
    np.testing.assert_allclose(fp16.grad_global_norm(leaves), np.sqrt(1000), rtol=1e-6)


def apply_nan(tx, times):
    params = jnp.ones(2)
    state = tx.init(params)
    for _ in range(times):
        updates, state = tx.update(jnp.full(2, jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_apply_if_finite_gives_up_and_applies_the_nan_and_skip_if_nonfinite_never_does():
    assert np.isnan(apply_nan(optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3), 5)).all()
    np.testing.assert_array_equal(apply_nan(fp16.skip_if_nonfinite(optax.sgd(0.1)), 50), 1)


def test_apply_if_finite_refuses_fp16_gradients_on_fp32_params_and_skip_if_nonfinite_takes_them():
    params, grads = jnp.ones(2), jnp.ones(2, jnp.float16)
    theirs = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3)
    with pytest.raises(TypeError, match="cond"):
        theirs.update(grads, theirs.init(params), params)
    ours = fp16.skip_if_nonfinite(optax.adam(0.1))
    updates, _ = ours.update(grads, ours.init(params), params)
    assert updates.dtype == jnp.float32


def test_in_pmap_apply_if_finite_lets_each_device_decide_alone_and_we_agree():
    params = jnp.ones((4, 1))
    grads = jnp.array([[jnp.inf], [1.0], [1.0], [1.0]])

    def step(tx):
        def run(params, grads):
            return tx.update(grads, tx.init(params), params)[0]

        return np.ravel(jax.pmap(run, axis_name="batch", devices=jax.devices()[:4])(params, grads))

    theirs = step(optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=3))
    ours = step(fp16.skip_if_nonfinite(optax.sgd(1.0), axis_name="batch", sharded=True))
    np.testing.assert_array_equal(theirs, [0, -1, -1, -1])
    np.testing.assert_array_equal(ours, 0)


def test_multisteps_keeps_an_inf_for_ever_unless_the_guard_is_around_it():
    def run(tx):
        params = jnp.zeros(())
        state = tx.init(params)
        for grad in (1.0, jnp.inf, 1.0, 1.0, 1.0, 1.0):
            updates, state = tx.update(jnp.float32(grad), state, params)
            params = optax.apply_updates(params, updates)
        return float(params)

    assert np.isnan(run(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()))
    assert run(fp16.skip_if_nonfinite(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())) == -2.0


def test_flax_dynamic_scale_grows_one_step_late_and_ours_on_the_step():
    theirs, steps = DynamicScale(growth_interval=10, scale=8.0), 0
    while float(theirs.scale) == 8.0:
        theirs = theirs.value_and_grad(lambda x: x**2)(jnp.float32(1.0))[0]
        steps += 1
    ours, ours_steps = fp16.dynamic_loss_scale(8.0, growth_interval=10), 0
    state = ours.init(None)
    while float(state.loss_scale) == 8.0:
        _, state = ours.update(jnp.ones(1), state)
        ours_steps += 1
    assert (steps, ours_steps) == (11, 10)


def test_jmp_loses_its_floor_in_a_round_trip_and_ours_holds():
    theirs = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(4.0))
    theirs = jax.tree.map(lambda leaf: leaf, theirs)
    ours = fp16.dynamic_loss_scale(8.0, min_scale=4.0)
    state = ours.init(None)
    for _ in range(3):
        theirs = theirs.adjust(jnp.array(False))
        _, state = ours.update(jnp.array([jnp.inf]), jax.tree.map(lambda leaf: leaf, state))
    assert (float(theirs.loss_scale), float(state.loss_scale)) == (1.0, 4.0)


def test_inject_hyperparams_rounds_eps_to_zero_beside_fp16_params_and_the_guard_gives_it_fp32():
    params = jnp.ones(2, jnp.float16)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    assert float(tx.init(params).hyperparams["eps"]) == 0.0
    assert float(fp16.skip_if_nonfinite(tx).init(params).inner_state.hyperparams["eps"]) == pytest.approx(1e-8)
