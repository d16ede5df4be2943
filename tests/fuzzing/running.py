"""The same programs with JAX and the package: built, laid out on devices, run step by step."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from tests import meshes
from tests.fuzzing import optimizers
from tests.fuzzing.programs import DEVICES, Program, hung_together


class Seen(NamedTuple):
    """After one step, on the host; under `pmap` every array has the devices in front."""

    params: list[np.ndarray]
    masters: list[np.ndarray] | None  # fp32, a leaf's own where it is fp32 itself
    state: Any
    metrics: dict[str, np.ndarray]
    scale: Any  # the loss scale's state
    loss: np.ndarray | None


def inner_of(program: Program) -> Any:
    rate, decay = program.learning_rate, program.weight_decay
    if program.decay_over is not None:
        rate = optax.linear_schedule(rate, 0.1 * rate, program.decay_over)
    momentum = optimizers.MOMENTUM
    made: dict[str, Callable[[], Any]] = {
        "sgd": lambda: optax.sgd(rate),
        "momentum": lambda: optax.sgd(rate, momentum),
        "nesterov": lambda: optax.sgd(rate, momentum, nesterov=True),
        "adam": lambda: optax.adam(rate, optimizers.B1, optimizers.B2, optimizers.ADAM_EPS),
        "adamw": lambda: optax.adamw(rate, optimizers.B1, optimizers.B2, optimizers.ADAM_EPS, weight_decay=decay),
        "bert_adam": lambda: fp16.bert_adam(rate, optimizers.B1, optimizers.B2, optimizers.BERT_EPS, decay),
        "lion": lambda: optax.lion(rate, optimizers.LION_B1, optimizers.LION_B2, weight_decay=decay),
    }
    inner = made[program.inner]()
    if program.accumulate > 1:
        inner = optax.MultiSteps(inner, program.accumulate).gradient_transformation()
    return inner


def transformation_of(program: Program) -> Any:
    """The optimizer as the program composes it."""
    inner, axes = inner_of(program), axes_of(program)
    if program.masters == "remainder" or (program.masters == "whole" and program.composition != "recipe"):
        inner = fp16.master_weights(inner, remainder=program.masters == "remainder")
    if program.rule:
        scale = fp16.dynamic_loss_scale(program.rule.scale, **program.rule.knobs(), **axes)
    else:
        scale = fp16.static_loss_scale(program.static_scale, **axes)
    clip = [] if program.max_norm is None else [fp16.clip_by_global_norm_fp32(program.max_norm, **axes)]
    if program.composition == "recipe":
        half = program.masters == "whole"
        tx = fp16.mixed_precision(inner, max_norm=program.max_norm, loss_scale=scale, half_params=half, **axes)
    elif program.composition == "links" or not clip:
        tx = optax.chain(scale, *clip, fp16.skip_if_nonfinite(inner, **axes))
    elif program.masters == "none":
        tx = optax.chain(scale, fp16.skip_if_nonfinite(optax.chain(*clip, inner), **axes))
    else:  # masters outside of the inner chain, whose clip then sees the same fp32 gradients
        tx = optax.chain(
            scale, fp16.skip_if_nonfinite(fp16.master_weights(optax.chain(*clip, inner_of(program))), **axes)
        )
    return fp16.distributed(tx, "data") if program.layout == "distributed" else tx


def axes_of(program: Program) -> dict[str, Any]:
    """What the transformations have to be told of the devices."""
    if program.layout == "pmap":
        return {"axis_name": "data"}
    if program.layout == "untyped":
        specs = [leaf_spec(leaf.sharded) if number % 2 else leaf.sharded for number, leaf in enumerate(program.leaves)]
        return {"axis_name": "data", "sharded": hung_together(program, specs)}
    return {}


def leaf_spec(sharded: bool) -> P:
    return P("data") if sharded else P()


def stepper(program: Program, tx: Any) -> Callable[..., Any]:
    """(params, state, this step's data) -> (params, state, loss), as one device's program."""

    def step(params: Any, state: Any, data: Any) -> Any:
        true, where, what = data
        scale = fp16.loss_scale_of(state)
        if program.from_loss:
            loss, tree = fp16.value_and_grad(lambda tree: linear_loss(tree, true), state)(params)
            came = jax.tree.leaves(tree)
        else:
            loss = None
            came = [(g * scale).astype(leaf.grad_dtype) for g, leaf in zip(true, program.leaves, strict=True)]
        came = [jnp.where(hit, value.astype(g.dtype), g) for g, hit, value in zip(came, where, what, strict=True)]
        grads = hung_together(program, came)
        if program.layout == "pmap":
            grads = fp16.pmean_gradients(grads, "data")
        if program.applies:
            return *fp16.apply_gradients(tx, grads, state, params), loss
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

    return step


def linear_loss(params: Any, slopes: list[jax.Array]) -> jax.Array:
    return sum(
        ((leaf.astype(jnp.float32) * slope).sum() for leaf, slope in zip(jax.tree.leaves(params), slopes, strict=True)),
        jnp.float32(0),
    )


def step_data(program: Program) -> list[Any]:
    """For each step: the true gradients, and where and what the faults are; [devices, ...] on several devices."""
    _, grads = program.data()
    faults = [program.faults_of(leaf) for leaf in range(len(program.leaves))]
    columns = grads, [where for where, _ in faults], [what for _, what in faults]
    pick = (lambda a, n: a[:, n]) if program.devices > 1 else (lambda a, n: a[0, n])
    return [jax.tree.map(lambda a, n=number: jnp.asarray(pick(a, n)), columns) for number in range(program.steps)]


def run(program: Program) -> Iterator[Seen]:
    """What is there before the first step, and after each."""
    tx = transformation_of(program)
    params = hung_together(program, [jnp.asarray(leaf) for leaf in program.data()[0]])
    runner = {"scan": _scanned, "pmap": _pmapped, "typed": _mapped, "untyped": _mapped, "distributed": _distributed}
    yield from runner.get(program.layout, _stepped)(program, tx, params)


def _stepped(program: Program, tx: Any, params: Any) -> Iterator[Seen]:
    """Eager, jit, or jit on sharded arrays, one call for each step."""
    step, state = stepper(program, tx), tx.init(params)
    if program.layout != "eager":
        step = jax.jit(step, donate_argnums=(0, 1))
    if program.layout == "sharded jit":
        specs, state_specs = specs_of(program, tx, state)
        params, state = on_mesh((params, state), (specs, state_specs))
    yield seen(program, params, state)
    for data in step_data(program):
        params, state, loss = step(params, state, data)
        yield seen(program, params, state, loss)


def specs_of(program: Program, tx: Any, state: Any) -> tuple[Any, Any]:
    """Where the parameters and the state are on the mesh: a moment is where its parameter is."""
    specs = hung_together(program, [leaf_spec(leaf.sharded) for leaf in program.leaves])
    others = {"transform_non_params": lambda _: P(), "is_leaf": _is_place}
    return specs, optax.tree.map_params(tx, lambda _, spec: spec, state, specs, **others)


def on_mesh(tree: Any, specs: Any) -> Any:
    """The arrays where the compiled step will leave them, so that it is compiled once."""
    mesh = meshes.mesh(DEVICES)

    def place(spec: P, part: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), part)

    return jax.tree.map(place, specs, tree, is_leaf=_is_place)


def _scanned(program: Program, tx: Any, params: Any) -> Iterator[Seen]:
    step, state = stepper(program, tx), tx.init(params)
    yield seen(program, params, state)

    def body(carry: Any, data: Any) -> Any:
        *carry, loss = step(*carry, data)
        return tuple(carry), (*carry, loss)

    stacked = jax.tree.map(lambda *steps: np.stack(steps), *step_data(program))
    _, history = jax.jit(lambda carry, data: jax.lax.scan(body, carry, data))((params, state), stacked)
    history = jax.device_get(history)
    for number in range(program.steps):
        yield seen(program, *jax.tree.map(lambda leaf, n=number: leaf[n], history))


def _pmapped(program: Program, tx: Any, params: Any) -> Iterator[Seen]:
    step = jax.pmap(stepper(program, tx), "data", devices=jax.devices()[:DEVICES])
    params, state = meshes.stacked((params, tx.init(params)), DEVICES)
    yield seen(program, params, state)
    for data in step_data(program):
        params, state, loss = step(params, state, data)
        yield seen(program, params, state, loss)


def _mapped(program: Program, tx: Any, params: Any) -> Iterator[Seen]:
    """By hand, on this device's shards of some leaves and on whole others."""
    state = tx.init(params)
    specs, state_specs = specs_of(program, tx, state)
    data_specs = ([leaf_spec(leaf.sharded) for leaf in program.leaves],) * 3
    mapped = jax.shard_map(
        stepper(program, tx),
        mesh=meshes.mesh(DEVICES),
        in_specs=(specs, state_specs, data_specs),
        out_specs=(specs, state_specs, P()),
        check_vma=program.layout == "typed",
    )
    step = jax.jit(mapped)
    params, state = on_mesh((params, state), (specs, state_specs))
    yield seen(program, params, state)
    for data in step_data(program):
        params, state, loss = step(params, state, on_mesh(data, data_specs))
        yield seen(program, params, state, loss)


def _distributed(program: Program, tx: Any, params: Any) -> Iterator[Seen]:
    mesh = meshes.mesh(DEVICES)
    specs, state = tx.state_specs(params, mesh), tx.split_state(tx.init(params), params, mesh)
    one = stepper(program, tx)
    mapped = jax.shard_map(
        lambda params, state, data: one(params, state, jax.tree.map(lambda leaf: leaf[0], data)),
        mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()),
    )  # fmt: skip
    step, params = jax.jit(mapped), on_mesh(params, P())
    yield seen(program, params, tx.whole_state(state, params, mesh))
    for data in step_data(program):
        params, state, loss = step(params, state, on_mesh(data, P("data")))
        yield seen(program, params, tx.whole_state(state, params, mesh), loss)


def seen(program: Program, params: Any, state: Any, loss: Any = None) -> Seen:
    kinds = ("DynamicLossScaleState", "StaticLossScaleState")
    scale = next(node for node in nodes(state) if type(node).__name__ in kinds)
    masters = next((node for node in nodes(state) if type(node).__name__ == "MasterWeightsState"), None)
    # Copies: what is donated to the next step is overwritten.
    params, state, scale, metrics, loss = jax.tree.map(np.array, (params, state, scale, fp16.metrics_of(state), loss))
    leaves = jax.tree.leaves(params)
    kept = None
    if masters is not None:
        kept = [
            _master(param, one)
            for param, one in zip(leaves, jax.tree.leaves(masters.master_params, is_leaf=_is_masked), strict=True)
        ]
    return Seen(leaves, kept, state, metrics, scale, loss)


def nodes(state: Any) -> Iterator[Any]:
    """Every tuple in a state, the outermost first."""
    if isinstance(state, tuple):
        yield state
        for part in state:
            yield from nodes(part)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _master(param: np.ndarray, kept: Any) -> np.ndarray:
    if _is_masked(kept):
        return param
    kept = np.asarray(kept)
    if kept.dtype != np.int16:
        return kept
    upper = param.view(np.uint16).astype(np.int64) << 16
    return (upper + kept).astype(np.uint32).view(np.float32)


def _is_place(node: Any) -> bool:
    return isinstance(node, (P, optax.MaskedNode))
