"""fp32 masters behind half-precision parameters, whole or as 16-bit remainders."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import optax_fp16 as fp16
from optax_fp16._remainders import joined, remainder_zeros, split

HALF, BRAIN, FULL = jnp.float16, jnp.bfloat16, jnp.float32
LAYOUTS = {"whole": {}, "remainders": {"remainder": True}}


def word(array):
    """The bits of an array, so that NaN equals NaN and 0 differs from -0."""
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def test_updates_below_fp16s_resolution_add_up():
    tx = fp16.master_weights(optax.sgd(1.0))
    for use_apply in (True, False):
        params = jnp.array([1.0], HALF)
        state = tx.init(params)
        for _ in range(10):
            if use_apply:
                params, state = tx.apply(jnp.array([-1e-4]), state, params)
            else:
                updates, state = tx.update(jnp.array([-1e-4]), state, params)
                with jax.numpy_dtype_promotion("standard"):
                    params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, np.array([1.001], np.float16))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_inner_optimizer_goes_the_way_it_goes_on_fp32_parameters(dtype, layout, loose):
    """Bit for bit: plain Optax on the masters, whatever happens outside. Powers of two make fused products exact."""
    plain = optax.sgd(2.0**-9, momentum=0.5)
    tx = fp16.master_weights(plain, **LAYOUTS[layout])
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal(5), dtype), "b": jnp.ones(1)}
    masters = jax.tree.map(lambda p: p.astype(FULL), params)
    by_apply, by_update = (params, tx.init(params)), (params, tx.init(params))
    plain_state = plain.init(masters)
    apply, update, reference = jax.jit(tx.apply), jax.jit(tx.update), jax.jit(plain.update)
    for _ in range(12):
        grads = {"w": jnp.asarray(rng.standard_normal(5), dtype), "b": jnp.asarray(rng.standard_normal(1), FULL)}
        updates, plain_state = reference(jax.tree.map(lambda g: g.astype(FULL), grads), plain_state, masters)
        masters = optax.apply_updates(masters, updates)
        by_apply = apply(grads, by_apply[1], by_apply[0])
        updates, state = update(grads, by_update[1], by_update[0])
        by_update = optax.apply_updates(by_update[0], updates), state
        for params, _ in (by_apply, by_update):
            np.testing.assert_array_equal(word(params["w"]), word(masters["w"].astype(dtype)))
            np.testing.assert_array_equal(params["b"], masters["b"])
            assert params["w"].dtype == dtype
    for params, state in (by_apply, by_update):
        kept = state.master_params["w"]
        kept = joined(params["w"], kept) if kept.dtype == jnp.int16 else kept
        np.testing.assert_array_equal(word(kept), word(masters["w"]))


@given(hnp.arrays(np.uint32, 16, elements=st.integers(0, 2**32 - 1)))
def test_a_master_is_its_bf16_number_and_16_bits(bits):
    bits = np.concatenate([bits, SPECIAL])
    masters = jnp.asarray(bits.view(np.float32))
    param, lower = split(masters)
    back = joined(param, lower)
    nan = np.isnan(np.asarray(masters))
    np.testing.assert_array_equal(word(back)[~nan], bits[~nan])
    assert np.isnan(np.asarray(back)[nan]).all()
    assert np.isnan(np.asarray(param.astype(FULL))[nan]).all()
    # To the nearest, as a cast rounds, but for ties: those go away from zero.
    tie = (bits & 0xFFFF) == 0x8000
    away = ((bits >> 16) + 1).astype(np.uint16)
    with np.errstate(invalid="ignore"):  # numpy's cast has a word to say about NaNs
        cast = bits.view(np.float32).astype(jnp.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(word(param)[~nan], np.where(tie, away, cast)[~nan])


# 0, -0, ties to either side, the largest finite, Inf, NaNs whose rounding would carry into the sign, subnormals.
SPECIAL = [0, 1 << 31, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]
SPECIAL = np.array([*SPECIAL, 1, 0x00008000, 0x80000001, 0xBF808000], np.uint32)


@pytest.mark.parametrize(
    ("master", "upper", "lower"),
    [(0x3F807FFF, 0x3F80, 0x7FFF), (0x3F808000, 0x3F81, -0x8000), (0x7F800001, 0x7FC0, 0), (0xFFFFFFFF, 0x7FC0, 0)],
)
def test_half_a_step_goes_up_and_every_nan_is_the_plain_one(master, upper, lower):
    param, rest = split(jax.lax.bitcast_convert_type(jnp.uint32(master), jnp.float32))
    assert (int(jax.lax.bitcast_convert_type(param, jnp.uint16)), int(rest)) == (upper, lower)


def test_a_remainder_of_a_shape_is_the_shape_of_one():
    zeros = remainder_zeros(jax.ShapeDtypeStruct((3,), jnp.bfloat16, weak_type=True))
    assert (zeros.shape, zeros.dtype, zeros.weak_type) == ((3,), jnp.int16, False)


def test_remainders_take_two_bytes_where_masters_take_four():
    params = {"b": jnp.ones(8, BRAIN), "h": jnp.ones(8, HALF), "f": jnp.ones(8), "i": jnp.arange(2)}
    whole = fp16.master_weights(optax.sgd(0.1)).init(params).master_params
    short = fp16.master_weights(optax.sgd(0.1), remainder=True).init(params).master_params
    assert whole["b"].dtype == whole["h"].dtype == short["h"].dtype == FULL
    assert short["b"].dtype == jnp.int16
    for masters in (whole, short):
        assert masters["f"] == masters["i"] == optax.MaskedNode()


def test_remainders_skip_whole_steps_under_the_recipe():
    tx = fp16.mixed_precision(fp16.master_weights(optax.sgd(1.0), remainder=True), loss_scale=8.0)
    params = jnp.array([1.0], BRAIN)
    state = tx.init(params)
    step = jax.jit(tx.apply)
    for grad in (-8e-4, jnp.inf, -8e-4):
        params, state = step(jnp.array([grad], FULL), state, params)
    kept = joined(params, state.guard_state.inner_state.master_params)
    np.testing.assert_allclose(kept, [1.0002], rtol=1e-7)
    assert params == 1.0


def test_a_remainder_without_its_bf16_parameter_is_refused():
    tx = fp16.master_weights(optax.sgd(1.0), remainder=True)
    state = tx.init(jnp.ones(1, BRAIN))
    with pytest.raises(TypeError, match=r"params: a bf16 parameter with a remainder.*came back as dtype"):
        tx.update(jnp.ones(1), state, jnp.ones(1))


def test_a_master_within_fp16s_rounding_is_kept():
    tx = fp16.master_weights(optax.sgd(1.0))
    params = jnp.array([1.0], HALF)
    params, state = tx.apply(jnp.array([-4e-4]), tx.init(params), params)
    assert params == 1.0
    np.testing.assert_array_equal(state.master_params, np.float32([1.0004]))


def test_fp32_parameters_are_copied_by_no_one_and_can_be_donated():
    tx = fp16.master_weights(optax.sgd(0.1, momentum=0.9))
    params = {"f": jnp.ones(3), "h": jnp.ones(3, HALF)}
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: tx.apply(g, s, p), donate_argnums=(0, 1))
    after, _ = step(params, state, {"f": jnp.ones(3), "h": jnp.ones(3)})
    np.testing.assert_allclose(after["f"], [0.9] * 3, rtol=1e-6)
    assert params["f"].is_deleted()
    assert state.master_params["h"].is_deleted()


def test_the_parameters_are_needed():
    tx = fp16.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"call tx.update\(grads, state, params\)"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1, HALF)))
    with pytest.raises(TypeError, match="remainder must be True or False, not 'yes'"):
        fp16.master_weights(optax.sgd(0.1), remainder="yes")


def test_a_mask_of_parameters_has_no_masters():
    tx = optax.masked(fp16.master_weights(optax.sgd(1.0)), {"a": True, "b": False})
    params = {"a": jnp.ones(1, HALF), "b": jnp.ones(1, HALF)}
    updates, state = tx.update({"a": jnp.ones(1), "b": jnp.ones(1)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["a"], [-1.0])
    assert state.inner_state.master_params["b"] == optax.MaskedNode()
