"""The programs that are compiled for a GPU: ours with the counts they must stay within, and the peers' for comparison."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_fp16 as fp16

from . import steps
from .shapes import BASE, LARGE, Shapes, abstract, bert_shapes, layer_shapes

BASE_199 = bert_shapes(BASE)
BASE_23 = bert_shapes(BASE, scanned=True)
LAYER_16 = layer_shapes(BASE)
DENSE_24 = [(768, 3072), (3072,), (3072, 768), (768,)] * 6
WORDS = 1024  # of a batch
LARGE_391 = bert_shapes(LARGE)
HALF = jnp.float16
FULL = jnp.float32


class Limits(NamedTuple):
    launches: int
    bytes_per_entry: float
    temporary: int  # bytes
    collectives: tuple[str, ...] = ("all-reduce",)


class Program(NamedTuple):
    """What to compile, and for how many parameters; donated are the arguments before the gradients."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


class Case(NamedTuple):
    name: str
    shapes: Shapes
    build: Callable[[Mesh, Shapes], Program]
    limits: Limits | None = None  # None: a peer, or arithmetic without any guard
    quick: bool = False
    devices: int = 1


def whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def norm_of(function: Callable[[Any], Any], dtype: Any) -> Callable[[Mesh, Shapes], Program]:
    return lambda mesh, shapes: Program(function, (abstract(shapes, dtype, whole(mesh)),))


def step_of(made: Callable[[], steps.Step], grads: Any = FULL, params: Any = FULL) -> Callable[[Mesh, Shapes], Program]:
    def build(mesh: Mesh, shapes: Shapes) -> Program:
        init, step = made()
        sharding = whole(mesh)
        values = abstract(shapes, params, sharding)
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), jax.eval_shape(init, values)
        )
        return Program(step, (values, state, abstract(shapes, grads, sharding)), donate=(0, 1))

    return build


def norm_in_shard_map(mesh: Mesh, shapes: Shapes) -> Program:
    """Replicated gradients: each device squares its part, and one psum adds them up."""
    replicated = PartitionSpec()

    def norm(grads: Any) -> jax.Array:
        return fp16.grad_global_norm(grads, axis_name="devices")

    mapped = jax.shard_map(norm, mesh=mesh, in_specs=replicated, out_specs=replicated)
    return Program(mapped, (abstract(shapes, FULL, whole(mesh)),))


def distributed_step(mesh: Mesh, shapes: Shapes, recipe: Any = None, dtype: Any = FULL) -> Program:
    """Each device has gradients of its own, in the dtype of the parameters, and a part of the optimizer's state."""
    tx = fp16.distributed(recipe or steps.recipe(), "devices", transport=None if dtype == FULL else dtype)
    params = abstract(shapes, dtype, None)
    specs = tx.state_specs(params, mesh)

    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(mesh, spec))

    def parts(params: Any) -> Any:
        return jax.shard_map(tx.init, mesh=mesh, in_specs=whole, out_specs=specs)(params)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        return tx.apply(jax.tree.map(lambda leaf: leaf[0], grads), state, params)

    whole, split = PartitionSpec(), PartitionSpec("devices")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(whole, specs, split), out_specs=(whole, specs))
    state = jax.tree.map(placed, jax.eval_shape(parts, params), specs)
    own = abstract([(mesh.size, *shape) for shape in shapes], dtype, NamedSharding(mesh, split))
    return Program(mapped, (jax.tree.map(lambda leaf: placed(leaf, whole), params), state, own), donate=(0, 1))


def norm_of_shards(norm: Callable[[Any], Any]) -> Callable[[Mesh, Shapes], Program]:
    """Sharded jit: every leaf split over the devices along its first axis, where it divides."""

    def build(mesh: Mesh, shapes: Shapes) -> Program:
        def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec("devices") if shape[0] % mesh.size == 0 else PartitionSpec()
            return jax.ShapeDtypeStruct(shape, FULL, sharding=NamedSharding(mesh, spec))

        return Program(norm, ([leaf(shape) for shape in shapes],))

    return build


def training(made: Callable[[], steps.Step]) -> Callable[[Mesh, Shapes], Program]:
    """A whole step of dense layers that compute in fp16: does XLA fuse the norm into what makes the gradients?"""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        leaves = list(params.values())
        for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
            x = jax.nn.gelu(x @ weight.astype(HALF) + bias.astype(HALF))
        return steps.SCALE * jnp.mean(jnp.square(x.astype(FULL)))

    def build(mesh: Mesh, shapes: Shapes) -> Program:
        function, (params, state, _), donate = step_of(made)(mesh, shapes)

        def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
            return function(params, state, jax.grad(loss)(params, x))

        x = jax.ShapeDtypeStruct((WORDS, shapes[0][0]), HALF, sharding=whole(mesh))
        return Program(step, (params, state, x), donate)

    return build


def _ours(tx: Callable[[], Any], apply: bool = True) -> Callable[[], steps.Step]:
    return lambda: steps.guarded(tx()) if apply else steps.applied(tx())


NORM = fp16.grad_global_norm
TENTH_MB, MB = 100_000, 1_000_000

CASES = [
    Case("norm, fp32", BASE_199, norm_of(NORM, FULL), Limits(16, 4.04, TENTH_MB), quick=True),
    Case("norm, fp16", BASE_199, norm_of(NORM, HALF), Limits(16, 2.02, TENTH_MB)),
    Case("norm, fp32: optax.global_norm", BASE_199, norm_of(optax.global_norm, FULL)),
    Case("norm, fp32, BERT-large", LARGE_391, norm_of(NORM, FULL), Limits(28, 4.04, TENTH_MB)),
    Case("norm, fp32, BERT-large: optax.global_norm", LARGE_391, norm_of(optax.global_norm, FULL)),
    Case("step: adamw alone", BASE_199, step_of(steps.bare)),
    Case("step: recipe", BASE_199, step_of(_ours(steps.recipe)), Limits(222, 32.1, MB)),
    Case("step: recipe, update", BASE_199, step_of(_ours(steps.recipe, False)), Limits(222, 32.1, MB)),
    Case("step: nested", BASE_199, step_of(_ours(steps.nested, False)), Limits(222, 32.1, MB)),
    Case("step: links", BASE_199, step_of(_ours(steps.links, False)), Limits(237, 36.1, MB)),
    Case("step: recipe, fp16 grads", BASE_199, step_of(_ours(steps.recipe), HALF), Limits(222, 28.1, MB)),
    Case("step: fp16 params, masters", BASE_199, step_of(_ours(steps.masters), HALF, HALF), Limits(222, 30.1, MB)),
    Case("step: apply_if_finite", BASE_199, step_of(steps.apply_if_finite)),
    Case("step: DynamicScale", BASE_199, step_of(steps.dynamic_scale)),
    Case("step: jmp", BASE_199, step_of(steps.jmp_scale)),
    Case("step: recipe, scanned", BASE_23, step_of(_ours(steps.recipe)), Limits(30, 32.1, MB), quick=True),
    Case("step: nested, scanned", BASE_23, step_of(_ours(steps.nested, False)), Limits(30, 32.1, MB)),
    Case("step: adamw alone, scanned", BASE_23, step_of(steps.bare)),
    Case("step: DynamicScale, scanned", BASE_23, step_of(steps.dynamic_scale)),
    Case("training, 12 dense layers: adamw alone", DENSE_24, training(steps.bare)),
    Case("training, 12 dense layers: recipe", DENSE_24, training(_ours(steps.recipe)), Limits(96, 71.6, 208 * MB)),
    Case("training, 12 dense layers: apply_if_finite", DENSE_24, training(steps.apply_if_finite)),
    Case("norm in shard_map", BASE_199, norm_in_shard_map, Limits(20, 4.04, TENTH_MB), devices=4),
    Case(
        "norm, sharded jit, one layer",
        LAYER_16,
        norm_of_shards(NORM),
        Limits(40, 2.02, TENTH_MB),
        quick=True,
        devices=4,
    ),
    # By XLA's count, which takes both ends of a collective, for 4 devices: 6 to scatter the gradients, 1 for the norm of a
    # quarter, 7 for a quarter of AdamW's 28, 10 to gather the parameters: 24.
    Case(
        "step: recipe, distributed",
        BASE_199,
        distributed_step,
        Limits(250, 1.05 * 24, 120 * MB, ("all-reduce", "reduce-scatter", "all-gather")),
        devices=4,
    ),
    Case("norm, sharded jit", BASE_199, norm_of_shards(NORM), Limits(480, 2.02, TENTH_MB), devices=4),
    Case("norm, sharded jit: optax.global_norm", BASE_199, norm_of_shards(optax.global_norm), devices=4),
]
