"""What an NVIDIA GPU would run for a data-parallel step: compiled for four H100s on a machine without one."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from benchmarks.bench.compiled import compiled, gpu_mesh
from benchmarks.bench.gpu_cases import distributed_step
from benchmarks.bench.hlo import cost_of
from benchmarks.bench.shapes import entries_of
from tests.meshes import counts_programs

pytestmark = counts_programs

SHAPES = {"inner": (64, 256), "bias": (256,), "outer": (256, 64), "scale": (64,)}
LARGEST = 64 * 256
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(")


def loss(params, x):
    p = {name: leaf.astype(jnp.float16) for name, leaf in params.items()}
    hidden = jax.nn.gelu(x @ p["inner"] + p["bias"][None])
    return jnp.mean(jnp.square(hidden @ p["outer"] * p["scale"][None]).astype(jnp.float32))


def collectives(program):
    """(kind, dtypes that it carries, the most entries of one of its arrays) of every collective, in order of kind."""
    found = []
    for shapes, kind in _COLLECTIVE.findall(program.as_text()):
        arrays = re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", shapes)
        entries = [math.prod(int(length) for length in lengths.split(",") if length) for _, lengths in arrays]
        found.append((kind, {dtype for dtype, _ in arrays}, max(entries)))
    return sorted(found, key=lambda each: each[0])


@pytest.fixture(scope="module")
def mesh():
    return Mesh(gpu_mesh("h100", 4).devices, ("data",))


def placed(mesh, tree, specs):
    """Shapes that lie on the mesh as the specs say."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs if jax.tree.structure(specs) == jax.tree.structure(tree) else jax.tree.map(lambda _: specs, tree),
    )


def quarters(state):
    """How many of a state's largest arrays, masters among them, lie on a device by a quarter; all of them, or it fails."""
    largest = [leaf for leaf in jax.tree.leaves(state) if leaf.size == LARGEST]
    assert all(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) == LARGEST for leaf in largest)
    return len(largest)


@pytest.mark.slow
def test_the_distributed_step_is_one_reduce_scatter_one_scalar_all_reduce_and_one_all_gather_in_half_precision(mesh):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in SHAPES.items()}
    recipe = fp16.mixed_precision(optax.adamw(1e-3), max_norm=1.0, half_params=True)
    tx = fp16.distributed(recipe, "data", transport=jnp.float16)
    specs, state = tx.state_specs(params, mesh), jax.eval_shape(tx.init, params)

    def step(params, state, x):
        own = jax.lax.pcast(params, "data", to="varying")
        _, grads = fp16.value_and_grad(loss, state)(own, x)
        return fp16.apply_gradients(tx, grads, state, params)

    spread = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    x = jax.ShapeDtypeStruct((32, 64), jnp.float16, sharding=NamedSharding(mesh, P("data")))
    state = placed(mesh, state, specs)
    assert quarters(state) == 6, "masters and two moments of two arrays"
    program = compiled(spread, placed(mesh, params, P()), state, x, donate=(0, 1))
    assert collectives(program) == [
        ("all-gather", {"f16"}, LARGEST),
        ("all-reduce", {"f32"}, 1),
        ("reduce-scatter", {"f16"}, LARGEST),
    ]


@pytest.mark.slow
def test_the_distributed_step_moves_as_many_bytes_as_its_arithmetic(mesh):
    """What gpu_cases.py says of the arithmetic, within a twentieth: gradients in fp32 aren't written before they travel."""
    shapes = [(512, 512)] * 4
    program = distributed_step(Mesh(mesh.devices, ("devices",)), shapes)
    count = cost_of(compiled(program.function, *program.args, donate=program.donate))
    assert count < 1.05 * 24 * entries_of(shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gathered"), [(jnp.float32, "f32"), (jnp.float16, "f16")])
def test_the_compiler_reduce_scatters_and_gathers_where_zero_shardings_place_the_state(mesh, dtype, gathered):
    """Masters of fp16 parameters are part of the state; what is gathered are the fp16 parameters."""
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}
    tx = fp16.mixed_precision(optax.adamw(1e-3), max_norm=1.0, half_params=dtype == jnp.float16)
    state = jax.eval_shape(tx.init, params)
    shardings, parts = fp16.zero_shardings(state, mesh, "data"), fp16.zero_shardings(params, mesh, "data")
    whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), params)

    def step(params, state, x):
        _, grads = fp16.value_and_grad(loss, state)(params, x)
        grads = jax.lax.with_sharding_constraint(grads, parts)
        params, state = fp16.apply_gradients(tx, grads, state, params)
        return jax.lax.with_sharding_constraint(params, whole), jax.lax.with_sharding_constraint(state, shardings)

    state = placed(mesh, state, jax.tree.map(lambda sharding: sharding.spec, shardings))
    assert quarters(state) == (6 if dtype == jnp.float16 else 4), "two moments of two arrays, and their masters"
    x = jax.ShapeDtypeStruct((32, 64), jnp.float16, sharding=NamedSharding(mesh, P("data")))
    program = compiled(step, placed(mesh, params, P()), state, x, donate=(0, 1))
    gather, reduce, scatter = collectives(program)
    assert gather == ("all-gather", {gathered}, LARGEST)
    assert reduce == ("all-reduce", {"f32"}, 1)
    assert (scatter[0], scatter[2]) == ("reduce-scatter", LARGEST)
