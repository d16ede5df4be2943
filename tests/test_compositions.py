"""Every transform in and around what users put it together with: the good steps are plain Optax's, the bad one never was.

Each cell takes three steps, the second with an Inf, and ends where the partner alone ends after the other two.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import optax_fp16 as fp16

pytestmark = pytest.mark.usefixtures("loose")

SCALE = 8.0
PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.25, 3.0, -1.0])}
GRADS = [{"a": jnp.array([0.5, 1.0, -0.25]) * k, "b": jnp.array([-1.0, 0.125, 2.0]) / k} for k in (1.0, 2.0, 4.0)]

# name: (whether the gradients come scaled, the parameters' dtype, the composition around a partner)
TRANSFORMS = {
    "dynamic_loss_scale": (True, jnp.float32, lambda p: optax.chain(dynamic(), fp16.skip_if_nonfinite(p))),
    "static_loss_scale": (
        True,
        jnp.float32,
        lambda p: optax.chain(fp16.static_loss_scale(SCALE), fp16.skip_if_nonfinite(p)),
    ),
    "clip": (
        False,
        jnp.float32,
        lambda p: fp16.skip_if_nonfinite(
            optax.chain(fp16.clip_by_global_norm_fp32(1e3), optax.with_extra_args_support(p))
        ),
    ),
    "skip_if_nonfinite": (False, jnp.float32, fp16.skip_if_nonfinite),
    "master_weights": (False, jnp.float16, lambda p: fp16.skip_if_nonfinite(fp16.master_weights(p))),
    "remainders": (False, jnp.bfloat16, lambda p: fp16.skip_if_nonfinite(fp16.master_weights(p, remainder=True))),
    "mixed_precision": (
        True,
        jnp.float16,
        lambda p: fp16.mixed_precision(p, max_norm=1e3, loss_scale=dynamic(), half_params=True),
    ),
}


def dynamic():
    return fp16.dynamic_loss_scale(SCALE, min_scale=SCALE)


def scaled_by_value():
    """An optimizer that needs an extra argument."""

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        return jax.tree.map(lambda u: -value * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def labels(params):
    return {"a": "x", "b": "y"}


PARTNERS = {
    "multi_steps": optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.05, 2)),
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": False}),
    "partition": optax.partition({"x": optax.adam(0.1), "y": optax.sgd(0.1)}, labels),
    "schedule_free": contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
    "lookahead": optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
    "flatten": optax.flatten(optax.adam(0.1)),
    "lion": optax.lion(0.1),
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1),
    "adam with mu_dtype": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "needs params": optax.adamw(0.1, weight_decay=0.5),
    "needs an extra argument": scaled_by_value(),
    "typed key in the state": optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(1)), optax.sgd(0.1)),
    "complex params": optax.adam(0.1),
}


def rows_of(table):
    """The names; MultiSteps compiles its two branches anew at every eager step, which is slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name == "multi_steps" else name for name in table]


def three_steps(step, params, state, scale):
    """The parameters after GRADS with an Inf in the second, and the state's types at each step."""
    for index, true in enumerate(GRADS):
        grads = jax.tree.map(lambda g: g * scale, true)
        if index == 1:
            grads["a"] = grads["a"].at[1].set(jnp.inf)
        params, state = step(grads, state, params)
    return params, state


def plainly(partner, params, extra):
    """Where the partner alone ends, on the true gradients of the first and the last step."""
    tx = optax.with_extra_args_support(partner)
    state = tx.init(params)
    for grads in (GRADS[0], GRADS[2]):
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


def close(got, want, dtype):
    rtol = {jnp.float32: 1e-6, jnp.float16: 1e-3, jnp.bfloat16: 8e-3}[dtype]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.asarray(a, np.complex64)).all()
        np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("partner", rows_of(PARTNERS))
def test_a_partner_inside_takes_the_good_steps_and_never_sees_the_bad_one(transform, partner):
    is_scaled, dtype, around = TRANSFORMS[transform]
    tx, extra = around(PARTNERS[partner]), {"value": 0.5} if partner == "needs an extra argument" else {}
    full = dict(PARAMS)
    if partner == "complex params":
        full["b"] = full["b"] + 1j * full["a"]
    params = jax.tree.map(lambda p: p if jnp.iscomplexobj(p) else p.astype(dtype), full)
    if partner == "lookahead":
        full, params = (optax.LookaheadParams.init_synced(tree) for tree in (full, params))
    state = tx.init(params)
    types = jax.tree.map(lambda x: (x.shape, x.dtype), state)

    def step(grads, state, params):
        params, state = fp16.apply_gradients(tx, grads, state, params, **extra)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
        return params, state

    got, state = three_steps(step, params, state, SCALE if is_scaled else 1.0)
    close(got, plainly(PARTNERS[partner], full, extra), dtype)
    assert fp16.metrics_of(state)["skipped_total"] == 1
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state) if _is_number(x) and x.ndim)


def _is_number(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


OUTSIDE = {
    # MultiSteps sees the Inf before the guard does and keeps it for ever (0 · Inf): it belongs inside, where the test above
    # has it. Outside, its own test must keep the bad micro-batch away, and then the loss scale never learns of it.
    "multi_steps": lambda tx: optax.MultiSteps(
        tx, 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(
        rate=1.0
    ),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": True}),
    "partition": lambda tx: optax.partition({"x": tx}, {"a": "x", "b": "x"}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 10),
    "flatten": optax.flatten,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("wrapper", rows_of(OUTSIDE))
def test_a_wrapper_outside_gets_the_same_updates(transform, wrapper):
    is_scaled, dtype, around = TRANSFORMS[transform]
    if wrapper == "flatten" and transform in ("master_weights", "remainders"):
        dtype = (
            jnp.float32
        )  # optax.flatten concatenates the parameters in their own dtype; half ones come back as they were
    tx = OUTSIDE[wrapper](around(optax.sgd(0.1)))
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    got, state = three_steps(partial(fp16.apply_gradients, tx), params, tx.init(params), SCALE if is_scaled else 1.0)
    close(got, plainly(optax.sgd(0.1), PARAMS, {}), dtype)
    if wrapper not in ("multi_steps", "apply_if_finite"):  # those keep the bad step from us altogether
        assert fp16.metrics_of(state)["skipped_total"] == 1


def in_scan(step, params, state, grads):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    return jax.jit(lambda c, g: jax.lax.scan(lambda c, g: (step(g, c[1], c[0]), None), c, g)[0])(
        (params, state), stacked
    )


def one_by_one(step, params, state, grads):
    for g in grads:
        params, state = step(g, state, params)
    return params, state


def in_vmap(step, params, state, grads):
    """Two models side by side, of which only the first meets an Inf."""
    double = partial(jax.tree.map, lambda leaf: jnp.stack([leaf, leaf]))
    params, state = double(params), double(state)
    mapped = jax.jit(jax.vmap(step))
    for index, g in enumerate(grads):
        g = double(g)
        if index == 1:
            g["a"] = g["a"].at[1].set(0.0)
        params, state = mapped(g, state, params)
    assert fp16.metrics_of(state)["skipped_total"].tolist() == [1, 0]
    return jax.tree.map(lambda leaf: leaf[0], (params, state))


def in_pmap(step, params, state, grads):
    double = partial(jax.tree.map, lambda leaf: jnp.stack([leaf, leaf]))
    mapped = jax.pmap(step, devices=jax.devices()[:2])
    params, state = one_by_one(mapped, double(params), double(state), map(double, grads))
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[1]), (params, state))


def in_shard_map(step, params, state, grads):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()))
    return one_by_one(mapped, params, state, grads)


def under_debug_nans(step, params, state, grads):
    with jax.debug_nans(True):
        return one_by_one(jax.jit(step), params, state, grads)


def under_x64(step, params, state, grads):
    with jax.enable_x64(True):
        return one_by_one(jax.jit(step), params, state, grads)


def under_fast_math(step, params, state, grads):
    """With every liberty that XLA for CPU can be given, that of taking no number for an Inf or a NaN included."""
    options = {
        "xla_cpu_enable_fast_math": True,
        "xla_cpu_fast_math_honor_nans": False,
        "xla_cpu_fast_math_honor_infs": False,
    }
    options |= {"xla_cpu_fast_math_honor_division": False, "xla_cpu_fast_math_honor_functions": False}
    compiled = jax.jit(step).lower(grads[0], state, params).compile(compiler_options=options)
    return one_by_one(compiled, params, state, grads)


HOMES = {
    "eager": one_by_one,
    "jit": lambda step, *rest: one_by_one(jax.jit(step), *rest),
    "scan": in_scan,
    "vmap": in_vmap,
    "pmap": in_pmap,
    "shard_map": in_shard_map,
    "checkpoint": lambda step, *rest: one_by_one(jax.jit(jax.checkpoint(step)), *rest),
    "debug_nans": under_debug_nans,
    "enable_x64": under_x64,
    "fast math": under_fast_math,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("home", HOMES)
def test_it_works_wherever_jax_runs_it(transform, home):
    is_scaled, dtype, around = TRANSFORMS[transform]
    partner = optax.sgd(0.1, momentum=0.5)
    tx = around(partner)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    state = tx.init(params)
    grads = [jax.tree.map(lambda g: g * (SCALE if is_scaled else 1.0), true) for true in GRADS]
    grads[1]["a"] = grads[1]["a"].at[1].set(jnp.inf)
    got, after = HOMES[home](partial(fp16.apply_gradients, tx), params, state, grads)
    close(got, plainly(partner, PARAMS, {}), dtype)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert fp16.metrics_of(after)["skipped_total"] == 1
