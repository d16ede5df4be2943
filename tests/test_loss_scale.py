"""The scale's rule against plain state machines, its knobs, and the links that divide by it."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_fp16 as fp16
from optax_fp16.loss_scale import ScaleRule, next_loss_scale

FREE = {"min_scale": 2.0**-120, "max_scale": 2.0**120}


@partial(jax.jit, static_argnames="tolerance")
def _scales(patterns, start, knobs, tolerance):
    """f32[patterns, steps]: the scale after each step of each pattern of finite steps, in one compiled scan."""
    rule = ScaleRule(tolerance=tolerance, **knobs)

    def step(state, finite):
        state = next_loss_scale(state, finite, rule)
        return state, state.loss_scale

    state = fp16.dynamic_loss_scale().init(None)
    state = state._replace(loss_scale=start, hysteresis_left=rule.hysteresis)
    return jax.vmap(lambda pattern: jax.lax.scan(step, state, pattern)[1])(patterns)


def scales_of(patterns, start=2.0**15, *, tolerance=0.0, **knobs):
    defaults = {"growth_interval": 2000, "growth_factor": 2.0, "backoff_factor": 0.5, "hysteresis": 1}
    knobs = {**defaults, "min_scale": 1.0, "max_scale": 2.0**24, **knobs}
    # Operands, so that one program serves all rules.
    operands = {name: (np.float32 if isinstance(knob, float) else np.int32)(knob) for name, knob in knobs.items()}
    return np.asarray(_scales(jnp.asarray(patterns), jnp.float32(start), operands, tolerance))


def gluonnlp(pattern, start, interval, tolerance, factor=2.0):
    """GluonNLP's scaler, in its own terms: the step numbers of the last overflow and of the last rescale."""
    scale, last_overflow, last_rescale, overflows, out = start, -1, -1, 0, []
    for number, finite in enumerate(pattern):
        if not finite:
            last_overflow, overflows = number, overflows + 1
            if overflows / (number - last_rescale) >= tolerance:
                scale, last_rescale, overflows = scale / factor, number, 0
        elif (number - last_overflow) % interval == 0:
            scale, last_rescale = scale * factor, number
        out.append(scale)
    return out


def hysteretic(pattern, start, interval, hysteresis, low, high, growth=2.0, backoff=0.5):
    """Megatron's reading of hysteresis: overflows are forgiven until the budget is used up; growth refills it."""
    scale, good, budget, out = start, 0, hysteresis, []
    for finite in pattern:
        if finite:
            good += 1
            if good == interval:
                scale, good, budget = min(scale * growth, high), 0, hysteresis
        else:
            good, budget = 0, max(budget - 1, 0)
            if budget == 0:
                scale = max(scale * backoff, low)
        out.append(scale)
    return out


def random_patterns(seed, count, steps, rates):
    rng = np.random.default_rng(seed)
    return rng.random((count, steps)) >= rng.choice(rates, (count, 1))


def test_the_rule_with_tolerance_is_gluonnlps_over_random_overflow_patterns():
    """3,000 patterns of 600 steps, overflow rates from none to 15%, around the tolerance of one in a hundred."""
    patterns = random_patterns(0, 3000, 600, [0.0, 0.003, 0.008, 0.01, 0.013, 0.03, 0.15])
    got = scales_of(patterns, growth_interval=50, tolerance=0.01, **FREE)
    want = [gluonnlp(pattern, 2.0**15, 50, 0.01) for pattern in patterns.tolist()]
    np.testing.assert_array_equal(got, want)


def test_the_rule_with_gluonnlps_own_numbers_is_its_scaler_for_ten_thousand_steps():
    patterns = random_patterns(1, 40, 10_000, [0.0, 0.0002, 0.0008, 0.002, 0.01, 0.012])
    patterns[-1] = np.arange(1, 10_001) % 100 != 0  # exactly one in a hundred, which is at the tolerance
    got = scales_of(patterns, growth_interval=2000, tolerance=0.01, **FREE)
    want = [gluonnlp(pattern, 2.0**15, 2000, 0.01) for pattern in patterns.tolist()]
    np.testing.assert_array_equal(got, want)
    assert want[-1][99] == 2.0**14


@pytest.mark.parametrize(
    ("hysteresis", "interval", "bounds"), [(1, 7, (1.0, 2.0**24)), (2, 5, (2.0**-3, 2.0**20)), (3, 1, (4.0, 2.0**17))]
)
def test_the_rule_with_hysteresis_is_a_plain_state_machine(hysteresis, interval, bounds):
    patterns = random_patterns(hysteresis, 300, 200, [0.02, 0.1, 0.3, 0.9])
    knobs = {"hysteresis": hysteresis, "growth_interval": interval, "min_scale": bounds[0], "max_scale": bounds[1]}
    want = [hysteretic(pattern, 2.0**15, interval, hysteresis, *bounds) for pattern in patterns.tolist()]
    np.testing.assert_array_equal(scales_of(patterns, **knobs), want)


@pytest.mark.parametrize(
    ("pattern", "start", "knobs", "want"),
    [
        ("FFIFFFFFI", 8, {"growth_interval": 3}, [8, 8, 4, 4, 4, 8, 8, 8, 4]),
        ("IIII", 65536, {"hysteresis": 2}, [65536, 32768, 16384, 8192]),
        ("I" * 9, 4, {"min_scale": 2.0**-5}, [2, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125, 0.03125]),
        ("IIFIFI", 16, {"hysteresis": 2, "growth_interval": 1}, [16, 8, 16, 16, 32, 32]),
    ],
    ids=["growth on exactly the third", "hysteresis is used up once", "the floor holds", "growth refills hysteresis"],
)
def test_the_rule_on_cases_worked_by_hand(pattern, start, knobs, want):
    assert scales_of([[c == "F" for c in pattern]], start, **knobs)[0].tolist() == want


def test_three_hundred_growths_end_at_max_scale():
    scales = scales_of(np.ones((1, 300), bool), growth_interval=1, max_scale=2.0**24)
    assert scales[0, -1] == 2.0**24
    assert np.isfinite(scales).all()


def test_an_overflow_below_the_tolerance_leaves_the_scale():
    pattern = np.ones((1, 250), bool)
    pattern[0, [9, 199]] = False  # steps 10 and 200
    scales = scales_of(pattern, tolerance=0.05)[0]
    assert (scales[:9] == 2.0**15).all()
    assert (scales[9:] == 2.0**14).all()


def test_fifteen_in_25_meet_a_tolerance_of_six_tenths_though_fp32_rounds_it_up():
    tx = fp16.dynamic_loss_scale(8.0, tolerance=0.6)
    state = tx.init(None)._replace(overflows_counted=jnp.int32(14), steps_since_rescale=jnp.int32(24))
    assert tx.adjust(state, jnp.bool_(False)).loss_scale == 4.0


def test_one_in_n_meets_a_tolerance_of_one_in_n_and_no_more():
    """Whatever 1/n rounds to in fp32: the n-th step since the last rescale is the first overflow."""
    for n in (2, 3, 7, 10, 49, 99, 100, 101, 167, 1000, 3000, 99_999):
        tx = fp16.dynamic_loss_scale(8.0, tolerance=1 / n)
        state = tx.init(None)._replace(steps_since_rescale=jnp.int32(n - 1))
        assert tx.adjust(state, jnp.bool_(False)).loss_scale == 4.0
        state = state._replace(steps_since_rescale=jnp.int32(n))
        assert tx.adjust(state, jnp.bool_(False)).loss_scale == 8.0


def test_an_interval_shortened_between_two_runs_still_grows():
    tx = fp16.dynamic_loss_scale(8.0, growth_interval=10)
    state = tx.init(None)._replace(finite_in_a_row=jnp.int32(9))
    shorter = fp16.dynamic_loss_scale(8.0, growth_interval=3)
    assert shorter.adjust(state, jnp.bool_(True)).loss_scale == 16.0


@given(
    st.lists(st.booleans(), min_size=1, max_size=64),
    st.integers(0, 20),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_scale_stays_a_power_of_two_within_its_bounds(pattern, exponent, interval, hysteresis, tolerance):
    padded = pattern + [True] * (64 - len(pattern))
    knobs = {"growth_interval": interval, "hysteresis": hysteresis, "max_scale": 2.0**20}
    scales = scales_of([padded], 2.0**exponent, tolerance=tolerance, **knobs)[0, : len(pattern)]
    assert all(1.0 <= scale <= 2.0**20 for scale in scales)
    assert all(np.frexp(scale)[0] == 0.5 for scale in scales)
    # Growth on exactly the interval-th finite step since the last overflow or growth, and at no other.
    in_a_row, before = 0, 2.0**exponent
    for finite, scale in zip(pattern, scales, strict=True):
        in_a_row = in_a_row + 1 if finite else 0
        grew = finite and in_a_row == interval
        assert scale == (min(2 * before, 2.0**20) if grew else before) or not finite
        assert finite or scale in (before, max(before / 2, 1.0))
        in_a_row, before = 0 if grew else in_a_row, scale


def test_a_scale_given_in_fp16_is_kept_in_fp32():
    tx = fp16.dynamic_loss_scale(jnp.float16(2**15), growth_interval=1)
    state = tx.init(jnp.ones(2, jnp.float16))
    _, state = tx.update(jnp.ones(2, jnp.float16), state)
    assert state.loss_scale.dtype == jnp.float32
    assert state.loss_scale == 65536.0


def test_a_small_fp16_gradient_survives_the_division():
    tx = fp16.static_loss_scale(2.0**16)
    updates, _ = tx.update(jnp.array([2.0**-10], jnp.float16), tx.init(None))
    assert updates.dtype == jnp.float32
    np.testing.assert_array_equal(updates, [2.0**-26])


def test_gradients_are_divided_by_the_scale_of_their_own_forward_pass():
    tx = fp16.dynamic_loss_scale(8.0, growth_interval=1)
    updates, state = tx.update(jnp.array([8.0]), tx.init(None))
    assert (updates[0], state.loss_scale) == (1.0, 16.0)
    updates, state = tx.update(jnp.array([jnp.inf, 16.0]), state)
    assert (updates[1], state.loss_scale) == (1.0, 8.0)


def test_micro_batches_with_different_scales_have_the_mean_of_their_true_gradients(loose):
    tx = optax.chain(fp16.dynamic_loss_scale(16.0, growth_interval=100), optax.MultiSteps(optax.sgd(1.0), 2))
    params = jnp.zeros(1)
    state = tx.init(params)
    _, state = tx.update(jnp.array([16.0]), state, params)
    state = (state[0]._replace(loss_scale=jnp.float32(8.0)), *state[1:])
    updates, _ = tx.update(jnp.array([8.0]), state, params)
    np.testing.assert_array_equal(updates, [-1.0])


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**15])
def test_the_clipped_gradient_does_not_depend_on_the_scale(scale):
    tx = optax.chain(fp16.static_loss_scale(scale), fp16.clip_by_global_norm_fp32(1.0))
    for true, want in (([0.5], [0.5]), ([3.0, 4.0], [0.6, 0.8])):
        grads = jnp.asarray(true, jnp.float32) * scale
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates, want, rtol=1e-6)


def test_an_overflow_at_the_floor_keeps_the_scale_and_says_so():
    tx = fp16.mixed_precision(optax.sgd(1.0), loss_scale=fp16.dynamic_loss_scale(1.0))
    params = jnp.ones(2)
    state = tx.init(params)
    for count in (1, 2, 3):
        params, state = tx.apply(jnp.array([jnp.inf, 1.0]), state, params)
        metrics = fp16.metrics_of(state)
        assert metrics["loss_scale"] == 1.0
        assert metrics["overflows_at_floor"] == metrics["skipped_in_a_row"] == count
    np.testing.assert_array_equal(params, [1.0, 1.0])
    assert "already at its floor of 1" in fp16.stuck(state, patience=3)
    assert fp16.stuck(state, patience=4) is None
    _, state = tx.apply(jnp.ones(2), state, params)
    assert fp16.metrics_of(state)["overflows_at_floor"] == 0


def test_inf_and_nan_stay_visible_through_the_links():
    tx = fp16.dynamic_loss_scale(4.0)
    updates, _ = tx.update(jnp.array([jnp.inf, -jnp.inf, jnp.nan, 2.0], jnp.float16), tx.init(None))
    np.testing.assert_array_equal(updates, [np.inf, -np.inf, np.nan, 0.5])


def test_what_is_no_gradient_passes_through_the_scale_undivided():
    grads = {
        "i": jnp.arange(3),
        "f": np.zeros(2, jax.dtypes.float0),
        "n": None,
        "k": jax.random.key(0),
        "w": jnp.ones(1),
    }
    grads |= {"m": optax.MaskedNode(), "b": jnp.array([True])}
    tx = fp16.static_loss_scale(4.0)
    updates, _ = tx.update(grads, tx.init(grads))
    assert all(updates[name] is grads[name] for name in "ifnkb")
    assert isinstance(updates["m"], optax.MaskedNode)
    np.testing.assert_array_equal(updates["w"], [0.25])


def test_the_static_scale_never_moves_and_keeps_no_counters():
    tx = fp16.static_loss_scale(3.0)
    state = tx.init(None)
    _, after = tx.update(jnp.array([jnp.nan]), state)
    assert after == state
    assert len(jax.tree.leaves(after)) == 1


NAN = float("nan")


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"init_scale": 0.5}, "init_scale"),
        ({"init_scale": 2.0**25}, "init_scale"),
        ({"init_scale": -1.0}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"growth_factor": 1 + 1e-9}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"backoff_factor": 1 - 1e-9}, "backoff_factor"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"tolerance": 1.1}, "tolerance"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale"),
        *(({name: NAN}, name) for name in ScaleRule._fields),
        ({"init_scale": NAN}, "init_scale"),
    ],
)
def test_a_knob_out_of_its_range_is_named(knobs, name):
    with pytest.raises(ValueError, match=rf"{name} must be"):
        fp16.dynamic_loss_scale(**knobs)


@pytest.mark.parametrize(
    ("name", "low", "high", "least", "most"),
    [
        ("growth_factor", 1 + 2**-24, 3.5e38, 1 + 2**-23, 3.4e38),
        ("backoff_factor", 2.0**-127, 1 - 2**-25, 2.0**-126, 1 - 2**-24),
        ("tolerance", -1e-9, 1 + 1e-9, 0, 1),
        ("growth_interval", 0, 2**31, 1, 2**31 - 1),
        ("hysteresis", 0, 2**31, 1, 2**31 - 1),
        ("min_scale", 2.0**-127, 2.0**15 + 1, 2.0**-126, 2.0**15),
        ("max_scale", 2.0**15 - 1, 2.0**127, 2.0**15, 2.0**126),
        ("init_scale", 0.9, 2.0**24 + 2, 1.0, 2.0**24),
    ],
)
def test_every_knob_goes_to_the_edges_of_its_range_and_no_farther(name, low, high, least, most):
    for inside in (least, most):
        fp16.dynamic_loss_scale(**{name: inside})
    for outside in (low, high):
        with pytest.raises(ValueError, match="must be"):
            fp16.dynamic_loss_scale(**{name: outside})


@pytest.mark.parametrize("scale", [0.0, -2.0, NAN, float("inf"), 1e-45])
def test_a_static_scale_that_is_no_positive_number_of_fp32_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale must be a number from 2\*\*-126 to 2\*\*126"):
        fp16.static_loss_scale(scale)


def test_the_defaults_are_the_documented_ones():
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(fp16.dynamic_loss_scale).parameters.items()
    }
    assert defaults == {
        "init_scale": 2.0**15, "growth_interval": 2000, "growth_factor": 2.0, "backoff_factor": 0.5, "tolerance": 0.0,
        "hysteresis": 1, "min_scale": 1.0, "max_scale": 2.0**24, "underflow": None, "axis_name": None, "sharded": False,
    }  # fmt: skip
