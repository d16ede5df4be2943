"""The forward side: the scaled loss and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16 as fp16

S16 = fp16.static_loss_scale(2.0**16).init(None)


@pytest.mark.parametrize("loss", [np.float16(4.0), jnp.bfloat16(4.0), jnp.float32(4.0), 4.0, np.float32(4.0)])
def test_the_loss_is_scaled_in_fp32(loss):
    scaled = fp16.scale_loss(loss, S16)
    assert scaled == 262144.0
    assert scaled.dtype == jnp.float32
    assert not scaled.weak_type


def test_an_fp16_loss_has_finite_gradients_at_the_default_scale_and_not_above():
    """The gradient of the cast is the scale in fp16: 2**16 is above fp16's largest number."""
    state = fp16.dynamic_loss_scale().init(None)
    loss = lambda w: w * jnp.float16(0.5)  # noqa: E731
    _, grads = fp16.value_and_grad(loss, state)(jnp.float16(1.0))
    assert grads == 2.0**14
    _, grads = fp16.value_and_grad(loss, S16)(jnp.float16(1.0))
    assert grads == jnp.inf


def test_the_value_is_the_true_one_and_the_gradients_are_scaled():
    fun = lambda w, x: (jnp.sum(w * x), {"n": x})  # noqa: E731
    state = fp16.static_loss_scale(8.0).init(None)
    w, x = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    (value, aux), grads = jax.jit(fp16.value_and_grad(fun, state, argnums=(0, 1), has_aux=True))(w, x)
    assert value == 11.0
    np.testing.assert_array_equal(aux["n"], x)
    np.testing.assert_array_equal(grads, [x * 8.0, w * 8.0])
    value, grads = fp16.value_and_grad(lambda w, *, x: fun(w, x)[0], state, argnums=np.int64(0))(w, x=x)
    assert value == 11.0
    np.testing.assert_array_equal(grads, x * 8.0)


def test_the_value_keeps_its_own_dtype():
    value, grads = fp16.value_and_grad(lambda w: w * w, S16)(jnp.float32(3.0))
    assert value.dtype == grads.dtype == jnp.float32
    value, _ = fp16.value_and_grad(lambda w: (w * w).astype(jnp.bfloat16), S16)(jnp.float32(3.0))
    assert value.dtype == jnp.bfloat16


@pytest.mark.parametrize("loss", [3, "4", None, jnp.int32(3), jnp.complex64(1j), [1.0], jnp.array(True)])
def test_a_loss_that_is_no_real_number_is_refused(loss):
    with pytest.raises(TypeError, match="loss must be a real floating number"):
        fp16.scale_loss(loss, S16)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"fun": 3}, "fun"),
        ({"argnums": "0"}, "argnums"),
        ({"argnums": ()}, "argnums"),
        ({"argnums": (0, True)}, "argnums"),
        ({"has_aux": 1}, "has_aux"),
    ],
)
def test_a_wrong_argument_of_value_and_grad_is_named(arguments, name):
    with pytest.raises(TypeError, match=f"{name} must be"):
        fp16.value_and_grad(**({"fun": jnp.sin, "opt_state": S16} | arguments))


def test_a_loss_with_aux_is_refused_with_the_argument_that_allows_it():
    with pytest.raises(TypeError, match="has_aux=True is for a fun that gives"):
        fp16.value_and_grad(lambda w: (w, 1), S16)(jnp.float32(1.0))


def test_a_state_without_a_scale_is_refused():
    with pytest.raises(ValueError, match=r"there is no loss scale .* Put optax_fp16.dynamic_loss_scale\(\) first"):
        fp16.scale_loss(1.0, optax.adam(0.1).init(jnp.ones(1)))
