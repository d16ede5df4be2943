"""Any value for any argument works or is refused by the argument's name; trees of every shape train."""

import collections
import dataclasses
import fractions
import inspect
import re

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

import optax_fp16 as fp16
from optax_fp16 import migrate


class Hostile:
    """Raises whatever is done with it."""

    def __float__(self):
        raise RuntimeError("no number")

    __eq__ = __len__ = __iter__ = __bool__ = __array__ = __int__ = __index__ = __float__
    __hash__ = object.__hash__

    def __repr__(self):
        raise RuntimeError("no words")


SGD = optax.sgd(0.1)
STATE = fp16.dynamic_loss_scale().init(None)
# The arguments that make each constructor work, one by one replaced by something else.
WORKING = {
    fp16.dynamic_loss_scale: {},
    fp16.static_loss_scale: {"scale": 8.0},
    fp16.clip_by_global_norm_fp32: {"max_norm": 1.0},
    fp16.skip_if_nonfinite: {"inner": SGD},
    fp16.master_weights: {"inner": SGD},
    fp16.distributed: {"inner": SGD, "axis_name": "data"},
    fp16.mixed_precision: {"inner": SGD},
    fp16.bert_adam: {"learning_rate": 0.1},
    fp16.value_and_grad: {"fun": jnp.sin, "opt_state": STATE},
}
CASES = [(maker, argument) for maker in WORKING for argument in inspect.signature(maker).parameters]
# What is looked at when the function runs, and not before.
LATER = {(fp16.value_and_grad, "opt_state"), (fp16.bert_adam, "mask")}

NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.fractions(),
    st.complex_numbers(),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(jnp.float32),
    st.integers(-9, 9).map(np.int64),
)
WORDS = [None, True, False, np.bool_(True), jnp.array(True), "", "data", "4.0", b"1", 10**400, fractions.Fraction(1, 3)]
CONTAINERS = [[], [1.0], (), ("data", "data"), {}, {"a": True}, {1: True, "a": False}, {"a": {"b": 1}}, set(), range(3)]
CALLABLES = [object(), float, optax.sgd, len, lambda x: x, SGD, SGD.init, (len, len), fp16.static_loss_scale(2.0)]
SPECS = [jax.sharding.PartitionSpec("data"), {"a": jax.sharding.PartitionSpec("data")}, optax.EmptyState()]
ARRAYS = [
    jnp.zeros(3),
    np.zeros((1,)),
    jax.random.key(0),
    jnp.float16,
    "float16",
    jax.ShapeDtypeStruct((), jnp.float32),
]
THINGS = st.sampled_from([*WORDS, *CONTAINERS, *CALLABLES, *SPECS, *ARRAYS])


def works_or_names(make, names, arguments):
    """Whether it worked; if it didn't, the message has one of the names in it."""
    try:
        make(**arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        return True
    assert any(re.search(rf"\b{name}\b", message) for name in names), f"{names} aren't named: {message}"
    assert len(message) < 700
    return False


@settings(max_examples=500)
@given(st.sampled_from([case for case in CASES if case not in LATER]), st.one_of(NUMBERS, THINGS))
@example((fp16.dynamic_loss_scale, "init_scale"), 10**400)
@example((fp16.skip_if_nonfinite, "sharded"), {1: True, "a": False})
@example((fp16.clip_by_global_norm_fp32, "max_norm"), 3.5e38)
def test_any_value_works_or_is_refused_by_name(case, value):
    make, argument = case
    works_or_names(make, [argument], {**WORKING[make], argument: value})


@pytest.mark.parametrize("make", WORKING)
def test_an_object_that_fails_in_every_way_is_refused_by_name(make):
    for argument in inspect.signature(make).parameters:
        if (make, argument) not in LATER:
            assert not works_or_names(make, [argument], {**WORKING[make], argument: Hostile()})


NO_NUMBERS = ("underflow", "axis_name", "sharded")
KNOBS = [name for name in inspect.signature(fp16.dynamic_loss_scale).parameters if name not in NO_NUMBERS]


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(KNOBS, NUMBERS)))
@settings(max_examples=200)
def test_any_knobs_together_make_a_rule_or_are_refused_by_name(knobs):
    if works_or_names(fp16.dynamic_loss_scale, KNOBS, knobs):
        assert 0 < fp16.dynamic_loss_scale(**knobs).init(None).loss_scale < jnp.inf


def scale_any(loss):
    with np.errstate(over="ignore"):  # numpy has a word to say about a float beyond fp32, which is Inf then
        return fp16.scale_loss(loss, STATE)


def apply_any(tx):
    state = tx.init(jnp.ones(1)) if isinstance(tx, optax.GradientTransformation) else ()
    return fp16.apply_gradients(tx, jnp.ones(1), state, jnp.ones(1))


FUNCTIONS = {
    "max_norm": lambda value: fp16.grad_global_norm({}, value),
    "patience": lambda value: fp16.stuck(GUARD, value),
    "loss": scale_any,
    "tx": apply_any,
    "knobs": lambda value: migrate.to_apex(value, STATE),
    "scale_state": lambda value: migrate.to_apex({}, value),
    "leave": lambda value: migrate.to_apex({}, STATE, leave=value),
}
GUARD = fp16.skip_if_nonfinite(SGD).init(jnp.ones(1))


@settings(max_examples=200)
@given(st.sampled_from(list(FUNCTIONS)), st.one_of(NUMBERS, THINGS))
def test_any_argument_of_a_function_works_or_is_refused_by_name(name, value):
    works_or_names(lambda argument: FUNCTIONS[name](argument), [name, "dynamic_loss_scale"], {"argument": value})


def test_a_repr_that_fails_does_not_hide_the_message():
    with pytest.raises(TypeError, match=r"max_norm must be .*, not an object of type Hostile"):
        fp16.clip_by_global_norm_fp32(Hostile())


@pytest.mark.parametrize(("length", "shown"), [(98, "x" * 98 + "'."), (99, "x" * 96 + "....")])
def test_a_message_shows_a_hundred_characters_of_a_value(length, shown):
    with pytest.raises(TypeError) as refusal:
        fp16.clip_by_global_norm_fp32("x" * length)
    assert str(refusal.value).endswith(", not '" + shown)


@pytest.mark.parametrize("value", [True, np.True_, jnp.array(True), "4.0", b"4", 4 + 0j, np.ones(1)])
def test_what_float_takes_too_is_no_number(value):
    with pytest.raises(TypeError, match="max_norm must be "):
        fp16.clip_by_global_norm_fp32(value)


def test_a_function_is_to_be_called_first_and_nothing_else_is():
    with pytest.raises(TypeError, match="Call it first"):
        fp16.skip_if_nonfinite(optax.sgd)
    with pytest.raises(TypeError, match=r"not 3\.$"):
        fp16.skip_if_nonfinite(3)


def test_a_traced_knob_is_refused_and_told_apart_from_a_wrong_one():
    for name in ("growth_interval", "init_scale", "tolerance"):
        with pytest.raises(TypeError, match=rf"{name} must be .*, known before the step is traced"):
            jax.jit(lambda x, name=name: fp16.dynamic_loss_scale(**{name: x}).init(None))(1.0)


Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    bias: jax.Array | None


def one():
    return jnp.ones(2)


def nested(depth):
    tree = one()
    for _ in range(depth):
        tree = {"inner": tree}
    return tree


TREES = {
    "dict": {"b": one(), "a": one()},
    "list": [one(), [one()]],
    "tuple": (one(), ()),
    "named tuple": Pair(one(), {"x": one()}),
    "dataclass": Layer(one(), None),
    "ordered dict": collections.OrderedDict(z=one(), a=one()),
    "frozen dict": flax.core.FrozenDict({"layer": {"kernel": one()}}),
    "nnx state": nnx.State({"kernel": nnx.Param(one()), "deep": {"bias": nnx.Param(one())}}),
    "equinox module": eqx.nn.Linear(2, 1, key=jax.random.key(0)),
    # A tree that is None alone stands for no parameters given.
    "none inside": {"a": None, "b": one()},
    "masked inside": {"a": optax.MaskedNode(), "b": one()},
    "empty": {},
    "empty leaf": {"a": jnp.zeros((0, 3)), "b": one()},
    "one leaf": one(),
    "scalar leaf": jnp.float32(1.0),
    "depth 200": nested(200),
}
WAYS = {
    "recipe": fp16.mixed_precision(SGD, max_norm=1e6, loss_scale=8.0, half_params=True),
    "links": optax.chain(
        fp16.static_loss_scale(8.0, underflow="per_leaf"),
        fp16.clip_by_global_norm_fp32(1e6),
        fp16.skip_if_nonfinite(SGD),
    ),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("way", WAYS)
def test_a_tree_of_any_shape_trains(name, way):
    tx, params = WAYS[way], TREES[name]
    grads = jax.tree.map(lambda p: jnp.full_like(p, 8.0), params)
    after, state = fp16.apply_gradients(tx, grads, tx.init(params), params)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(new, old - jnp.float32(0.1), rtol=1e-6)
    metrics = fp16.metrics_of(state)
    assert metrics["applied_total"] == 1
    np.testing.assert_allclose(
        metrics["grad_norm"], np.sqrt(sum(leaf.size for leaf in jax.tree.leaves(params))), rtol=1e-6
    )


@pytest.mark.slow
def test_five_thousand_leaves_train():
    """Op by op: to compile so many is XLA's own time."""
    tx = fp16.mixed_precision(SGD, max_norm=1e6, loss_scale=8.0)
    params = {f"layer {index}": one() for index in range(5000)}
    after, state = tx.apply(jax.tree.map(lambda p: p * 8.0, params), tx.init(params), params)
    np.testing.assert_allclose(np.stack(list(after.values())), 0.9, rtol=1e-6)
    np.testing.assert_allclose(fp16.metrics_of(state)["grad_norm"], 100.0, rtol=1e-6)
