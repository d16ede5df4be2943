"""Norms and decisions over several devices: pmap, shard_map with and without types, sharded jit."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from optax_fp16._reduce import CHUNK
from tests.meshes import WAYS, mesh, on_devices, stacked

COUNTS = (4, 8)


def links(inner, **axes):
    return optax.chain(
        fp16.dynamic_loss_scale(8.0, **axes),
        fp16.skip_if_nonfinite(optax.chain(fp16.clip_by_global_norm_fp32(1.0, **axes), inner), **axes),
    )


def recipe(inner, **axes):
    return fp16.mixed_precision(inner, max_norm=1.0, loss_scale=fp16.dynamic_loss_scale(8.0), **axes)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_and_a_replicated_leaf_have_the_norm_of_both(way, count):
    def norms(sharded, replicated):
        # The replicated leaf's type varies if it comes in like the other; a psum of shares is the same everywhere by type.
        replicated = jax.lax.psum(replicated / count, "data")
        tree = {"a": sharded, "b": replicated}
        by_bools = fp16.grad_global_norm(tree, axis_name="data", sharded={"a": True, "b": False})
        by_specs = fp16.grad_global_norm(tree, axis_name="data", sharded={"a": P("data"), "b": P()})
        by_specs_alone = fp16.grad_global_norm(tree, sharded={"a": P("data"), "b": None})
        untold = fp16.grad_global_norm(tree, axis_name="data")
        return jnp.stack([by_bools, by_specs, by_specs_alone, untold])

    found = on_devices(way, norms, count)(np.full((count, 1), 2, np.float32), np.full((count, 1), 3, np.float32))
    right = np.sqrt(4 * count + 9)
    np.testing.assert_allclose(found[:, :3], np.full((count, 3), right), rtol=1e-6)
    untold = right if way == "typed" else np.sqrt(4 + 9)  # without types it can't know that the leaves differ
    np.testing.assert_allclose(found[:, 3], untold, rtol=1e-6)


@pytest.mark.parametrize(("count", "make"), [(4, links), (8, recipe)])
@pytest.mark.parametrize("way", WAYS)
def test_an_inf_on_one_device_skips_the_step_on_all_and_halves_the_scale(way, count, make):
    averaged = make(optax.sgd(0.1), axis_name="data")
    sharded = make(optax.sgd(0.1), axis_name="data", sharded=True)

    def step(grads):
        params = {"w": jnp.ones(2)}
        results = []
        for tx, own in ((averaged, fp16.pmean_gradients(grads, "data")), (sharded, grads)):
            # The state of a device's own shard differs from the others' by type.
            new, state = tx.update(own, tx.init(params), params)
            metrics = fp16.metrics_of(state)
            results.append([new["w"].sum(), metrics["loss_scale"], metrics["skipped_total"].astype(jnp.float32)])
        return jnp.stack([jnp.stack(each) for each in results])

    grads = {"w": np.ones((count, 2), np.float16)}
    fine = on_devices(way, step, count)(grads)
    np.testing.assert_array_equal(fine[:, :, 1:], np.broadcast_to([8.0, 0.0], (count, 2, 2)))
    assert np.all(fine[:, :, 0] < 0)
    grads["w"][0, 1] = np.inf
    skipped = on_devices(way, step, count)(grads)
    np.testing.assert_array_equal(skipped, np.broadcast_to([0.0, 4.0, 1.0], (count, 2, 3)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("way", WAYS)
def test_an_inner_transformation_with_a_collective_completes_and_all_skip(way, count):
    summed = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), updates))
    tx = fp16.skip_if_nonfinite(optax.chain(summed, optax.sgd(1.0)), axis_name="data", sharded=True)

    def step(grads):
        state = tx.init(grads)
        updates, state = tx.update(grads, state)
        return updates, state.skipped_total

    run = on_devices(way, step, count)
    updates, skipped = run(np.ones((count, 2), np.float32))
    np.testing.assert_array_equal(updates, np.full((count, 2), -count))
    updates, skipped = run(np.array([[np.inf, 1]] + [[1, 1]] * (count - 1), np.float32))
    np.testing.assert_array_equal(updates, np.zeros((count, 2)))
    np.testing.assert_array_equal(skipped, np.ones(count))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_of_large_halves_does_not_overflow(way, count):
    def means(grads):
        return [fp16.pmean_gradients(grads, "data", dtype) for dtype in (None, jnp.float16, jnp.bfloat16)]

    for value in (20000, 65504):
        grads = {"w": np.full((count, 1), value, np.float16), "step": np.ones(count, np.int32)}
        wide, half, brain = on_devices(way, means, count)(grads)
        np.testing.assert_array_equal(wide["w"], grads["w"])
        for mean, error in ((wide, 0), (half, 2**-10), (brain, 2**-7)):
            np.testing.assert_allclose(mean["w"].astype(np.float32), value, rtol=error)
            assert mean["w"].dtype == np.float16
            np.testing.assert_array_equal(mean["step"], grads["step"])


@pytest.mark.parametrize(
    ("leaf", "asked", "travels"),
    [
        (jnp.float16, None, jnp.float32),
        (jnp.float32, None, jnp.float32),
        (jnp.float32, jnp.float16, jnp.float16),
        (jnp.float16, jnp.bfloat16, jnp.bfloat16),
        (jnp.complex64, None, jnp.complex64),
        (jnp.complex64, jnp.float16, jnp.complex64),
    ],
)
def test_gradients_travel_in_the_dtype_that_was_asked_for_and_complex_ones_as_they_are(leaf, asked, travels):
    def mean(grads):
        return fp16.pmean_gradients(grads, "data", asked)

    spread = jax.shard_map(mean, mesh=mesh(2), in_specs=P("data"), out_specs=P())
    grads = jnp.array([1.0, 3.0], leaf)
    assert spread(grads) == 2.0
    assert spread(grads).dtype == leaf
    (sent,) = [
        equation for equation in _equations(jax.make_jaxpr(spread)(grads)) if equation.primitive.name.startswith("psum")
    ]
    assert sent.invars[0].aval.dtype == travels


def _equations(closed):
    (mapped,) = closed.jaxpr.eqns
    return mapped.params["jaxpr"].eqns


def test_a_large_replicated_leaf_is_counted_once_though_it_is_split():
    rng = np.random.default_rng(0)
    grads = {"large": rng.normal(size=65536 + 5).astype(np.float32), "small": np.ones(3, np.float32)}
    right = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in grads.values()))
    for way in WAYS:
        found = (
            on_devices(way, lambda tree: fp16.grad_global_norm(tree, axis_name="data"), 4)(stacked(grads, 4))
            if way != "typed"
            else _typed_norm(grads)
        )
        np.testing.assert_allclose(found, np.full(4, right), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_large_half_precision_shard_is_summed_chunk_by_chunk(check_vma):
    grads = np.full(4 * (16 * CHUNK + 3), 0.25, np.float16)

    def norm(tree):
        return fp16.grad_global_norm(tree, axis_name="data", sharded=True)

    spread = jax.shard_map(norm, mesh=mesh(4), in_specs=P("data"), out_specs=P(), check_vma=check_vma)
    program = jax.jit(spread).lower([grads]).compile()
    np.testing.assert_allclose(program([grads]), np.sqrt(grads.size) / 4, rtol=1e-6)
    assert " while(" in program.as_text()


def _typed_norm(grads):
    """Of gradients that are replicated by their types."""

    def norm(tree):
        return fp16.grad_global_norm(tree, axis_name="data")[None]

    return jax.jit(jax.shard_map(norm, mesh=mesh(4), in_specs=P(), out_specs=P()))(grads).repeat(4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_device_branches_where_each_runs_the_program_on_its_own_arrays(check_vma):
    tx = recipe(optax.adamw(0.1), axis_name="data", sharded=True)

    def step(grads):
        return fp16.apply_gradients(tx, grads, tx.init(grads), grads)[0]

    spread = jax.shard_map(step, mesh=mesh(4), in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    program = str(jax.make_jaxpr(spread)(np.ones(4, np.float32)))
    assert "cond[" not in program
    assert "select_n" in program


def test_pmeaned_gradients_need_no_axis_name():
    def step(grads):
        tx = recipe(optax.sgd(0.1))
        mean = fp16.pmean_gradients(grads, "data")
        return fp16.metrics_of(tx.update(mean, tx.init(mean), mean)[1])["grad_norm"]

    for way in ("pmap", "untyped"):
        norms = on_devices(way, step, 4)(np.arange(4, dtype=np.float32)[:, None])
        np.testing.assert_array_equal(norms, np.full(4, 1.5 / 8, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("make", [links, recipe])
def test_sharded_jit_is_right_with_nothing_said_and_gathers_no_gradients(kind, make, count):
    where = NamedSharding(mesh(count, kind=kind), P("data"))
    whole = NamedSharding(where.mesh, P())
    params = {
        "a": jax.device_put(np.ones((8, 3), np.float32), where),
        "b": jax.device_put(np.ones(3, np.float32), whole),
    }
    grads = jax.tree.map(lambda leaf: 16 * leaf, params)
    tx = make(optax.sgd(0.1, momentum=0.9))

    def step(grads, state, params):
        return fp16.apply_gradients(tx, grads, state, params), tx.update(grads, state, params)[0]

    program = jax.jit(step).lower(grads, tx.init(params), params).compile()
    assert "all-gather" not in program.as_text()
    (new, state), updates = program(grads, tx.init(params), params)
    assert new["a"].sharding.is_equivalent_to(where, 2)
    assert updates["a"].sharding.is_equivalent_to(where, 2)
    np.testing.assert_allclose(fp16.metrics_of(state)["grad_norm"], 2 * np.sqrt(27), rtol=1e-6)
    alone, _ = fp16.apply_gradients(tx, *jax.tree.map(np.asarray, (grads, tx.init(params), params)))
    np.testing.assert_allclose(new["a"], alone["a"], rtol=1e-6)
    grads["b"] = jax.device_put(np.array([1, np.inf, 1], np.float32), whole)
    (skipped, state), updates = program(grads, state, new)
    np.testing.assert_array_equal(skipped["a"], new["a"])
    np.testing.assert_array_equal(updates["a"], np.zeros((8, 3)))
    assert fp16.loss_scale_of(state) == 4


def test_an_axis_that_the_compiler_looks_after_needs_no_sum():
    grid = mesh(2, 2)

    def norm(tree):
        return fp16.grad_global_norm(tree, sharded={"a": P("data", "model")})[None]

    with jax.set_mesh(grid):
        tree = {"a": jax.device_put(np.full((2, 2), 3, np.float32), NamedSharding(grid, P("data", "model")))}
        spread = jax.shard_map(norm, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=False)
        np.testing.assert_array_equal(jax.jit(spread)(tree), [6.0])


def test_an_axis_of_one_device_is_summed_over_like_the_others():
    def norms(tree):
        return [fp16.grad_global_norm(tree, axis_name=("data", "model")), fp16.grad_global_norm({}, axis_name="data")]

    spread = jax.shard_map(norms, mesh=mesh(1, 4), in_specs=P("model"), out_specs=P())
    norm, of_nothing = jax.jit(spread)({"a": np.full(4, 2, np.float32)})
    assert (float(norm), float(of_nothing)) == (4.0, 0.0)


SPECS = [
    P(),
    P("data"),
    P("model"),
    P(("data", "model")),
    P(None, "data"),
    P("data", "model"),
    P(None, ("model", "data")),
]


@st.composite
def trees_with_specs(draw):
    leaves = draw(
        st.lists(st.tuples(st.sampled_from(SPECS), st.sampled_from([8, 16]), st.sampled_from([8])), max_size=4)
    )
    half = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tree, specs = {"nested": [], "step": np.zeros((), np.int32)}, {"nested": [], "step": P()}
    for spec, rows, columns in leaves:
        tree["nested"].append(rng.normal(size=(rows, columns)).astype(np.float16 if half else np.float32))
        specs["nested"].append(spec)
    return tree, specs


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (2, 4)])
@hypothesis.settings(max_examples=12)
@hypothesis.given(trees_with_specs(), st.booleans())
def test_the_norm_of_any_tree_under_any_specs_is_that_of_the_whole_arrays(grid, tree_and_specs, check_vma):
    tree, specs = tree_and_specs

    def norm(local):
        return fp16.grad_global_norm(local, axis_name=("data", "model"), sharded=specs)

    spread = jax.shard_map(norm, mesh=mesh(*grid), in_specs=(specs,), out_specs=P(), check_vma=check_vma)
    right = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in tree["nested"]))
    np.testing.assert_allclose(jax.jit(spread)(tree), right, rtol=1e-6)


def test_the_sums_stand_in_the_program_in_the_order_of_the_leaves():
    # Processes that trace them in another order than the rest run other programs, and wait for each other or abort.
    names = ("data", "pipe", "model")
    specs = [P(*axes) for count in range(4) for axes in itertools.combinations(names, count)]
    tree = [np.ones((size + 2,) * 3, np.float32) for size in range(len(specs))]

    def norm(tree):
        return fp16.grad_global_norm(tree, sharded=specs)

    traced = jax.make_jaxpr(norm, axis_env=[(name, 2) for name in names])(tree)
    sums = [each for each in traced.eqns if each.params.get("name") == "total_of"]
    assert [leaf.aval.shape for each in sums for leaf in each.invars] == [leaf.shape for leaf in tree]


@pytest.mark.parametrize("prefix", [{"w": P(), "deep": P("data")}, {"w": False, "deep": True}])
def test_one_spec_stands_for_all_of_a_subtree(prefix):
    tree = {"w": np.full(4, 2, np.float32), "deep": [np.full(4, 3, np.float32), {"x": np.full(8, 3, np.float32)}]}
    places = jax.tree.map(lambda each: P("data") if each in (True, P("data")) else P(), prefix)

    def norm(tree):
        return fp16.grad_global_norm(tree, axis_name="data", sharded=prefix)

    spread = jax.shard_map(norm, mesh=mesh(4), in_specs=(places,), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(spread)(tree), np.sqrt(4 * 4 + 12 * 9), rtol=1e-6)


TREE = {"w": np.ones(4, np.float32), "deep": [np.ones(4, np.float32)]}


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"axis_name": "devices"}, ["axis_name='devices'", "leave axis_name out"]),
        ({"sharded": {"w": P("rows"), "deep": P()}}, ["sharded['w']", "'rows'"]),
        ({"sharded": {"w": P(), "deep": [P(None, "columns")]}}, ["sharded['deep'][0]", "'columns'"]),
        ({"axis_name": "data", "sharded": {"w": True}}, ["says nothing of ['deep'][0]"]),
        ({"axis_name": "data", "sharded": {"w": True, "deep": [True, True]}}, ["names ['deep'][1]"]),
        ({"axis_name": "data", "sharded": {"w": P(), "deep": P(), "v": P()}}, ["names ['v']"]),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_an_axis_or_a_tree_that_does_not_fit_is_refused_by_the_leaf_s_path(axes, words, check_vma):
    def norm(tree):
        return fp16.grad_global_norm(tree, **axes)[None]

    spread = jax.shard_map(norm, mesh=mesh(4), in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    with pytest.raises(ValueError, match=words[0].split("[")[0] if "[" in words[0] else "axis") as refused:
        jax.eval_shape(spread, TREE)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("empty", [None, ()])
def test_a_mean_over_no_axis_is_refused(empty):
    with pytest.raises(ValueError, match="axis_name must name the axis to average over, such as 'batch'; it is empty"):
        fp16.pmean_gradients(jnp.ones(2), empty)


def test_axes_outside_of_their_map_are_refused():
    for norm in (
        lambda tree: fp16.grad_global_norm(tree, axis_name="data"),
        lambda tree: fp16.grad_global_norm(tree, sharded={"w": P("data"), "deep": P()}),
        lambda tree: fp16.pmean_gradients(tree, "data"),
    ):
        with pytest.raises(ValueError, match="isn't an axis of the pmap or shard_map around this step"):
            jax.jit(norm)(TREE)


@pytest.mark.parametrize(
    ("axes", "kind", "words"),
    [
        ({"axis_name": 3}, TypeError, "not 3"),
        ({"axis_name": ("data", "data")}, ValueError, "twice"),
        ({"axis_name": "data", "sharded": {"w": "data"}}, TypeError, "it holds 'data'"),
        ({"sharded": True}, ValueError, "needs axis_name"),
        ({"sharded": {"w": True, "b": False}}, ValueError, "needs axis_name"),
        ({"axis_name": "data", "sharded": {1: True, "w": False}}, TypeError, "must be a tree that JAX can flatten"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(axes, kind, words):
    for make in (
        fp16.dynamic_loss_scale,
        lambda **axes: fp16.clip_by_global_norm_fp32(1.0, **axes),
        lambda **axes: fp16.skip_if_nonfinite(optax.sgd(1.0), **axes),
        lambda **axes: fp16.mixed_precision(optax.sgd(1.0), **axes),
    ):
        with pytest.raises(kind, match=words):
            make(**axes)
