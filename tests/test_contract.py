"""What every transform keeps to: types, traces, donation, abstract values, foreign homes. One row of the table at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_fp16 as fp16
from optax_fp16.flax import TrainState
from tests.transforms import GUARDED, PARAMS, TRANSFORMS, bits, gradients, kinds, with_an_inf

pytestmark = pytest.mark.usefixtures("loose")
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


@every_transform
def test_one_trace_serves_every_step_and_donation_works_right_after_init(name):
    """An overflow and a growth among five steps; types, structure and weakness stay; no argument is used twice."""
    tx, traces = TRANSFORMS[name], []

    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    shape = kinds((params, state))
    assert not any(weak for _, _, weak in kinds(state)[1])
    update_shapes = set()
    for seed, bad in enumerate((None, None, jnp.inf, jnp.nan, None)):
        grads = gradients(seed) if bad is None else with_an_inf(gradients(seed), bad)
        params, state, updates = compiled(params, state, grads)
        assert kinds((params, state)) == shape
        update_shapes.add(str(kinds(updates)))
    assert len(traces) == len(update_shapes) == 1
    if name in GUARDED:
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves((params, state)))


@every_transform
def test_jit_equals_eager(name):
    tx = TRANSFORMS[name]
    compiled = jax.jit(tx.update)
    for grads in (gradients(1), with_an_inf(gradients(2))):
        eager, jitted = (update(grads, tx.init(PARAMS), PARAMS) for update in (tx.update, compiled))
        assert kinds(eager) == kinds(jitted)
        for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
            atol = 8 if a.dtype == jnp.int16 else 1e-7  # remainders: the last bits of the masters
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=atol)


@every_transform
def test_extra_arguments_are_tolerated(name):
    tx = TRANSFORMS[name]
    plain = tx.update(gradients(), tx.init(PARAMS), PARAMS)
    extra = tx.update(gradients(), tx.init(PARAMS), PARAMS, value=jnp.float32(1.0), loss="a word")
    assert bits(plain) == bits(extra)
    assert len(tuple(tx)) == 2


@every_transform
def test_init_and_update_have_abstract_values(name):
    tx = TRANSFORMS[name]
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert kinds(shapes) == kinds(tx.init(PARAMS))
    _, after = jax.eval_shape(tx.update, gradients(), shapes, PARAMS)
    assert kinds(after) == kinds(shapes)


@every_transform
def test_map_params_reaches_what_is_shaped_like_the_parameters(name):
    tx = TRANSFORMS[name]
    state = tx.init(PARAMS)
    seen = []
    same = optax.tree.map_params(tx, lambda leaf: seen.append(leaf.shape) or leaf, state)
    assert bits(same) == bits(state)
    assert all(shape == (3,) for shape in seen)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (3,)]
    assert len(seen) == len(arrays)


@every_transform
def test_it_works_in_a_train_state_and_an_nnx_optimizer(name):
    tx = TRANSFORMS[name]
    want = fp16.apply_gradients(tx, gradients(), tx.init(PARAMS), PARAMS)
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx).apply_gradients(grads=gradients())
    assert bits((train_state.params, train_state.opt_state)) == bits(want)

    class Model(nnx.Module):
        def __init__(self):
            for leaf, value in PARAMS.items():
                setattr(self, leaf, nnx.Param(jnp.copy(value)))

    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.state(model, nnx.Param)
    for leaf, value in gradients().items():
        grads[leaf] = grads[leaf].replace(value)
    shape = kinds(optimizer.opt_state)
    optimizer.update(model, grads)
    assert kinds(optimizer.opt_state) == shape
    for leaf, value in PARAMS.items():
        got, wanted = model, want[0][leaf]
        got = getattr(got, leaf)[...]
        assert got.dtype == value.dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(wanted, np.float32), rtol=1e-2)
    if "scale" in name or name in ("mixed_precision", "links", "nested"):
        assert fp16.loss_scale_of(optimizer) == fp16.loss_scale_of(want[1])


AT_SCALE_ONE = {
    "static_loss_scale": lambda inner: optax.chain(fp16.static_loss_scale(1.0), inner),
    "dynamic_loss_scale": lambda inner: optax.chain(fp16.dynamic_loss_scale(1.0, max_scale=1.0), inner),
    "clip_by_global_norm_fp32": lambda inner: optax.chain(fp16.clip_by_global_norm_fp32(1e3), inner),
    "skip_if_nonfinite": fp16.skip_if_nonfinite,
    "master_weights": fp16.master_weights,
    "master_weights with remainders": lambda inner: fp16.master_weights(inner, remainder=True),
    "mixed_precision": lambda inner: fp16.mixed_precision(inner, max_norm=1e3, loss_scale=1.0, half_params=True),
    "links": lambda inner: optax.chain(
        fp16.static_loss_scale(1.0), fp16.clip_by_global_norm_fp32(1e3), fp16.skip_if_nonfinite(inner)
    ),
}


@pytest.mark.parametrize("name", AT_SCALE_ONE)
def test_at_scale_one_in_fp32_it_is_plain_optax_bit_for_bit(name):
    plain = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.05))
    tx = AT_SCALE_ONE[name](plain)
    params = theirs = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    state, their_state = tx.init(params), plain.init(params)
    for seed in range(4):
        grads = gradients(seed, jnp.float32)
        params, state = fp16.apply_gradients(tx, grads, state, params)
        updates, their_state = plain.update(grads, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        assert bits(params) == bits(theirs)
    assert all(state_bits in bits(state) for state_bits in bits(their_state))
