"""Other libraries' loss scales and ours make the same decisions after moving in, and after moving out."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import optax_fp16 as fp16
from optax_fp16 import migrate

STEPS = 5000


class GluonNLP:
    """Overflows are tolerated up to a share of the steps since the last rescale."""

    def __init__(self, tolerance=0.02, scale_window=40):
        self.loss_scale, self.scale_factor, self.scale_window, self.tolerance = 2.0**15, 2.0, scale_window, tolerance
        self._num_steps, self._overflows_since_rescale = 0, 0
        self._last_overflow_iter = self._last_rescale_iter = -1

    def step(self, finite):
        if not finite:
            self._last_overflow_iter = self._num_steps
            self._overflows_since_rescale += 1
            if self._overflows_since_rescale / (self._num_steps - self._last_rescale_iter) >= self.tolerance:
                self.loss_scale /= self.scale_factor
                self._last_rescale_iter, self._overflows_since_rescale = self._num_steps, 0
        elif (self._num_steps - self._last_overflow_iter) % self.scale_window == 0:
            self.loss_scale *= self.scale_factor
            self._last_rescale_iter = self._num_steps
        self._num_steps += 1

    def scale(self):
        return self.loss_scale


class Torch:
    """GradScaler's kernel: a tracker of successes, no bounds."""

    def __init__(self):
        self.state = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 30}
        self.state["_growth_tracker"] = 0

    def step(self, finite):
        state = self.state
        if not finite:
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
            return
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0

    def scale(self):
        return self.state["scale"]


class Apex:
    """amp's scaler: halves and doubles, with a ceiling and if asked for a floor."""

    def __init__(self, window=25, low=2.0**-2, high=2.0**17):
        self.window, self.low, self.high, self.loss_scale, self.unskipped = window, low, high, 2.0**16, 0

    def step(self, finite):
        if finite:
            self.unskipped += 1
        else:
            self.loss_scale, self.unskipped = max(self.low, self.loss_scale / 2), 0
        if self.unskipped == self.window:
            self.loss_scale, self.unskipped = min(self.high, self.loss_scale * 2), 0

    def scale(self):
        return self.loss_scale


class DeepSpeed:
    """Hysteresis that a growth refills."""

    def __init__(self, delayed_shift=3):
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.scale_factor = 2.0**16, 0, -1, 2.0
        self.scale_window, self.min_scale, self.delayed_shift, self.cur_hysteresis = (
            20,
            0.5,
            delayed_shift,
            delayed_shift,
        )
        self.consecutive_hysteresis = False

    def step(self, finite):
        if not finite:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def scale(self):
        return self.cur_scale


def assigned(kind):
    """Attributes, as `vars(scaler).update` takes them, in a fresh model."""

    def make(attributes):
        model = kind()
        vars(model).update(attributes)
        return model

    return make


def torch_of(state_dict):
    model = Torch()
    model.state = dict(state_dict)
    return model


def apex_of(state_dict):
    model = Apex()
    vars(model).update(state_dict["loss_scaler0"])
    return model


APEX = {"scale_window": 25, "min_loss_scale": 2.0**-2, "max_loss_scale": 2.0**17}
WORLDS = {
    "gluonnlp": (GluonNLP, migrate.from_gluonnlp, migrate.to_gluonnlp, assigned(GluonNLP)),
    "torch": (Torch, lambda model: migrate.from_torch(model.state), migrate.to_torch, torch_of),
    "apex": (
        Apex,
        lambda m: migrate.from_apex({"loss_scaler0": vars(m)}, **APEX),
        migrate.to_apex,
        apex_of,
    ),
    "deepspeed": (DeepSpeed, migrate.from_deepspeed, migrate.to_deepspeed, assigned(DeepSpeed)),
}


def pattern(seed, steps=STEPS, rate=0.042):  # at which a growth after 17 steps and a back-off are as frequent
    return np.random.default_rng(seed).random(steps) >= rate


def our_scales(knobs, state, finite):
    tx = fp16.dynamic_loss_scale(**knobs)

    def step(state, finite):
        state = tx.adjust(state, finite)
        return state, state.loss_scale

    state, scales = jax.jit(lambda state, finite: jax.lax.scan(step, state, finite))(state, jnp.asarray(finite))
    return state, np.asarray(scales)


def driven(model, seed, steps=STEPS):
    """(finite steps, scales): overflows come with a scale that is too high, as in life, and now and then from nowhere."""
    finite, scales = [], []
    for chance in np.random.default_rng(seed).random(steps):
        finite.append(chance >= (0.5 if model.scale() > 2.0**14 else 0.005))
        model.step(finite[-1])
        scales.append(model.scale())
    return finite, scales


@pytest.mark.parametrize("world", WORLDS)
def test_five_thousand_steps_go_the_same_way_after_moving_in_and_after_moving_out(world):
    make, move_in, move_out, back = WORLDS[world]
    model = make()
    driven(model, 0, 777)
    knobs, state = move_in(model)
    finite, theirs = driven(model, 1)
    state, ours = our_scales(knobs, state, finite)
    np.testing.assert_array_equal(ours, theirs)
    assert len(set(theirs)) > 3
    finite, theirs = driven(back(move_out(knobs, state)), 2)
    np.testing.assert_array_equal(our_scales(knobs, state, finite)[1], theirs)
    assert finite.count(False) > 20


def flax_scales(scale, finite):
    """Flax's own rule, driven through its gradient function: an input of Inf makes an overflow."""

    def step(scale, finite):
        outcome = scale.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))(jnp.float32(1.0))
        return outcome.dynamic_scale, outcome.dynamic_scale.scale

    return jax.jit(lambda scale, finite: jax.lax.scan(step, scale, finite))(scale, jnp.asarray(finite))


def jmp_scales(scale, finite):
    """jmp's own rule, step by step: it loses its floor on the way through a scan."""

    def step(carry, finite):
        moved = jmp.DynamicLossScale(*carry, scale.period, scale.factor, scale.min_loss_scale).adjust(finite)
        return (moved.loss_scale, moved.counter), moved.loss_scale

    carry = (scale.loss_scale, jnp.asarray(scale.counter))
    carry, scales = jax.jit(lambda carry, finite: jax.lax.scan(step, carry, finite))(carry, jnp.asarray(finite))
    return jmp.DynamicLossScale(*carry, scale.period, scale.factor, scale.min_loss_scale), scales


FLAX = DynamicScale(growth_interval=17, scale=jnp.float32(2.0**12), fin_steps=jnp.int32(0), minimum_scale=2.0**-3)
JMP = jmp.DynamicLossScale(jnp.float32(2.0**12), jnp.int32(0), 17, 2, jnp.float32(2.0**-2))


@pytest.mark.parametrize(
    ("scale", "run", "move_in", "move_out"),
    [
        (FLAX, flax_scales, migrate.from_flax, migrate.to_flax),
        (JMP, jmp_scales, migrate.from_jmp, lambda *args: jmp.DynamicLossScale(**migrate.to_jmp(*args))),
    ],
    ids=["flax", "jmp"],
)
def test_the_real_ones_of_jax_go_the_same_way_after_moving_in_and_out(scale, run, move_in, move_out, loose):
    scale, _ = run(scale, pattern(3, 777))
    knobs, state = move_in(scale)
    state, ours = our_scales(knobs, state, pattern(4))
    scale, theirs = run(scale, pattern(4))
    np.testing.assert_array_equal(ours, theirs)
    assert len(set(ours.tolist())) > 5
    _, theirs = run(move_out(knobs, state), pattern(5))
    np.testing.assert_array_equal(our_scales(knobs, state, pattern(5))[1], theirs)


def test_the_fp16_optimizer_of_apex_and_fairseqs_scaler_are_read_too():
    old = {"cur_scale": 64.0, "cur_iter": 12, "last_overflow_iter": 4, "scale_factor": 2.0, "scale_window": 1000}
    knobs, state = migrate.from_deepspeed(SimpleNamespace(**old))
    assert (knobs["min_scale"], knobs["hysteresis"], state.finite_in_a_row) == (1.0, 1, 7)
    fields = vars(GluonNLP()) | {"_iter": 30, "_last_overflow_iter": 9}
    del fields["_num_steps"]
    assert migrate.from_gluonnlp(fields)[1].finite_in_a_row == 20


def test_a_disabled_scaler_or_another_thing_is_refused():
    for function in (migrate.from_torch, migrate.from_apex, migrate.from_deepspeed, migrate.from_gluonnlp):
        with pytest.raises(ValueError, match=r"\w+ is missing: this should be .*, not \{\}"):
            function({})
        with pytest.raises(ValueError, match=r"\w+ is missing: this should be .*, not 3"):
            function(3)
    with pytest.raises(ValueError, match="growth_interval must be a whole number"):
        migrate.from_torch(Torch().state | {"growth_interval": 0})
    with pytest.raises(ValueError, match="finite steps in a row must be a whole number from 0 to 29"):
        migrate.from_torch(Torch().state | {"_growth_tracker": 30})
    with pytest.raises(ValueError, match="loss_scaler1 is missing"):
        migrate.from_apex({"loss_scaler0": {}}, loss_id=1)


def test_consecutive_hysteresis_is_refused_unless_it_makes_no_difference():
    model = DeepSpeed()
    model.consecutive_hysteresis = True
    with pytest.raises(ValueError, match="consecutive_hysteresis=True can't be carried over"):
        migrate.from_deepspeed(model)
    model = DeepSpeed(delayed_shift=1)
    model.consecutive_hysteresis = True
    assert migrate.from_deepspeed(model)[0]["hysteresis"] == 1


FREE = {"min_scale": migrate.LOWEST, "max_scale": migrate.HIGHEST}


@pytest.mark.parametrize(
    ("move_out", "knobs", "name"),
    [
        (migrate.to_torch, FREE | {"tolerance": 0.1}, "tolerance"),
        (migrate.to_torch, FREE | {"hysteresis": 2}, "hysteresis"),
        (migrate.to_torch, {"min_scale": migrate.LOWEST}, "max_scale"),
        (migrate.to_gluonnlp, FREE | {"backoff_factor": 0.25}, "backoff_factor"),
        (migrate.to_gluonnlp, FREE | {"hysteresis": 2}, "hysteresis"),
        (migrate.to_apex, {"growth_factor": 4.0}, "growth_factor"),
        (migrate.to_deepspeed, FREE | {"tolerance": 0.1}, "tolerance"),
        (migrate.to_flax, {"growth_interval": 5}, "max_scale"),
        (migrate.to_jmp, FREE | {"growth_factor": 4.0}, "backoff_factor"),
    ],
)
def test_a_knob_that_the_other_rule_lacks_is_refused_until_it_is_left_behind(move_out, knobs, name):
    state = fp16.dynamic_loss_scale(**knobs).init(None)
    has = "none" if name == "max_scale" else r"\S+ only"
    with pytest.raises(
        ValueError, match=rf"{name}=\S+ can't be carried over: .* has {has}\. .*say leave=\('{name}',\)"
    ):
        move_out(knobs, state)
    assert move_out(knobs, state, leave=(name,))


@pytest.mark.parametrize(
    ("name", "as_good_as_none", "still_one"), [("min_scale", 2.0**-100, 2.0**-99), ("max_scale", 2.0**100, 2.0**99)]
)
def test_a_bound_that_far_out_counts_as_none(name, as_good_as_none, still_one):
    state = fp16.dynamic_loss_scale().init(None)
    assert migrate.to_torch(FREE | {name: as_good_as_none}, state)
    with pytest.raises(ValueError, match=f"{name}=.* can't be carried over"):
        migrate.to_torch(FREE | {name: still_one}, state)


def test_knobs_that_no_rule_takes_are_refused_by_name():
    with pytest.raises(ValueError, match="growth_factor must be above 1"):
        migrate.to_gluonnlp(FREE | {"growth_factor": 0.5, "backoff_factor": 2.0}, fp16.dynamic_loss_scale().init(None))


def test_names_that_are_no_knobs_are_refused():
    state = fp16.dynamic_loss_scale().init(None)
    with pytest.raises(ValueError, match="floor is no argument of dynamic_loss_scale"):
        migrate.to_torch({"floor": 1.0}, state)
    with pytest.raises(ValueError, match="ceiling is no argument"):
        migrate.to_torch({}, state, leave=("ceiling",))
    with pytest.raises(TypeError, match="leave must be a tuple of names"):
        migrate.to_torch({}, state, leave="max_scale")
    for wrong in (fp16.static_loss_scale(8.0).init(None), None):
        with pytest.raises(TypeError, match="scale_state must be the state of a dynamic_loss_scale"):
            migrate.to_apex({}, wrong)
    with pytest.raises(TypeError, match="knobs must be a dict"):
        migrate.to_apex(2.0, state)


def test_the_state_is_put_where_the_optimizers_is():
    knobs, scale_state = migrate.from_torch(Torch().state)
    tx = optax.chain(fp16.dynamic_loss_scale(**knobs, underflow="total"), fp16.skip_if_nonfinite(optax.adam(0.1)))
    before = tx.init(jnp.ones(2))
    after = migrate.with_scale_state(before, scale_state)
    assert fp16.loss_scale_of(after) == 65536.0
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for wrong, count in ((optax.adam(0.1).init(jnp.ones(1)), 0), ((scale_state, scale_state), 2)):
        with pytest.raises(ValueError, match=f"must have one dynamic_loss_scale in it; it has {count}"):
            migrate.with_scale_state(wrong, scale_state)


def test_a_scale_that_grows_by_less_than_a_doubling_moves_in():
    knobs, state = migrate.from_torch(Torch().state | {"growth_factor": 1.5})
    assert (knobs["growth_factor"], knobs["backoff_factor"], float(state.loss_scale)) == (1.5, 0.25, 65536.0)


def test_gluonnlp_s_step_numbers_become_counts_and_back():
    numbers = {"_num_steps": 30, "_last_overflow_iter": 19, "_last_rescale_iter": 9, "_overflows_since_rescale": 1}
    knobs, state = migrate.from_gluonnlp(vars(GluonNLP()) | numbers)
    assert (state.finite_in_a_row, state.steps_since_rescale, state.overflows_counted) == (10, 20, 1)
    # Only differences between the numbers matter: it starts again at the last rescale.
    back = {name: value for name, value in migrate.to_gluonnlp(knobs, state).items() if name in numbers}
    assert back == {"_num_steps": 20, "_last_overflow_iter": 9, "_last_rescale_iter": -1, "_overflows_since_rescale": 1}
    growing = state._replace(finite_in_a_row=jnp.int32(25), overflows_counted=jnp.int32(0))
    assert migrate.to_gluonnlp(knobs, growing)["_num_steps"] == 25
    assert migrate.from_gluonnlp(vars(GluonNLP(scale_window=1)) | numbers)[1].finite_in_a_row == 0


def test_what_apex_does_not_say_is_its_default_and_jmp_s_floor_keeps_its_value():
    knobs, _ = migrate.from_apex({"loss_scale": 4096.0, "unskipped": 12})
    assert (knobs["growth_interval"], knobs["max_scale"]) == (2000, 2.0**24)
    floor = {"min_scale": 2.0**-30, "max_scale": migrate.HIGHEST}
    moved = migrate.to_jmp(floor, fp16.dynamic_loss_scale(**floor).init(None))
    assert float(moved["min_loss_scale"]) == 2.0**-30
    assert knobs["min_scale"] == migrate.LOWEST
    assert migrate.from_apex({"loss_scale": 4096.0, "unskipped": 12}, min_loss_scale=2.0)[0]["min_scale"] == 2.0


def test_deepspeed_s_attributes_are_these_and_what_it_leaves_out_is_its_default():
    plain = {"cur_scale": 512.0, "cur_iter": 10, "last_overflow_iter": 5, "scale_factor": 2.0, "scale_window": 1}
    knobs, state = migrate.from_deepspeed(plain)
    assert (knobs["growth_interval"], knobs["hysteresis"], knobs["min_scale"], int(state.hysteresis_left)) == (
        1,
        1,
        1.0,
        1,
    )
    assert migrate.from_deepspeed(plain | {"delayed_shift": 2})[0]["hysteresis"] == 2
    with pytest.raises(ValueError, match="consecutive_hysteresis=True can't be carried over"):
        migrate.from_deepspeed(plain | {"delayed_shift": 2, "consecutive_hysteresis": True})
    knobs = {"hysteresis": 3, "max_scale": migrate.HIGHEST}
    state = fp16.dynamic_loss_scale(**knobs).init(None)
    assert migrate.to_deepspeed(knobs, state._replace(hysteresis_left=jnp.int32(0), finite_in_a_row=jnp.int32(7))) == {
        "cur_scale": 2.0**15, "cur_iter": 7, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 2000,
        "min_scale": 1.0, "delayed_shift": 3, "cur_hysteresis": 1, "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
    }  # fmt: skip
    assert migrate.to_deepspeed(knobs, state._replace(hysteresis_left=jnp.int32(2)))["cur_hysteresis"] == 2
    with pytest.raises(ValueError, match=r"backoff_factor=0\.5 can't be carried over"):
        migrate.to_deepspeed(knobs | {"growth_factor": 4.0}, state)
