"""The recipe, and that both ways of writing it as a chain give the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16 as fp16
from optax_fp16._elementwise import _inside
from tests.meshes import counts_programs
from tests.transforms import bits


def ways(inner, max_norm, scale):
    clip = fp16.clip_by_global_norm_fp32(max_norm)
    return {
        "recipe": fp16.mixed_precision(inner, max_norm=max_norm, loss_scale=scale),
        "links": optax.chain(scale, clip, fp16.skip_if_nonfinite(inner)),
        "nested": optax.chain(scale, fp16.skip_if_nonfinite(optax.chain(clip, inner))),
    }


@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
def test_links_nested_and_recipe_go_the_same_way(max_norm):
    """Bit for bit over 30 steps with overflows, back-offs and growths; op by op, so that no product is fused."""
    scale = fp16.dynamic_loss_scale(2.0**10, growth_interval=4)
    txs = ways(optax.adamw(0.1), max_norm, scale)
    params = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.1], jnp.float16)}
    runs = {name: (params, tx.init(params)) for name, tx in txs.items()}
    rng = np.random.default_rng(0)
    scales = set()
    for step in range(30):
        true = {"w": rng.standard_normal(3) * 10.0 ** rng.integers(-3, 2), "b": rng.standard_normal(1)}
        for name, tx in txs.items():
            params, state = runs[name]
            current = float(fp16.loss_scale_of(state))
            grads = {leaf: jnp.asarray(value, jnp.float32) * current for leaf, value in true.items()}
            if step in (7, 8, 20):
                grads["w"] = grads["w"].at[1].set(jnp.nan)
            runs[name] = fp16.apply_gradients(tx, grads, state, params)
        scales.add(current)
        assert bits(runs["recipe"][0]) == bits(runs["links"][0]) == bits(runs["nested"][0])
        metrics = [fp16.metrics_of(state) for _, state in runs.values()]
        for field in ("loss_scale", "skipped_total", "applied_total", "grads_finite", "grad_norm", "clip_ratio"):
            assert len({float(m[field]) for m in metrics}) == 1, field
    assert len(scales) > 3
    assert metrics[0]["skipped_total"] >= 3


def test_the_whole_chain_is_a_scan_carry(loose):
    """Five steps, fp16 parameters, fp32 gradients."""
    params = {"w": jnp.ones(3, jnp.float16)}
    for tx in ways(optax.adamw(0.1), 1.0, fp16.dynamic_loss_scale(8.0, growth_interval=2)).values():

        def step(carry, grad, tx=tx):
            params, state = carry
            return fp16.apply_gradients(tx, {"w": grad}, state, params), fp16.loss_scale_of(state)

        grads = jnp.ones((5, 3)).at[3, 1].set(jnp.inf)
        (after, _), scales = jax.jit(lambda c, g, step=step: jax.lax.scan(step, c, g))((params, tx.init(params)), grads)
        assert after["w"].dtype == jnp.float16
        assert scales.tolist() == [8.0, 8.0, 16.0, 16.0, 8.0]


def test_half_params_trains_below_fp16s_resolution():
    tx = fp16.mixed_precision(optax.sgd(1.0), loss_scale=8.0, half_params=True)
    params = jnp.array([1.0], jnp.float16)
    state = tx.init(params)
    step = jax.jit(tx.apply)
    for _ in range(10):
        params, state = step(jnp.array([-8e-4]), state, params)
    np.testing.assert_array_equal(params, np.array([1.001], np.float16))


def test_a_tiny_gradient_survives_the_norm_at_every_scale():
    tx = fp16.mixed_precision(optax.sgd(1.0), max_norm=1.0, loss_scale=2.0**15)
    params = jnp.zeros(1)
    params, state = tx.apply(jnp.array([6e-8], jnp.float16), tx.init(params), params)
    np.testing.assert_allclose(params, [-(2.0**-24) / 2.0**15])
    assert fp16.metrics_of(state)["applied_total"] == 1


def test_what_is_no_gradient_passes_through_the_recipe():
    params = {"w": jnp.ones(1), "n": None, "m": optax.MaskedNode()}
    tx = fp16.mixed_precision(optax.sgd(1.0), max_norm=1.0, loss_scale=2.0)
    for update in (tx.update, jax.jit(tx.update)):
        grads = {"w": jnp.array([1.0]), "n": None, "m": optax.MaskedNode()}
        updates, _ = update(grads, tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], [-0.5])
        assert (updates["n"], updates["m"]) == (None, optax.MaskedNode())


@pytest.mark.parametrize(
    ("given", "scale"),
    [(None, 2.0**15), (1.0, 1.0), (8, 8.0), (jnp.float16(4), 4.0), (fp16.static_loss_scale(2.0), 2.0)],
)
def test_the_loss_scale_is_a_number_a_link_or_dynamic(given, scale):
    state = fp16.mixed_precision(optax.sgd(1.0), loss_scale=given).init(jnp.ones(1))
    assert fp16.loss_scale_of(state) == scale
    assert hasattr(state.scale_state, "finite_in_a_row") == (given is None)


@pytest.mark.parametrize(
    "wrong", ["dynamic", True, fp16.dynamic_loss_scale, optax.sgd(1.0), (1.0,), [1.0], -1.0, float("nan")]
)
def test_a_wrong_loss_scale_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="loss_scale"):
        fp16.mixed_precision(optax.sgd(1.0), loss_scale=wrong)


@pytest.mark.parametrize("wrong", ["8", True, (8.0,), fp16.dynamic_loss_scale, optax.sgd(1.0)])
def test_what_is_no_number_is_told_what_a_loss_scale_can_be(wrong):
    with pytest.raises(TypeError, match=r"loss_scale must be None \(dynamic\), a number \(static\), or what"):
        fp16.mixed_precision(optax.sgd(1.0), loss_scale=wrong)
    with pytest.raises(TypeError, match=r"loss_scale must be None \(dynamic\), a number"):
        jax.jit(lambda scale: fp16.mixed_precision(optax.sgd(1.0), loss_scale=scale).init(None))(8.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"half_params": 1}, "half_params"),
        ({"max_norm": -1}, "max_norm"),
        ({"axis_name": 3}, "axis_name"),
        ({"inner": 1}, "inner"),
    ],
)
def test_a_wrong_argument_is_named(arguments, name):
    with pytest.raises((TypeError, ValueError), match=name):
        fp16.mixed_precision(**({"inner": optax.sgd(1.0)} | arguments))


def equations(jaxpr):
    return sum(1 + sum(map(equations, _inside(equation.params))) for equation in jaxpr.eqns)


@counts_programs
@pytest.mark.parametrize("form", ["apply", "update"])
@pytest.mark.usefixtures("loose")
def test_an_array_costs_its_optimizer_step_once_and_ten_equations_to_trace(form):
    """A tree may have thousands of arrays, and both ways to guard them are in one trace."""
    inner = optax.adamw(1e-3)
    recipe = fp16.mixed_precision(inner, max_norm=1.0)

    def traced(tx, count):
        params = [jax.ShapeDtypeStruct((2, 3), jnp.float32)] * count
        step = tx.apply if tx is recipe and form == "apply" else tx.update
        return equations(jax.make_jaxpr(step)(params, jax.eval_shape(tx.init, params), params).jaxpr)

    ours, bare = ((traced(tx, 30) - traced(tx, 10)) / 20 for tx in (recipe, inner))
    assert ours <= bare + 10
