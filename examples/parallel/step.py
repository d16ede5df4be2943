"""The training step of a BERT in parallel: one `shard_map` over the axes data, pipe and model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from bert import BertConfig
from parallel.layout import DATA, specs_of
from parallel.model import embed, encoder_layer, losses
from parallel.pipeline import through_the_stages
from training.optimizer import decayed

Batch = dict[str, Any]


class Spread(NamedTuple):
    """A model, an optimizer and where they lie."""

    config: BertConfig
    mesh: Mesh
    micro_batches: int
    tx: Any
    zero: bool
    param_specs: Any
    state_specs: Any


def spread(
    config: BertConfig, mesh: Mesh, micro_batches: int, params: Any, *, learning_rate: float, zero: bool
) -> Spread:
    """AdamW under loss scaling, clipping and skipping, with fp32 masters of half-precision parameters; `params` may be shapes."""
    half = config.dtype != jnp.float32
    specs = specs_of(params)
    adamw = optax.adamw(learning_rate, eps=1e-6, weight_decay=0.01, mask=decayed)
    scale = fp16.dynamic_loss_scale() if config.dtype == jnp.float16 else fp16.static_loss_scale(1.0)
    tx = fp16.mixed_precision(adamw, max_norm=1.0, loss_scale=scale, half_params=half)
    if zero:
        tx = fp16.distributed(tx, DATA, transport=config.dtype if half else None, param_specs=specs)
        return Spread(config, mesh, micro_batches, tx, zero, specs, tx.state_specs(params, mesh))
    state_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, jax.eval_shape(tx.init, params), specs, transform_non_params=lambda _: P()
    )
    return Spread(config, mesh, micro_batches, tx, zero, specs, state_specs)


def init_state(plan: Spread, params: Any) -> Any:
    """The optimizer's state, made where it lies."""
    init = jax.shard_map(plan.tx.init, mesh=plan.mesh, in_specs=(plan.param_specs,), out_specs=plan.state_specs)
    return jax.jit(init)(params)


def put(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Host arrays that every process has, onto the mesh; a process fills in its own devices' parts."""

    def place(spec: P, leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda leaf: place(spec, leaf), part),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, P),
    )


def share_of_loss(plan: Spread, params: Any, batch: Batch) -> jax.Array:
    """This device's part of the batch's loss: those of all data-parallel devices add up to it."""
    config = plan.config
    cut = {name: leaf.reshape(plan.micro_batches, -1, *leaf.shape[1:]) for name, leaf in batch.items()}
    inputs = embed(params["bert"]["embeddings"], config, cut["token_ids"], cut["token_types"])

    def stage(x: jax.Array, mask: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, p: encoder_layer(p, config, x, mask))
        return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["bert"]["layers"])[0]

    hidden = through_the_stages(stage, inputs, cut["attention_mask"])
    words, pairs = losses(params, config, hidden.reshape(-1, *hidden.shape[2:]), batch)
    return words + pairs


def train_step(plan: Spread) -> Callable[..., Any]:
    """`step(params, state, batch, poison) -> (params, state, metrics)`; donates its first two.

    `poison` is the index along "data" of the device whose gradients become Inf; -1 for none.
    """

    def step(params: Any, state: Any, batch: Batch, poison: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        # Differentiating by parameters that vary along "data" by their type leaves each device its own gradients.
        own = jax.lax.pcast(params, DATA, to="varying")
        count, me = jax.lax.axis_size(DATA), jax.lax.axis_index(DATA)
        factor = jnp.where(me == poison, jnp.inf, count).astype(jnp.float32)
        share, grads = fp16.value_and_grad(lambda p: share_of_loss(plan, p, batch) * factor, state)(own)
        grads = grads if plan.zero else fp16.pmean_gradients(grads, DATA, plan.config.dtype)
        params, state = fp16.apply_gradients(plan.tx, grads, state, params)
        return params, state, {"loss": jax.lax.psum(share, DATA) / count, **fp16.metrics_of(state)}

    places = (plan.param_specs, plan.state_specs)
    spread_step = jax.shard_map(step, mesh=plan.mesh, in_specs=(*places, P(DATA), P()), out_specs=(*places, P()))
    return jax.jit(spread_step, donate_argnums=(0, 1))


def evaluation(plan: Spread) -> Callable[[Any, Batch], jax.Array]:
    """The loss of a batch."""
    spread_loss = jax.shard_map(
        lambda params, batch: jax.lax.psum(share_of_loss(plan, params, batch), DATA),
        mesh=plan.mesh,
        in_specs=(plan.param_specs, P(DATA)),
        out_specs=P(),
    )
    return jax.jit(spread_loss)
