"""bert_adam against BERT's own optimizer in float64, and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_fp16.optimizers import bert_adam


def reference_step(param, grad, m, v, *, lr, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01):
    """One step of BERT's AdamWeightDecayOptimizer on float64 arrays: (param, m, v)."""
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad * grad
    return param - lr * (m / (np.sqrt(v) + eps) + weight_decay * param), m, v


def apply(params, updates):
    return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)


@pytest.mark.parametrize(
    ("knobs", "rate"),
    [
        ({}, lambda step: 0.01),
        ({"b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.3}, lambda step: 0.1 / (1 + jnp.float32(step))),
        ({"b1": 0.0, "weight_decay": 0.0}, lambda step: 0.02),
    ],
)
def test_twenty_steps_match_the_float64_reference(knobs, rate):
    rng = np.random.default_rng(0)
    param = rng.standard_normal(5)
    want, m, v = param, np.zeros(5), np.zeros(5)
    tx = bert_adam(rate, **knobs)
    got = jnp.asarray(param, jnp.float32)
    state = tx.init(got)
    update = jax.jit(tx.update)
    for step in range(20):
        grad = rng.standard_normal(5) * 10.0 ** rng.integers(-4, 2)
        want, m, v = reference_step(want, grad, m, v, lr=float(rate(step)), **knobs)
        updates, state = update(jnp.asarray(grad, jnp.float32), state, got)
        got = apply(got, updates)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(state.mu, m, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.nu, v, rtol=1e-5)
    assert state.count == 20


def test_twenty_steps_with_a_mask_match_the_float64_reference():
    rng = np.random.default_rng(0)
    want = {name: (rng.standard_normal(5), np.zeros(5), np.zeros(5)) for name in ("kernel", "bias")}
    tx = bert_adam(0.01, weight_decay=0.3, mask={"kernel": True, "bias": False})
    got = {name: jnp.asarray(param, jnp.float32) for name, (param, _, _) in want.items()}
    state, update = tx.init(got), jax.jit(tx.update)
    for _ in range(20):
        grads = {name: rng.standard_normal(5) for name in want}
        for name, decay in (("kernel", 0.3), ("bias", 0.0)):
            param, *moments = want[name]
            want[name] = reference_step(param, grads[name], *moments, lr=0.01, weight_decay=decay)
        updates, state = update(jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads), state, got)
        got = apply(got, updates)
    for name, (param, _, _) in want.items():
        np.testing.assert_allclose(got[name], param, rtol=2e-6, atol=1e-7)


def test_the_first_step_has_no_bias_correction():
    tx = bert_adam(1.0, eps=0.0, weight_decay=0.0)
    updates, _ = tx.update(jnp.array([7.0]), tx.init(jnp.array([0.0])))
    np.testing.assert_allclose(updates, [-0.1 / np.sqrt(0.001)], rtol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        {"dense": {"kernel": True, "bias": False}, "norm": False},
        lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    ],
)
def test_only_what_the_mask_names_decays(mask):
    params = {"dense": {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}}
    grads = jax.tree.map(jnp.zeros_like, params)
    tx = bert_adam(0.5, weight_decay=0.1, mask=mask)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["dense"]["kernel"], np.full((1, 2), -0.05), rtol=1e-6)
    assert not updates["dense"]["bias"].any()
    assert not updates["norm"]["scale"].any()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_gradients_are_averaged_in_fp32(dtype):
    """A square of 1e-4 is below fp16's smallest number: nu would be 0 and the update infinite."""
    param, grad = jnp.ones(3, dtype), jnp.full(3, 1e-4, dtype)
    tx = bert_adam(0.01, eps=1e-8)
    state = tx.init(param)
    assert state.mu.dtype == state.nu.dtype == jnp.float32
    updates, state = tx.update(grad, state, param)
    assert updates.dtype == dtype
    assert state.nu.dtype == jnp.float32
    wide = np.asarray(grad, np.float64)
    want = reference_step(np.ones(3), wide, np.zeros(3), np.zeros(3), lr=0.01, eps=1e-8)[0] - 1
    np.testing.assert_allclose(np.asarray(updates, np.float64), want, rtol=float(jnp.finfo(dtype).eps))


def test_mu_dtype_is_what_the_first_moment_is_kept_in():
    tx = bert_adam(0.01, mu_dtype=jnp.bfloat16)
    params = jnp.ones(3)
    state = tx.init(params)
    _, after = tx.update(jnp.full(3, 0.3), state, params)
    assert state.mu.dtype == after.mu.dtype == jnp.bfloat16
    assert after.nu.dtype == jnp.float32


def test_what_is_no_gradient_has_moments_of_zeros_in_fp32():
    params = {"count": jnp.arange(3), "key": jax.random.key(0)}
    state = bert_adam(0.1).init(params)
    for moments in (state.mu, state.nu):
        for name, leaf in moments.items():
            np.testing.assert_array_equal(leaf, np.zeros(params[name].shape))
            assert leaf.dtype == jnp.float32


def test_what_is_no_gradient_comes_back_untouched():
    params = {"w": jnp.ones(2), "ids": jnp.arange(3), "none": None, "masked": optax.MaskedNode()}
    grads = {"w": jnp.ones(2), "ids": np.zeros(3, jax.dtypes.float0), "none": None, "masked": optax.MaskedNode()}
    tx = bert_adam(0.1)
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert updates["ids"] is grads["ids"]
    assert updates["none"] is None
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, after)


def test_a_complex_gradient_is_divided_by_its_magnitude():
    tx = bert_adam(1.0, b1=0.0, b2=0.0, eps=0.0, weight_decay=0.0)
    state = tx.init(jnp.array([1 + 1j]))
    assert state.nu.dtype == jnp.float32
    updates, _ = tx.update(jnp.array([3 + 4j]), state)
    np.testing.assert_allclose(updates, [-(0.6 + 0.8j)], rtol=1e-6)


def test_hyperparameters_can_be_injected():
    params, grads = jnp.ones(2), jnp.full(2, 0.5)
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.inject_hyperparams(bert_adam)(learning_rate=0.1, weight_decay=0.2)
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    plain = bert_adam(0.1, weight_decay=0.2)
    want, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(updates, want, rtol=1e-5)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 0.1)


def test_decay_without_parameters_is_refused():
    tx = bert_adam(0.1)
    with pytest.raises(ValueError, match=r"needs the parameters: write tx.update\(grads, state, params\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), (float("nan"), ValueError), ("0.1", TypeError)])
def test_a_bad_number_is_named(name, value, error):
    with pytest.raises(error, match=name):
        bert_adam(**{"learning_rate": 0.1, name: value})


@pytest.mark.parametrize("name", ["b1", "b2"])
def test_an_average_that_never_moves_is_refused(name):
    with pytest.raises(ValueError, match=name + r" must be a number in \[0, 1\), not 1"):
        bert_adam(0.1, **{name: 1})


def test_a_wrong_mask_or_dtype_is_named():
    with pytest.raises(TypeError, match="mu_dtype"):
        bert_adam(0.1, mu_dtype=jnp.int32)
    tx = bert_adam(0.1, mask={"w": "yes"})
    params = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="mask must be a tree of bools"):
        tx.update(params, tx.init(params), params)
