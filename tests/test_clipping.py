"""Clipping to a global norm in fp32: extremes of every dtype, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_fp16 as fp16


def clip(grads, max_norm):
    tx = fp16.clip_by_global_norm_fp32(max_norm)
    return tx.update(grads, tx.init(grads))


def float64_norm(tree):
    return np.sqrt(sum(np.sum(np.abs(np.asarray(leaf, np.complex128)) ** 2) for leaf in jax.tree.leaves(tree)))


def test_a_norm_of_300_in_fp16_is_clipped_to_one():
    clipped, state = clip(jnp.full((3, 3), 100, jnp.float16), 1.0)
    assert state.norm_before_clip == 300.0
    assert state.clip_ratio == 300.0
    assert clipped.dtype == jnp.float16
    np.testing.assert_array_equal(clipped, np.full((3, 3), np.float16(1 / 3)))


def test_one_fp16_gradient_of_300_is_an_applied_step():
    """In fp16 its square is Inf, and the update would silently be zero."""
    np.testing.assert_array_equal(clip(jnp.array([300.0], jnp.float16), 1.0)[0], [1.0])
    tx = optax.chain(fp16.clip_by_global_norm_fp32(1.0), fp16.skip_if_nonfinite(optax.adam(0.1)))
    params = jnp.zeros(1)
    updates, state = tx.update(jnp.array([300.0], jnp.float16), tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.1], rtol=1e-5)
    assert state[1].applied_total == 1


def test_before_the_first_step_the_norm_is_0_and_the_ratio_1_in_fp32():
    state = fp16.clip_by_global_norm_fp32(1.0).init(jnp.zeros(1, jnp.float16))
    assert [(field.item(), field.dtype) for field in state] == [(0.0, jnp.float32), (1.0, jnp.float32)]


def test_a_limit_above_fp16s_largest_number_clips():
    np.testing.assert_array_equal(clip(jnp.array([2e5]), 1e5)[0], [1e5])


def test_a_norm_above_fp16s_largest_number_is_clipped():
    np.testing.assert_array_equal(clip(jnp.full(4, 40000, jnp.float16), 1.0)[0], [0.5] * 4)


def test_the_coefficient_is_never_rounded_to_half_precision():
    clipped, _ = clip({"half": jnp.array([3.0], jnp.float16), "full": jnp.array([1e5])}, 1.0)
    np.testing.assert_allclose(clipped["full"], [1.0], rtol=1e-6)
    np.testing.assert_array_equal(clipped["half"], [np.float16(3e-5)])


def test_a_thousand_bf16_leaves_add_up():
    grads = [jnp.ones(1, jnp.bfloat16)] * 1000
    clipped, state = clip(grads, 1.0)
    np.testing.assert_allclose(state.norm_before_clip, np.sqrt(1000), rtol=1e-6)
    assert 0.99 <= float64_norm(clipped) <= 1.01


def test_ten_thousand_small_fp16_gradients_add_up():
    clipped, state = clip(jnp.full(10_000, 1e-4, jnp.float16), 1e-3)
    np.testing.assert_allclose(state.norm_before_clip, 0.01, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(clipped, np.float64), 1e-5, rtol=6e-3)


def test_a_norm_that_overflows_fp32_is_never_turned_into_zeros():
    grads = jnp.array([1e20, 1.0, 1.0])
    clipped, state = clip(grads, 1.0)
    assert not np.isfinite(clipped).all()
    assert state.norm_before_clip == state.clip_ratio == np.inf
    tx = fp16.skip_if_nonfinite(optax.chain(fp16.clip_by_global_norm_fp32(1.0), optax.sgd(1.0)))
    _, state = tx.update(grads, tx.init(grads), grads)
    assert state.skipped_total == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_stays_visible_in_every_leaf(bad):
    clipped, state = clip({"a": jnp.array([bad, 1.0]), "b": jnp.array([2.0])}, 1.0)
    assert not np.isfinite(clipped["a"]).any()
    assert not np.isfinite(clipped["b"]).any()
    assert state.norm_before_clip == np.inf


def test_limits_of_zero_and_infinity_and_a_norm_at_the_limit():
    np.testing.assert_array_equal(clip(jnp.zeros(3), 0.0)[0], np.zeros(3))
    np.testing.assert_array_equal(clip(jnp.ones(3), 0.0)[0], np.zeros(3))
    np.testing.assert_array_equal(clip(jnp.array([3.0, 4.0]), 5.0)[0], [3.0, 4.0])
    for dtype in (jnp.float16, jnp.float32):
        grads = jnp.array([3.1, -4e4, 6e-8], dtype)
        np.testing.assert_array_equal(clip(grads, jnp.inf)[0], grads)


def test_what_is_no_gradient_counts_for_nothing_and_comes_back():
    grads = {
        "i": jnp.array([100, 200, 300]),
        "f": np.zeros(2, jax.dtypes.float0),
        "n": None,
        "w": jnp.array([3.0, 4.0]),
    }
    grads |= {"k": jax.random.key(1), "b": jnp.array([True]), "m": optax.MaskedNode()}
    assert fp16.grad_global_norm(grads) == 5.0
    clipped, state = clip(grads, 1.0)
    assert state.norm_before_clip == 5.0
    assert all(clipped[name] is grads[name] for name in "ifnkb")
    assert isinstance(clipped["m"], optax.MaskedNode)
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("tree", [{}, None, [], {"a": jnp.zeros((0, 3)), "b": jnp.zeros(0, jnp.float16)}])
def test_nothing_has_norm_zero_and_is_finite(tree):
    norm, ratio, finite = fp16.grad_global_norm(tree, 1.0)
    assert (norm, ratio, finite) == (0.0, 1.0, True)
    assert norm.dtype == jnp.float32
    assert not norm.weak_type
    assert jax.tree.structure(clip(tree, 1.0)[0]) == jax.tree.structure(tree)


def test_complex_gradients_count_by_their_magnitude():
    clipped, state = clip({"z": jnp.array([3 + 4j]), "w": jnp.array([12.0], jnp.float16)}, 1.3)
    assert state.norm_before_clip == 13.0
    np.testing.assert_allclose(clipped["z"], [0.3 + 0.4j], rtol=1e-6)
    assert clipped["z"].dtype == jnp.complex64


def test_a_python_float_is_a_gradient():
    clipped, _ = clip({"w": 3.0, "v": 4.0}, 1.0)
    np.testing.assert_allclose([clipped["w"], clipped["v"]], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_ratio_is_not_finite_when_the_norm_is_not(bad):
    norm, ratio, finite = fp16.grad_global_norm(jnp.array([1.0, bad]), 1.0)
    np.testing.assert_array_equal([norm, ratio], [bad, bad])
    assert not finite


def test_dividing_by_the_ratio_clips():
    grads = jnp.array([3.0, 4.0])
    for limit, want in ((1.0, 5.0), (2.0, 2.5), (5.0, 1.0), (10.0, 1.0), (jnp.inf, 1.0)):
        assert fp16.grad_global_norm(grads, limit)[1] == want


@given(
    st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=8),
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=8),
    st.sampled_from([0.0, 1e-3, 1.0, 7.5, 1e6, float("inf")]),
)
def test_norm_and_clip_match_float64(half, full, limit):
    # Padded to one shape, so that one program serves all examples.
    grads = {"h": np.zeros(8, np.float16), "f": np.zeros(8, np.float32)}
    grads["h"][: len(half)], grads["f"][: len(full)] = half, full
    grads = {name: jnp.asarray(leaf) for name, leaf in grads.items()}
    norm = float64_norm(grads)
    # Squares below fp32's smallest normal number may be lost; the norm is off by less than 1e-18 then.
    clipped, state = clip(grads, limit)
    np.testing.assert_allclose(state.norm_before_clip, norm, rtol=1e-6, atol=1e-18)
    factor = min(1.0, limit / norm) if norm > 0 else 1.0
    for name, atol in (("h", 6e-8), ("f", 1e-37)):
        want = np.asarray(grads[name], np.float64) * factor
        np.testing.assert_allclose(
            np.asarray(clipped[name], np.float64), want, rtol=1e-3 if name == "h" else 1e-6, atol=atol
        )


def test_max_norm_can_be_injected_and_scheduled(loose):
    tx = optax.inject_hyperparams(fp16.clip_by_global_norm_fp32)(max_norm=lambda step: 5.0 / (step + 1))
    grads = jnp.array([3.0, 4.0])
    update, state = jax.jit(tx.update), tx.init(grads)
    for count in (1, 2):
        updates, state = update(grads, state)
        np.testing.assert_allclose(updates, np.array([3.0, 4.0]) / count, rtol=1e-6)


@pytest.mark.parametrize("function", [fp16.clip_by_global_norm_fp32, lambda norm: fp16.grad_global_norm({}, norm)])
@pytest.mark.parametrize(
    ("bad", "error"), [(float("nan"), ValueError), (-1.0, ValueError), ("1", TypeError), ([1.0], TypeError)]
)
def test_a_limit_that_is_none_is_refused(function, bad, error):
    with pytest.raises(error, match="max_norm must be a norm of 0 or more"):
        function(bad)
