"""One run of one layout: train, validate, and measure what each device holds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

from bert import BertConfig, BertForPreTraining
from parallel import step as steps
from parallel.data import Data, weighted
from parallel.layout import DATA, Layout, local_entries, mesh_of

PATIENCE = 3600  # seconds that a process waits for the others to compile


class Memory(NamedTuple):
    """Bytes on a device: measured on the arrays and by the compiler's own account, and by arithmetic."""

    parameters: int
    optimizer: int
    temporary: int
    peak: int
    parameters_expected: int
    optimizer_expected: int


class Result(NamedTuple):
    steps_per_second: float
    loss: float
    validation_loss: float
    memory: Memory


def init_params(config: BertConfig, seed: int) -> Any:
    """The parameters that every layout starts from, in the precision that they are kept in."""
    ids, positions = jnp.zeros((1, config.max_length), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(BertForPreTraining(config).init)(jax.random.key(seed), ids, ids, ids, positions)["params"]
    return jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)


def held(tree: Any) -> int:
    """Bytes of a tree on one of this process's devices."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def memory_of(plan: steps.Spread, layout: Layout, params: Any, state: Any, program: Any) -> Memory:
    """Set beside the arithmetic: parameters in their own precision; two fp32 moments, and a master for those in half."""
    account = program.memory_analysis()
    arguments = account.argument_size_in_bytes
    entries = local_entries(params, plan.param_specs, layout)
    width = jnp.dtype(plan.config.dtype).itemsize
    each = 8 if width == 4 else 12
    return Memory(
        parameters=held(params),
        optimizer=held(state),
        temporary=account.temp_size_in_bytes,
        peak=arguments + account.output_size_in_bytes - account.alias_size_in_bytes + account.temp_size_in_bytes,
        parameters_expected=width * entries,
        optimizer_expected=each * entries // (layout.dp if plan.zero else 1),
    )


def plan_of(data: Data, layout: Layout, micro_batches: int, *, zero: bool, learning_rate: float) -> steps.Spread:
    shapes = jax.eval_shape(lambda: init_params(data.config, 0))
    return steps.spread(data.config, mesh_of(layout), micro_batches, shapes, learning_rate=learning_rate, zero=zero)


def placed(plan: steps.Spread, batch: dict[str, Any]) -> dict[str, Any]:
    return steps.put(batch, plan.mesh, dict.fromkeys(batch, P(DATA)))


def wait_for_the_others(what: str) -> None:
    """Until every process has come as far: gloo's sums give up on a process that is half a minute late, as a compiler can be."""
    if jax.process_count() > 1:
        everyone = set(range(jax.process_count()))
        ocp.multihost.sync_global_processes(what, timeout=PATIENCE, processes=everyone)


def train(
    plan: steps.Spread,
    data: Data,
    layout: Layout,
    params: Any,
    state: Any,
    *,
    first: int,
    last: int,
    poison_at: int | None = None,
    after: Callable[[int, Any, Any, dict[str, Any]], None],
) -> Result:
    """Steps `first` to `last`; `after(step, params, state, metrics)` sees each, the step counted from 1."""
    poison = {number: jnp.int32(layout.dp - 1 if number == poison_at else -1) for number in range(first, last + 1)}
    batch = placed(plan, weighted(data.training.batch(first - 1)))
    program = steps.train_step(plan).lower(params, state, batch, poison[first]).compile()
    held_out = placed(plan, weighted(next(iter(data.validation.once()))))
    evaluate = steps.evaluation(plan).lower(params, held_out).compile()
    memory = memory_of(plan, layout, params, state, program)
    wait_for_the_others("compiled")
    loss, start = float("nan"), time.perf_counter()
    for number in range(first, last + 1):
        batch = placed(plan, weighted(data.training.batch(number - 1)))
        params, state, metrics = program(params, state, batch, steps.put(poison[number], plan.mesh, P()))
        loss = float(metrics["loss"])
        after(number, params, state, metrics)
    seconds = time.perf_counter() - start
    validation = float(evaluate(params, held_out))
    return Result((last - first + 1) / seconds, loss, validation, memory)
