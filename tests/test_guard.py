"""The guard: one of two trees, bit for bit, traced once, in the way that each backend likes."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from benchmarks.bench.compiled import compiled, gpu_mesh
from benchmarks.bench.hlo import entry_operations
from optax_fp16._guard import in_the_state_dtypes, take_step, zeros_like
from optax_fp16._scalars import read_at_once
from tests.meshes import counts_programs, mesh


def guarded(flag, x):
    return take_step(
        flag, lambda: {"x": x + 1, "n": x.sum()}, lambda shapes: {"x": x, "n": jnp.zeros((), shapes["n"].dtype)}
    )


@pytest.mark.parametrize("jitted", [False, True])
def test_the_flag_decides_which_tree_it_is(jitted):
    take = jax.jit(guarded) if jitted else guarded
    x = jnp.array([1.0, -0.0])
    applied, skipped = take(jnp.array(True), x), take(jnp.array(False), x)
    np.testing.assert_array_equal(applied["x"], [2.0, 1.0])
    assert np.asarray(skipped["x"]).tobytes() == np.asarray(x).tobytes()
    assert (applied["n"], skipped["n"]) == (1.0, 0.0)


def test_a_step_is_traced_once_for_all_its_uses():
    traces = []

    def step():
        traces.append(1)
        return jnp.ones(3)

    jax.jit(lambda flag: take_step(flag, step, zeros_like))(True)
    assert len(traces) == 1


def test_a_skipped_step_is_not_computed_on_a_cpu():
    text = jax.jit(guarded).lower(jnp.array(True), jnp.ones(3)).compile().as_text()
    assert len(re.findall(r" conditional\(", text)) == 1


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_skipped_update_is_zeros_where_the_gradients_lie(kind, jitted, context):
    grid = mesh(2, kind=kind)
    params = jax.device_put(jnp.ones((4, 3)), NamedSharding(grid, P("data")))
    tx = fp16.mixed_precision(optax.sgd(0.1, momentum=0.9))
    with jax.set_mesh(grid) if context else contextlib.nullcontext():
        state = tx.init(params)
        update = jax.jit(tx.update) if jitted else tx.update
        updates, after = update(params * jnp.inf, state, params)
    np.testing.assert_array_equal(updates, np.zeros((4, 3)))
    if jitted and kind == AxisType.Explicit:  # outside of jit only a mesh's context says where
        assert jax.typeof(updates) == jax.typeof(params)
    jax.tree.map(np.testing.assert_array_equal, after.guard_state.inner_state, state.guard_state.inner_state)


def test_a_state_keeps_its_dtypes_whatever_kind_of_number_is_in_it():
    old = {
        "array": jnp.float32(1),
        "numpy": np.float32(1),
        "python": 1.0,
        "count": 1,
        "word": "a",
        "small": jnp.int8(1),
    }
    new = {"array": np.float64(2), "numpy": jnp.int32(2), "python": jnp.int32(2), "count": 2.0, "word": "b", "small": 2}
    kept = in_the_state_dtypes(new, old)
    assert {name: jnp.result_type(leaf) for name, leaf in kept.items() if name != "word"} == {
        "array": jnp.float32,
        "numpy": jnp.float32,
        "python": jnp.float32,
        "count": jnp.int32,
        "small": jnp.int8,
    }
    assert kept["word"] == "b"


@pytest.mark.parametrize("jitted", [False, True])
def test_a_state_on_an_explicit_mesh_stays_where_it_lies(jitted):
    grid = mesh(2, kind=AxisType.Explicit)
    old, whole = (jax.device_put(jnp.ones((4, 3)), NamedSharding(grid, spec)) for spec in (P("data"), P()))
    keep = jax.jit(in_the_state_dtypes) if jitted else in_the_state_dtypes
    for new in (whole, whole.astype(jnp.bfloat16), old):
        assert jax.typeof(keep(new, old)) == jax.typeof(old)
    on_auto = jax.device_put(old, NamedSharding(mesh(2), P("data")))
    assert keep(on_auto.astype(jnp.bfloat16), on_auto).sharding == on_auto.sharding


def test_batches_of_flags_decide_one_by_one():
    x = jnp.arange(4.0).reshape(2, 2)
    taken = jax.jit(jax.vmap(guarded))(jnp.array([True, False]), x)
    np.testing.assert_array_equal(taken["x"], [[1.0, 2.0], [2.0, 3.0]])


@counts_programs
def test_a_recipe_on_a_cpu_needs_no_memory_beyond_its_donated_arguments():
    """The gradients are unscaled where they are used: in a buffer of their own they would cost 4 bytes a parameter."""
    tx = fp16.mixed_precision(optax.adamw(1e-3), max_norm=1.0)
    params = {"a": jax.ShapeDtypeStruct((512, 256), jnp.float32), "b": jax.ShapeDtypeStruct((256,), jnp.float32)}
    step = jax.jit(lambda p, s, g: tx.apply(g, s, p), donate_argnums=(0, 1))
    memory = step.lower(params, jax.eval_shape(tx.init, params), params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 256 * 4 / 8


def test_scalars_read_at_once_keep_every_bit_and_type():
    state = {
        "floats": [jnp.float32(-0.0), jnp.float32(jnp.nan), jnp.float32(1e-45)],
        "ints": jnp.int32(-(2**31)),
        "flag": jnp.array(True),
        "small": jnp.array(3, jnp.int8),
        "vector": jnp.arange(3.0),
        "weak": jnp.asarray(2.0) * 1,
        "key": jax.random.key(7),
        "none": None,
    }
    read = jax.jit(read_at_once)(state)
    assert jax.tree.structure(read) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(read), strict=True):
        assert jax.typeof(before) == jax.typeof(after)
        if not jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
            assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


def test_scalars_are_read_from_one_vector_of_each_kind_and_of_two_entries_at_least():
    def vectors(*scalars):
        program = str(jax.make_jaxpr(read_at_once)(scalars))
        return re.findall(r":(\w+\[\d+\]) = optimization_barrier", program)

    three, two = (jnp.float32(1), jnp.float32(2), jnp.float32(3)), (jnp.int32(1), jnp.int32(2))
    assert vectors(*three, *two) == ["f32[3]", "i32[2]"]
    assert vectors(three[0]) == ["f32[2]"]
    assert vectors(jnp.ones(2), jnp.float16(1)) == []
    assert all(after is before for after, before in zip(read_at_once(three), three, strict=True))  # nothing to merge


def test_the_recipe_lets_derivatives_by_its_scalars_through():
    """A learning rate in the state can be learnt: it isn't read as bits."""
    tx = fp16.mixed_precision(optax.inject_hyperparams(optax.sgd)(0.5), loss_scale=1.0)
    params = jnp.array([1.0])
    state = tx.init(params)

    def after(rate):
        inner = state.guard_state.inner_state
        inner = inner._replace(hyperparams={"learning_rate": rate})
        guard = state.guard_state._replace(inner_state=inner)
        return tx.apply(jnp.array([3.0]), state._replace(guard_state=guard), params)[0][0]

    assert jax.jit(jax.grad(after))(jnp.float32(0.5)) == -3.0


@counts_programs
@pytest.mark.slow
def test_a_gpu_selects_instead_of_branching_and_updates_like_leaves_together():
    sharding = NamedSharding(gpu_mesh("h100", 1), P())
    tx = fp16.mixed_precision(optax.adamw(1e-3), max_norm=1.0)
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)] * 6
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), jax.eval_shape(tx.init, params)
    )
    program = compiled(lambda p, s, g: tx.apply(g, s, p), params, state, params, donate=(0, 1))
    operations = entry_operations(program.as_text())
    assert not operations["conditional"]
    # The norm takes two kernels and the scalars four or five; the six updates of one shape are one.
    assert operations["fusion"] <= 9
