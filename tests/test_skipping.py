"""A step whose gradients aren't finite: zero updates, an inner state untouched bit for bit, and counters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16 as fp16

HALF, BRAIN, FULL = jnp.float16, jnp.bfloat16, jnp.float32
BAD = [np.inf, -np.inf, np.nan]


def bits(tree):
    """The tree's leaves as bytes: NaN equals NaN here, and 0 differs from -0."""
    arrays = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in arrays]


def kinds(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize("bad", BAD)
def test_a_step_with_an_inf_leaves_adamw_bit_identical(bad):
    tx = fp16.skip_if_nonfinite(optax.adamw(0.1, weight_decay=0.1))
    params = {"w": jnp.array([0.3, -0.0, -2.0]), "b": jnp.array([1.0], HALF)}
    grads = {"w": jnp.array([1.0, 2.0, 3.0]), "b": jnp.array([0.5], HALF)}
    params, state = tx.apply(grads, tx.init(params), params)
    poisoned = {"w": grads["w"], "b": jnp.array([bad], HALF)}
    after, skipped = tx.apply(poisoned, state, params)
    assert bits(after) == bits(params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert (skipped.skipped_total, skipped.skipped_in_a_row, skipped.applied_total) == (1, 1, 1)
    assert not skipped.grads_finite
    updates, by_update = tx.update(poisoned, state, params)
    assert not any(jax.tree.leaves(jax.tree.map(jnp.any, updates)))
    assert bits(by_update) == bits(skipped)


def test_a_thousand_bad_steps_change_nothing_and_raise_nothing():
    tx = fp16.skip_if_nonfinite(optax.adam(0.1))
    params = jnp.array([1.0, 2.0])
    start = tx.init(params)

    @jax.jit
    def run(params, state):
        body = lambda carry, _: (tx.apply(jnp.array([jnp.inf, 0.0]), carry[1], carry[0]), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), None, 1000)[0]

    after, state = run(params, start)
    np.testing.assert_array_equal(after, params)
    assert (state.skipped_in_a_row, state.skipped_total, state.applied_total) == (1000, 1000, 0)
    assert bits(state.inner_state) == bits(start.inner_state)
    _, state = tx.apply(jnp.ones(2), state, params)
    assert (state.skipped_in_a_row, state.skipped_total, state.applied_total) == (0, 1000, 1)


def test_a_schedule_stands_still_on_a_skipped_step(loose):
    tx = fp16.skip_if_nonfinite(optax.sgd(optax.linear_schedule(1.0, 0.0, 10)))
    params = jnp.zeros(1)
    state, steps = tx.init(params), []
    for grad in (1.0, jnp.inf, 1.0):
        updates, state = tx.update(jnp.array([grad]), state, params)
        steps.append(float(updates[0]))
    np.testing.assert_allclose(steps, [-1.0, 0.0, -0.9], rtol=1e-6)


def test_an_accumulator_inside_never_sees_the_bad_micro_batch(loose):
    tx = fp16.skip_if_nonfinite(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    params, seen = jnp.zeros(1), []
    state = tx.init(params)
    for grad in (1.0, jnp.inf, 1.0, 1.0, 1.0, 1.0):
        params, state = tx.apply(jnp.array([grad]), state, params)
        seen.append(float(params[0]))
    assert seen == [0, 0, -1, -1, -2, -2]


@pytest.mark.parametrize("mu_dtype", [None, BRAIN])
@pytest.mark.parametrize(("param_dtype", "grad_dtype"), list(itertools.product((FULL, HALF, BRAIN), repeat=2)))
def test_every_pair_of_dtypes_gives_both_branches_one_type(param_dtype, grad_dtype, mu_dtype):
    """Applied and skipped, eager, in jit and as a scan's carry."""
    tx = fp16.skip_if_nonfinite(optax.adam(0.1, mu_dtype=mu_dtype))
    params = jnp.ones(2, param_dtype)
    good, bad = jnp.ones(2, grad_dtype), jnp.array([jnp.inf, 1], grad_dtype)
    state = tx.init(params)

    @jax.jit
    def run(params, state, grads):
        def body(carry, grads):
            updates, _ = tx.update(grads, carry[1], carry[0])
            return tx.apply(grads, carry[1], carry[0]), updates

        return jax.lax.scan(body, (params, state), grads)

    (after, last), updates = run(params, state, jnp.stack([good, bad]))
    assert kinds((after, last)) == kinds((params, state))
    assert updates.dtype == jnp.float32
    np.testing.assert_allclose(updates, [[-0.1] * 2, [0.0] * 2], rtol=1e-3)
    for grads, want in ((good, updates[0]), (bad, updates[1])):
        eager, eager_state = tx.update(grads, state, params)
        assert eager.dtype == updates.dtype
        np.testing.assert_allclose(eager, want, rtol=1e-6)
        assert kinds(eager_state) == kinds(state)
    assert (last.applied_total, last.skipped_total) == (1, 1)
    np.testing.assert_allclose(np.asarray(after, np.float32), 0.9, rtol=5e-3)


def test_random_keys_counts_and_integers_in_the_inner_state_stand_still(loose):
    tx = fp16.skip_if_nonfinite(
        optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(0)), optax.sgd(1.0, momentum=0.9))
    )
    params = jnp.ones(2)
    step = jax.jit(tx.apply)
    params, state = step(jnp.ones(2), tx.init(params), params)
    _, after = step(jnp.array([jnp.nan, 1.0]), state, params)
    assert bits(after.inner_state) == bits(state.inner_state)
    _, moved = step(jnp.ones(2), state, params)
    assert bits(moved.inner_state) != bits(state.inner_state)


def test_half_precision_params_start_adam_in_fp32():
    state = fp16.skip_if_nonfinite(optax.adam(0.1)).init(jnp.ones(2, HALF))
    assert state.inner_state[0].nu.dtype == FULL


def test_leaves_that_are_no_gradients_pass_the_guard():
    grads = {"f": np.zeros(2, jax.dtypes.float0), "n": None, "m": optax.MaskedNode(), "i": jnp.arange(2)}
    grads |= {"k": jax.random.key(3, impl="rbg")}
    tx = fp16.skip_if_nonfinite(optax.identity())
    for bad in (1.0, jnp.inf):
        grads["w"] = jnp.array([bad])
        updates, state = tx.update(grads, tx.init(grads))
        jitted, _ = jax.jit(lambda w, grads=grads, state=state: tx.update({**grads, "w": w}, state))(grads["w"])
        for out in (updates, jitted):
            assert out["f"].dtype == jax.dtypes.float0
            assert out["n"] is None
            assert isinstance(out["m"], optax.MaskedNode)
            assert out["k"].dtype == grads["k"].dtype
            assert out["i"].dtype == jnp.int32


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, factor, **extra):
        return jax.tree.map(lambda u: u * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = fp16.skip_if_nonfinite(inner)
    updates, _ = tx.update(jnp.ones(1), tx.init(None), factor=3.0)
    assert updates[0] == 3.0
    params, _ = tx.apply(jnp.ones(1), tx.init(None), jnp.zeros(1), factor=3.0)
    assert params[0] == 3.0


@pytest.mark.parametrize(
    "inside",
    [
        optax.chain(fp16.dynamic_loss_scale(), optax.adam(0.1)),
        fp16.static_loss_scale(8.0),
        fp16.mixed_precision(optax.sgd(0.1)),
        optax.masked(fp16.dynamic_loss_scale(), True),
    ],
)
@pytest.mark.parametrize("wrapper", [fp16.skip_if_nonfinite, fp16.mixed_precision])
def test_a_guard_around_a_loss_scale_is_refused_and_the_right_order_shown(wrapper, inside):
    with pytest.raises(ValueError, match=r"(?s)freeze for ever.*optax\.chain\(\s*optax_fp16\.dynamic_loss_scale"):
        wrapper(inside).init(jnp.ones(2))


def test_an_inner_state_that_changes_shape_is_refused_in_words():
    grows = optax.GradientTransformation(lambda p: {"a": jnp.zeros(1)}, lambda u, s, p=None: (u, {"a": jnp.zeros(2)}))
    other = optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, {"a": jnp.zeros(2)}))
    for inner, words in ((grows, r"state\['a'\] has shape \(1,\) before"), (other, "another structure than its init")):
        tx = fp16.skip_if_nonfinite(inner)
        with pytest.raises(TypeError, match=words):
            tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def test_apply_gradients_is_update_and_apply_for_a_plain_transformation():
    params, grads = jnp.array([1.0, 2.0], HALF), jnp.array([0.5, 0.25])
    after, state = fp16.apply_gradients(optax.sgd(1.0), grads, optax.sgd(1.0).init(params), params)
    np.testing.assert_array_equal(after, np.array([0.5, 1.75], np.float16))
    assert after.dtype == HALF
    assert state == optax.sgd(1.0).init(params)


@pytest.mark.parametrize("wrong", [None, 3, optax.adam, optax.EmptyState(), (1, 2), (len, len)])
def test_what_is_no_transformation_is_refused(wrong):
    with pytest.raises(TypeError, match="inner must be an Optax transformation"):
        fp16.skip_if_nonfinite(wrong)
    with pytest.raises(TypeError, match="tx must be an Optax transformation"):
        fp16.apply_gradients(wrong, jnp.ones(1), (), jnp.ones(1))


@pytest.mark.parametrize("tx", [fp16.skip_if_nonfinite(optax.sgd(0.1)), fp16.mixed_precision(optax.sgd(0.1))])
def test_parameters_and_state_in_the_wrong_order_are_refused_with_the_right_one(tx):
    params, order = {"w": jnp.ones(2)}, r"not \{'w'.* The order is apply_gradients\(tx, grads, opt_state, params\)"
    with pytest.raises(TypeError, match=order):
        fp16.apply_gradients(tx, params, params, tx.init(params))
    with pytest.raises(TypeError, match=order):
        tx.update(params, params, tx.init(params))


def test_debug_nans_has_nothing_to_say_of_a_skipped_step():
    tx = optax.chain(
        fp16.dynamic_loss_scale(), fp16.clip_by_global_norm_fp32(1.0), fp16.skip_if_nonfinite(optax.adam(0.1))
    )
    params = jnp.ones(2)

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(lambda w: jnp.sum(w * x) * fp16.loss_scale_of(state))(params)
        return fp16.apply_gradients(tx, grads / grads * jnp.inf, state, params)

    with jax.debug_nans(True):
        after, state = step(params, tx.init(params), jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(after, params)
    assert fp16.metrics_of(state)["skipped_total"] == 1


def test_before_the_first_step_nothing_is_counted_and_nothing_was_wrong():
    state = fp16.skip_if_nonfinite(optax.sgd(1.0)).init(jnp.zeros(1))
    counts = (state.skipped_total, state.skipped_in_a_row, state.applied_total)
    assert [count.item() for count in counts] == [0, 0, 0]
    assert (state.grad_norm.item(), state.grads_finite.item()) == (0.0, True)


@pytest.mark.parametrize("wrap", [fp16.skip_if_nonfinite, fp16.mixed_precision, fp16.master_weights])
def test_a_transformation_that_knows_no_extra_arguments_is_spared_them(wrap):
    plain = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state))
    tx, params = wrap(plain), jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params, value=1.0)
    assert updates.shape == (2,)
    applied, _ = fp16.apply_gradients(tx, params, tx.init(params), params, value=1.0)
    assert applied.shape == (2,)


def test_moments_of_one_half_precision_parameter_among_others_are_fp32():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    state = fp16.skip_if_nonfinite(optax.adam(0.1)).init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "nu"))} == {np.dtype(np.float32)}


@pytest.mark.parametrize("wrap", [fp16.skip_if_nonfinite, fp16.mixed_precision])
def test_the_inner_transformation_sees_half_precision_parameters_in_fp32(wrap):
    seen = []

    def update(updates, state, params=None):
        seen.append(params.dtype)
        return updates, state

    tx, params = wrap(optax.GradientTransformation(lambda params: (), update)), jnp.ones(2, HALF)
    tx.update(params, tx.init(params), params)
    tx.apply(params, tx.init(params), params)
    assert set(seen) == {np.dtype(np.float32)}


def test_masters_inside_see_the_parameters_as_they_are():
    params = jnp.full(2, 100.0, jnp.float16)
    masters = fp16.master_weights(optax.sgd(0.01))  # below fp16's resolution there, and so no update at first
    guarded = fp16.skip_if_nonfinite(masters)
    state = guarded.init(params)
    updates, state = guarded.update(jnp.ones(2), state, params)
    np.testing.assert_array_equal(updates, 0.0)
    np.testing.assert_allclose(optax.tree.get(state, "master_params"), 99.99, rtol=1e-6)
