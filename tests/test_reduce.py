"""The one reduction, against NumPy in float64, and what the compiler makes of it where arrays lie whole and where they don't."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from benchmarks.bench.compiled import compiled, gpu_mesh
from benchmarks.bench.hlo import collectives_in, entry_operations, launches_in
from optax_fp16._devices import SPLIT_FROM
from optax_fp16._reduce import CHUNK, GROUP, SMALL, _each, _on_cpu, _on_gpu
from tests.meshes import counts_programs

HALF, BRAIN, FULL = jnp.float16, jnp.bfloat16, jnp.float32


def norm64(tree):
    """The norm in float64, of the leaves that are floating or complex."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    wide = [x.astype(np.complex128).ravel() for x in leaves if jnp.issubdtype(x.dtype, np.inexact)]
    return float(np.sqrt(sum(np.vdot(x, x).real for x in wide)))


def drawn(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, np.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return jnp.asarray(values, dtype)


def on_mesh(count=8, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:count]), ("d",), axis_types=(kind,))


def optimized(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL, jnp.complex64])
@pytest.mark.parametrize("sizes", [(5,), (3, SMALL, 7, SMALL + 1), (2 * CHUNK,), (CHUNK + 1, 1), (7 * CHUNK + 5,)])
def test_the_norm_is_that_of_float64_in_every_dtype(dtype, sizes, jitted):
    tree = {str(i): drawn((size,), dtype, seed=i) for i, size in enumerate(sizes)}
    norm = (jax.jit(fp16.grad_global_norm) if jitted else fp16.grad_global_norm)(tree)
    assert norm.dtype == FULL
    assert not norm.weak_type
    np.testing.assert_allclose(norm, norm64(tree), rtol=2e-6)


def test_float64_leaves_under_x64_have_their_norm_in_fp32():
    with jax.enable_x64(True):
        norm = fp16.grad_global_norm([jnp.full(3, 2.0, jnp.float64), jnp.full(4, 1.0, FULL)])
        assert (norm, norm.dtype) == (4.0, FULL)


def test_dtypes_mix_and_what_is_no_gradient_counts_for_nothing():
    tree = {
        "half": drawn((3, 5), HALF),
        "brain": drawn((7,), BRAIN),
        "full": [drawn((2, 2, 2), FULL), None, drawn((), FULL)],
        "complex": drawn((4,), jnp.complex64),
        "integers": jnp.array([1000]),
        "nothing": np.zeros(3, jax.dtypes.float0),
        "key": jax.random.key(0),
        "python": 0.5,
    }
    counted = {name: leaf for name, leaf in tree.items() if name not in ("integers", "nothing", "key", "python")}
    np.testing.assert_allclose(fp16.grad_global_norm(tree), np.hypot(norm64(counted), 0.5), rtol=2e-6)


def test_more_leaves_than_fit_a_group_all_count():
    tree = [jnp.full((2,), float(i)) for i in range(2 * GROUP + 3)]
    np.testing.assert_allclose(jax.jit(fp16.grad_global_norm)(tree), norm64(tree), rtol=1e-6)


@pytest.mark.parametrize("tree", [{}, [], None, {"a": np.zeros((0,), np.float16)}, [np.zeros((3, 0), np.float32)] * 3])
def test_an_empty_tree_and_empty_leaves_have_norm_0(tree):
    for norm in (fp16.grad_global_norm(tree), jax.jit(fp16.grad_global_norm)(tree)):
        assert (norm, norm.dtype, norm.weak_type) == (0.0, FULL, False)
    assert fp16.grad_global_norm(tree, 1.0)[2]


@pytest.mark.slow
def test_a_thousand_bf16_leaves_of_1_have_norm_31_6_and_are_clipped_to_1():
    tree = [jnp.ones((1,), BRAIN)] * 1000
    tx = fp16.clip_by_global_norm_fp32(1.0)
    clipped, state = tx.update(tree, tx.init(None))
    np.testing.assert_allclose(state.norm_before_clip, np.sqrt(1000), rtol=1e-6)
    assert norm64(clipped) <= 1.01


def test_a_million_times_too_small_for_fp16_squares_still_have_their_norm():
    tree = jnp.full(10000, 1e-4, HALF)
    clipped, state = jax.jit(fp16.clip_by_global_norm_fp32(1e-3).update)(
        tree, fp16.clip_by_global_norm_fp32(1e-3).init(None)
    )
    np.testing.assert_allclose(state.norm_before_clip, 0.01, rtol=1e-3)
    np.testing.assert_allclose(clipped.astype(FULL), 1e-5, rtol=5e-3)


def test_a_norm_beyond_fp32_is_not_finite_and_never_becomes_zeros():
    grads = jnp.array([1e20, 1.0, 1.0])
    clipped, _ = fp16.clip_by_global_norm_fp32(1.0).update(grads, fp16.clip_by_global_norm_fp32(1.0).init(None))
    assert not np.isfinite(clipped).any()
    assert not fp16.grad_global_norm(grads, 1.0)[2]


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
def test_one_inf_anywhere_is_seen(dtype, place):
    leaf = jnp.ones((2 * CHUNK + 3,), dtype).at[place].set(jnp.inf)
    assert np.isposinf(jax.jit(fp16.grad_global_norm)([leaf, jnp.ones(3, dtype)]))


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_leaves_that_sharded_jit_keeps_apart_are_never_joined(dtype):
    shards = [jax.ShapeDtypeStruct((64, 8), dtype, sharding=NamedSharding(on_mesh(), P("d")))] * 5
    text = optimized(fp16.grad_global_norm, shards)
    assert collectives_in(text) == {"all-reduce": 1}
    assert "concatenate" not in text
    assert "conditional" not in text


def test_leaves_that_lie_whole_on_a_device_are_joined_and_the_switch_is_gone():
    text = optimized(fp16.grad_global_norm, [jnp.ones((64, 8))] * 5)
    assert "concatenate" in text
    assert "conditional" not in text


@pytest.mark.parametrize("typed", [True, False])
def test_in_shard_map_each_device_joins_its_own_and_one_number_is_sent(typed):
    mesh = on_mesh()
    shards = [jax.ShapeDtypeStruct((64, 8), FULL, sharding=NamedSharding(mesh, P("d")))] * 5
    mapped = jax.shard_map(
        lambda grads: fp16.grad_global_norm(grads, axis_name="d", sharded=True),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
        check_vma=typed,
    )
    text = optimized(mapped, shards)
    assert collectives_in(text) == {"all-reduce": 1}
    assert "concatenate" in text


def test_where_the_compiler_has_one_of_two_axes_nothing_is_joined():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    shards = [jax.ShapeDtypeStruct((64, 8), FULL, sharding=NamedSharding(mesh, P("x", "y")))] * 5
    mapped = jax.shard_map(
        lambda grads: fp16.grad_global_norm(grads, axis_name="x"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
    )
    assert collectives_in(optimized(mapped, shards)).keys() == {"all-reduce"}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("context", [True, False])
def test_on_an_explicit_mesh_shards_of_different_kinds_have_their_norm(context, count):
    mesh = on_mesh(count, AxisType.Explicit)
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        tree = [
            jax.device_put(drawn((8, 4), FULL, i), NamedSharding(mesh, s)) for i, s in enumerate((P("d"), P(None, "d")))
        ]
        np.testing.assert_allclose(jax.jit(fp16.grad_global_norm)(tree), norm64(tree), rtol=1e-6)


@pytest.mark.parametrize(("platform", "way"), [("tpu", 0), ("cpu", 1), ("cuda", 2), ("rocm", 2)])
def test_each_platform_is_given_its_own_of_the_three_ways(platform, way):
    """The number is a constant of the program before XLA sees it: leaf by leaf where nothing is known of the backend."""
    program = jax.jit(fp16.grad_global_norm).trace([jnp.ones(3)] * 2).lower(lowering_platforms=(platform,)).as_text()
    assert re.search(r"constant dense<(\d+)> : tensor<i32>", program)[1] == str(way)


def test_without_jit_and_op_by_op_the_norm_is_the_same():
    tree = [drawn((5,), HALF), drawn((3,), FULL, 1)]
    with jax.disable_jit():
        np.testing.assert_allclose(fp16.grad_global_norm(tree), norm64(tree), rtol=1e-6)


def test_one_program_may_take_the_norm_in_both_contexts():
    mesh = on_mesh()
    shards = [jax.device_put(drawn((64, 8), FULL, i), NamedSharding(mesh, P("d"))) for i in range(3)]
    mapped = jax.shard_map(
        lambda grads: fp16.grad_global_norm(grads, axis_name="d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    by_hand, by_compiler = jax.jit(lambda grads: (mapped(grads), fp16.grad_global_norm(grads)))(shards)
    np.testing.assert_allclose([by_hand, by_compiler], norm64(shards), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_replicated_leaves_are_split_over_the_devices_and_count_once(count):
    sizes = (SPLIT_FROM, SPLIT_FROM - 1, SPLIT_FROM + 3, 3)
    tree = [drawn((size,), dtype, seed) for seed, (size, dtype) in enumerate(itertools.product(sizes, (HALF, FULL)))]
    for alone in ([leaf] for leaf in tree):
        np.testing.assert_allclose(norm_of_replicated(alone, count), norm64(alone), rtol=2e-6)
    np.testing.assert_allclose(norm_of_replicated(tree, count), norm64(tree), rtol=2e-6)


def norm_of_replicated(tree, count):
    def norm(grads):
        return fp16.grad_global_norm(grads, axis_name="d")

    return jax.jit(jax.shard_map(norm, mesh=on_mesh(count), in_specs=P(), out_specs=P()))(tree)


@pytest.mark.parametrize("way", [_each, _on_cpu, _on_gpu])
def test_every_backend_s_way_gives_the_same_sum(way):
    leaves = [drawn((7, 3), dtype, seed) for seed, dtype in enumerate([HALF, BRAIN, FULL, jnp.complex64] * 2)]
    np.testing.assert_allclose(jnp.sqrt(way(leaves)), norm64(leaves), rtol=2e-6)


@pytest.mark.parametrize(
    ("leaves", "has_ways"),
    [([], False), ([FULL], False), ([HALF], True), ([FULL] * 2, True), ([BRAIN] * 2, True)],
)
def test_a_backend_has_a_way_of_its_own_where_that_matters(leaves, has_ways):
    """Several leaves can be joined, and a CPU takes fp16 in chunks: one leaf of another dtype is summed as it is everywhere."""
    tree = [jnp.ones(3, dtype) for dtype in leaves]
    assert (" cond[" in str(jax.make_jaxpr(fp16.grad_global_norm)(tree))) == has_ways
    with jax.set_mesh(on_mesh(1)):  # of one device: nothing lies in pieces
        assert (" cond[" in str(jax.make_jaxpr(fp16.grad_global_norm)(tree))) == has_ways


def test_vmap_takes_a_norm_for_each_and_grad_passes_through():
    batch = [drawn((3, 5), HALF), drawn((3, 4), FULL)]
    expected = [norm64([leaf[i] for leaf in batch]) for i in range(3)]
    np.testing.assert_allclose(jax.vmap(fp16.grad_global_norm)(batch), expected, rtol=1e-6)
    slopes = jax.grad(fp16.grad_global_norm)([jnp.array([3.0]), jnp.array([4.0])])
    np.testing.assert_allclose(jnp.concatenate(slopes), [0.6, 0.8], rtol=1e-6)


@counts_programs
@pytest.mark.slow
def test_a_gpu_reads_a_group_of_leaves_in_one_launch_and_gathers_no_shards():
    def program(mesh, spec):
        leaf = jax.ShapeDtypeStruct((64, 8), FULL, sharding=NamedSharding(mesh, spec))
        return compiled(fp16.grad_global_norm, [leaf] * 40).as_text()

    whole = program(gpu_mesh("h100", 1), P())
    assert launches_in(entry_operations(whole)) <= 2
    sharded = program(gpu_mesh("h100", 4), P("devices"))
    assert collectives_in(sharded) == {"all-reduce": 1}
    assert launches_in(entry_operations(sharded)) > 10
