"""The state outlives versions: its layout is pinned, files of this version load for ever, and round trips lose nothing."""

import importlib
import pickle
import pkgutil

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_fp16 as fp16
from optax_fp16._remainders import joined
from tests import lasting
from tests.transforms import PARAMS, TRANSFORMS, bits, gradients, kinds, with_an_inf

F, I, B = "float32", "int32", "bool"  # noqa: E741
SCALE = {"loss_scale": F, "finite_in_a_row": I, "overflows_counted": I, "steps_since_rescale": I, "hysteresis_left": I}
SCALE |= {"overflows_at_floor": I, "underflow": None}
UNDERFLOW = {"underflow_share": F, "underflow_zero_share": F, "underflow_free_scale": F, "underflow_by_leaf": F}
GUARD = {
    "inner_state": "any",
    "skipped_total": I,
    "skipped_in_a_row": I,
    "applied_total": I,
    "grad_norm": F,
    "grads_finite": B,
}

LAYOUTS = {
    "DynamicLossScaleState": SCALE,
    "StaticLossScaleState": {"loss_scale": F, "underflow": None},
    "UnderflowState": UNDERFLOW,
    "ClipByGlobalNormState": {"norm_before_clip": F, "clip_ratio": F},
    "SkipIfNonfiniteState": GUARD,
    "MasterWeightsState": {"master_params": "any", "master_inner_state": "any"},
    "MixedPrecisionState": {"scale_state": "any", "clip_state": "any", "guard_state": "any"},
}


def states_within(node):
    """Every NamedTuple of ours in a state, the outermost first."""
    if isinstance(node, tuple):
        if type(node).__module__.startswith("optax_fp16."):
            yield node
        for part in node:
            yield from states_within(part)


def state_classes():
    modules = [importlib.import_module(f"optax_fp16.{m.name}") for m in pkgutil.iter_modules(fp16.__path__)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {kind for kind in found if kind.__module__.startswith("optax_fp16.") and kind.__name__.endswith("State")}


def test_the_layout_of_every_state_is_pinned():
    """To change one is to break the checkpoints of all who use the package. Don't; add another state."""
    seen = {}
    for tx in TRANSFORMS.values():
        for state in states_within(tx.init(PARAMS)):
            for field, value in state._asdict().items():
                if LAYOUTS[type(state).__name__][field] not in ("any", None) and value is not None:
                    assert str(value.dtype) == LAYOUTS[type(state).__name__][field]
                    assert value.ndim == (2 if field == "underflow_by_leaf" else 0)
            seen[type(state).__name__] = list(state._fields)
    assert seen == {name: list(fields) for name, fields in LAYOUTS.items()}


def test_no_two_states_share_a_name_of_a_field():
    shared = {"loss_scale", "underflow"}  # of the dynamic and the static scale, which are read alike
    names = [
        name for kind in state_classes() if hasattr(kind, "_fields") for name in kind._fields if name not in shared
    ]
    assert {"loss_scale", "master_params", "skipped_total"} <= {*names, *shared}
    assert len(names) == len(set(names))


def _from_orbax(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


READERS = {
    "msgpack": lambda path: flax.serialization.from_bytes(lasting.blank(), path.read_bytes()),
    "pickle": lambda path: pickle.loads(path.read_bytes()),
    "orbax": lambda path: _from_orbax(path, jax.eval_shape(lasting.blank)),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_the_first_version_loads(kind):
    state, want = READERS[kind](lasting.path_of(kind)), lasting.known()
    want = lasting.only_ours(want) if kind == "pickle" else want
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert bits(state) == bits(want)


@pytest.mark.parametrize("kind", READERS)
def test_a_state_written_now_comes_back_bit_for_bit(kind, tmp_path):
    path, want = tmp_path / f"state.{kind}", lasting.known()
    lasting.WRITERS[kind](path, want)
    want = lasting.only_ours(want) if kind == "pickle" else want
    assert kinds(jax.tree.map(jnp.asarray, READERS[kind](path))) == kinds(want)
    assert bits(READERS[kind](path)) == bits(want)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_flattening_loses_no_field_and_no_dtype(name):
    state = TRANSFORMS[name].init(PARAMS)
    leaves, structure = jax.tree.flatten(state)
    assert jax.tree.unflatten(structure, leaves) == state
    as_dict = flax.serialization.to_state_dict(state)
    back = flax.serialization.from_state_dict(jax.tree.map(jnp.zeros_like, state), as_dict)
    assert kinds(back) == kinds(state)
    assert bits(back) == bits(state)


def through_a_file(path, state):
    lasting.WRITERS["msgpack"](path, state)
    return flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), path.read_bytes())


def test_a_scale_restored_at_1999_good_steps_grows_on_the_next(tmp_path):
    tx = fp16.dynamic_loss_scale()
    state = tx.init(None)
    state, _ = jax.lax.scan(lambda state, _: (tx.adjust(state, jnp.bool_(True)), None), state, None, 1999)
    assert (state.loss_scale, state.finite_in_a_row) == (2.0**15, 1999)
    state = through_a_file(tmp_path / "state", state)
    _, state = tx.update(jnp.ones(1), state)
    assert state.loss_scale == 2.0**16


def test_ten_steps_are_five_a_file_and_five_without_another_trace(tmp_path, loose):
    tx, traces = TRANSFORMS["mixed_precision with half_params"], []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        return tx.apply(grads, state, params)

    def run(params, state, steps):
        for seed in steps:
            grads = gradients(seed)
            params, state = step(params, state, with_an_inf(grads) if seed in (3, 6) else grads)
        return params, state

    straight = run(PARAMS, tx.init(PARAMS), range(10))
    halfway = run(PARAMS, tx.init(PARAMS), range(5))
    resumed = run(*jax.tree.map(jnp.asarray, through_a_file(tmp_path / "state", halfway)), range(5, 10))
    assert bits(resumed) == bits(straight)
    assert len(traces) == 1


@pytest.mark.parametrize("remainder", [False, True])
def test_a_master_behind_its_rounded_parameter_is_saved(remainder, tmp_path):
    dtype = jnp.bfloat16 if remainder else jnp.float16
    tx = fp16.master_weights(optax.sgd(1.0), remainder=remainder)
    params = jnp.ones(1, dtype)
    params, state = tx.apply(jnp.array([-4e-4]), tx.init(params), params)
    params, state = through_a_file(tmp_path / "state", (params, state))
    assert params == 1.0
    kept = joined(params, jnp.asarray(state.master_params)) if remainder else state.master_params
    np.testing.assert_array_equal(kept, np.float32([1.0004]))
