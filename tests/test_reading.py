"""Our fields are found in any optimizer state, and are those of the last step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import optax_fp16 as fp16
import optax_fp16.flax

SCALE = fp16.dynamic_loss_scale(512.0)
PARAMS = {"a": jnp.ones(2), "b": jnp.ones(1)}


def labels(params):
    return {"a": "x", "b": "y"}


WRAPPINGS = {
    "bare": SCALE,
    "static": fp16.static_loss_scale(512.0),
    "chain": optax.chain(optax.clip(1.0), optax.chain(SCALE, optax.adam(0.1))),
    "named_chain": optax.named_chain(("scale", SCALE), ("adam", optax.adam(0.1))),
    "multi_steps": optax.MultiSteps(optax.chain(SCALE, optax.sgd(0.1)), 2),
    "inject_hyperparams": optax.inject_hyperparams(lambda rate: optax.chain(SCALE, optax.sgd(rate)))(rate=0.1),
    "masked": optax.masked(SCALE, {"a": True, "b": False}),
    "partition": optax.partition({"x": SCALE, "y": optax.sgd(0.1)}, labels),
    "recipe": fp16.mixed_precision(optax.sgd(0.1), loss_scale=SCALE),
    "apply_if_finite": optax.apply_if_finite(optax.chain(SCALE, optax.sgd(0.1)), 3),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_scale_is_found_however_deep(wrapping, loose):
    state = WRAPPINGS[wrapping].init(PARAMS)
    assert fp16.loss_scale_of(state) == 512.0
    assert fp16.metrics_of(state)["loss_scale"] == 512.0
    assert jax.jit(fp16.loss_scale_of)(state) == 512.0
    assert fp16.scale_loss(jnp.float16(2.0), state) == 1024.0


@pytest.mark.parametrize("make", [train_state.TrainState.create, optax_fp16.flax.TrainState.create])
def test_the_scale_is_found_in_a_train_state(make):
    state = make(apply_fn=None, params=PARAMS, tx=optax.chain(SCALE, optax.sgd(0.1)))
    assert fp16.loss_scale_of(state) == fp16.loss_scale_of(state.opt_state) == 512.0


def test_the_scale_is_found_in_an_nnx_optimizer(loose):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0, loss_scale=SCALE)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel = np.asarray(model.kernel[...])
    for bad, scale in ((1.0, 512.0), (jnp.inf, 256.0)):
        _, grads = nnx.value_and_grad(
            lambda m, bad=bad: fp16.scale_loss(jnp.sum(m(jnp.ones((1, 2)))) * bad, optimizer)
        )(model)
        optimizer.update(model, grads)
        for state in (optimizer, optimizer.opt_state):
            assert fp16.loss_scale_of(state) == scale
            assert isinstance(fp16.loss_scale_of(state), jax.Array)
    metrics = fp16.metrics_of(optimizer.opt_state)
    assert (metrics["applied_total"], metrics["skipped_total"]) == (1, 1)
    assert not np.array_equal(kernel, model.kernel[...])
    assert np.isfinite(model.kernel[...]).all()


def test_two_scales_that_differ_are_refused_and_both_places_named(loose):
    tx = optax.partition({"x": SCALE, "y": fp16.static_loss_scale(4.0)}, labels)
    with pytest.raises(ValueError, match=r"two loss scales that differ \(512.0 and 4.0\): at .*'x'.* and at .*'y'"):
        fp16.loss_scale_of(tx.init(PARAMS))
    chained = optax.chain(SCALE, fp16.static_loss_scale(4.0)).init(PARAMS)
    with pytest.raises(ValueError, match=r"at \[0\] and at \[1\]"):
        fp16.metrics_of(chained)
    with pytest.raises(ValueError, match=r"that may differ: at \[0\] and at \[1\]"):
        jax.jit(fp16.loss_scale_of)(chained)
    with pytest.raises(ValueError, match=r"that may differ: at \[0\] and at \[1\]"):  # known of one of them alone
        jax.jit(lambda second: fp16.loss_scale_of((chained[0], second)))(chained[1])
    stacked = [chained[0]._replace(loss_scale=jnp.array(scales)) for scales in ([512.0, 512.0], [512.0, 4.0])]
    with pytest.raises(ValueError, match="that differ"):
        fp16.loss_scale_of(stacked)


def test_two_scales_that_agree_are_one(loose):
    assert fp16.loss_scale_of(optax.partition({"x": SCALE, "y": SCALE}, labels).init(PARAMS)) == 512.0


def test_a_state_with_nothing_of_ours_is_refused():
    state = optax.adam(0.1).init(PARAMS)
    with pytest.raises(ValueError, match="there is no loss scale in this optimizer state"):
        fp16.loss_scale_of(state)
    for function in (fp16.metrics_of, fp16.stuck):
        with pytest.raises(ValueError, match="there is nothing of optax_fp16 in this optimizer state"):
            function(state)


CHAINS = {
    "links": optax.chain(
        fp16.static_loss_scale(8.0), fp16.clip_by_global_norm_fp32(1.0), fp16.skip_if_nonfinite(optax.sgd(0.1))
    ),
    "nested": optax.chain(
        fp16.static_loss_scale(8.0),
        fp16.skip_if_nonfinite(optax.chain(fp16.clip_by_global_norm_fp32(1.0), optax.sgd(0.1))),
    ),
    "recipe": fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0, loss_scale=8.0),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_metrics_are_those_of_the_last_step(name, bad):
    """A clip behind the guard doesn't see a bad step: its norm is that of the step before."""
    tx = CHAINS[name]
    params = jnp.ones(2)
    _, state = tx.update(jnp.array([24.0, 32.0]), tx.init(params), params)
    metrics = fp16.metrics_of(state)
    assert (metrics["grad_norm"], metrics["clip_ratio"], metrics["grads_finite"]) == (5.0, 5.0, True)
    _, state = tx.update(jnp.array([bad, 1.0]), state, params)
    metrics = fp16.metrics_of(state)
    assert (metrics["grad_norm"], metrics["clip_ratio"], metrics["grads_finite"]) == (np.inf, np.inf, False)
    assert (metrics["applied_total"], metrics["skipped_total"], metrics["skipped_in_a_row"]) == (1, 1, 1)
    kinds = {"loss_scale": "f", "grad_norm": "f", "clip_ratio": "f", "grads_finite": "b"}
    assert all(value.dtype.kind == kinds.get(field, "i") for field, value in metrics.items())


def one_step(tx):
    """The state after one step in which something was clipped, skipped or not."""
    return tx.update(jnp.array([24.0, 32.0]), tx.init(jnp.ones(2)), jnp.ones(2))[1]


def everything():
    scale = fp16.dynamic_loss_scale(8.0, underflow="total")
    return fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0, loss_scale=scale)


KEYS = {
    "loss_scale", "steps_since_rescale", "overflows_at_floor", "grad_norm", "clip_ratio", "grads_finite", "applied_total",
    "skipped_total", "skipped_in_a_row", "underflow_share", "underflow_zero_share", "underflow_free_scale",
}  # fmt: skip


def test_every_metric_has_its_key_and_is_a_scalar_on_the_device_inside_jit_and_outside():
    state = one_step(everything())
    metrics = fp16.metrics_of(state)
    assert set(metrics) == KEYS
    assert all(isinstance(value, jax.Array) and value.shape == () for value in metrics.values())
    assert jax.device_get(jax.jit(fp16.metrics_of)(state)) == jax.device_get(metrics), (
        "so it needs no value on the host"
    )
    assert all(f"`{key}`" in fp16.metrics_of.__doc__ for key in KEYS)


def test_every_metric_is_the_same_under_pmap_and_in_nnx(loose):
    expected = jax.device_get(fp16.metrics_of(one_step(everything())))

    def step(grads):
        tx = everything()
        return tx.update(grads, tx.init(jnp.ones(2)), jnp.ones(2))[1]

    stacked = jax.pmap(step, axis_name="batch", devices=jax.devices()[:2])(jnp.tile(jnp.array([24.0, 32.0]), (2, 1)))
    for name, values in jax.device_get(fp16.metrics_of(stacked)).items():
        np.testing.assert_array_equal(values, [expected[name]] * 2, err_msg=name)

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    model = Model()
    optimizer = nnx.Optimizer(model, everything(), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(lambda _: jnp.array([24.0, 32.0]), nnx.state(model, nnx.Param)))
    for state in (optimizer, optimizer.opt_state):
        assert jax.device_get(fp16.metrics_of(state)) == expected


def test_without_a_loss_scale_the_other_metrics_are_there():
    inner = optax.chain(fp16.clip_by_global_norm_fp32(1.0), optax.sgd(0.1))
    metrics = fp16.metrics_of(one_step(fp16.skip_if_nonfinite(inner)))
    assert set(metrics) == {
        name for name in KEYS if "scale" not in name and "underflow" not in name and "floor" not in name
    }
    assert (metrics["grad_norm"], metrics["clip_ratio"], metrics["applied_total"]) == (40.0, 40.0, 1)


def test_a_run_is_stuck_after_as_many_skips_as_patience_says():
    tx = fp16.skip_if_nonfinite(optax.sgd(0.1))
    state = tx.init(jnp.ones(1))
    assert fp16.stuck(state, 1) is None
    for _ in range(2):
        _, state = tx.update(jnp.array([jnp.nan]), state)
    assert fp16.stuck(state, 3) is None
    assert fp16.stuck(state, 2).startswith("The last 2 steps were all skipped. If the scale")
    with pytest.raises(ValueError, match="patience must be a whole number of 1 or more"):
        fp16.stuck(state, 0)


def test_a_scale_without_a_guard_is_never_stuck_and_patience_is_50_by_default():
    assert fp16.stuck(fp16.static_loss_scale(8.0).init(None), 1) is None
    guard = fp16.skip_if_nonfinite(optax.sgd(0.1)).init(jnp.ones(1))
    assert fp16.stuck(guard._replace(skipped_in_a_row=jnp.int32(49))) is None
    assert fp16.stuck(guard._replace(skipped_in_a_row=jnp.int32(50)))


def test_a_falling_scale_is_told_apart_from_one_at_its_floor():
    tx = fp16.mixed_precision(optax.sgd(0.1))
    state = tx.init(jnp.ones(1))
    _, state = tx.update(jnp.array([jnp.nan]), state)
    assert "(loss scale 16384). If the scale is still falling, wait" in fp16.stuck(state, 1)
