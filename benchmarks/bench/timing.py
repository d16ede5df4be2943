"""Timing compiled steps: all of them in turn, round after round, so that they share whatever else the machine does."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .shapes import Shapes, abstract, drawn, entries_of
from .steps import SCALE, Step

# Seconds before each run. The one before gives its temporary memory back after its result is ready, which would be counted here.
PAUSE = 0.1


class Compiled(NamedTuple):
    run: Callable[[Any, Any, Any], tuple[Any, Any]]
    trace: float  # seconds
    lower: float
    compile: float

    @property
    def seconds(self) -> float:
        return self.trace + self.lower + self.compile


class Spread(NamedTuple):
    """Milliseconds of one step."""

    median: float
    low: float
    high: float


def traced(step: Step, shapes: Shapes, grads: Any = jnp.float32) -> tuple[Any, float, float]:
    """The step lowered with params and state donated, and the seconds it took to trace and to lower it."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    params = abstract(shapes, jnp.float32, None)
    state = jax.tree.map(shape_of, jax.eval_shape(step.init, params))
    given = jax.tree.map(lambda leaf: leaf.update(dtype=grads), params)
    start = time.perf_counter()
    program = jax.jit(step.step, donate_argnums=(0, 1)).trace(params, state, given)
    between = time.perf_counter()
    lowered = program.lower()
    return lowered, between - start, time.perf_counter() - between


def compiled(step: Step, shapes: Shapes, grads: Any = jnp.float32) -> Compiled:
    """The step compiled, and how long each stage took."""
    lowered, tracing, lowering = traced(step, shapes, grads)
    start = time.perf_counter()
    program = lowered.compile()
    return Compiled(program, tracing, lowering, time.perf_counter() - start)


def interleaved(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each run in each round, after one round that isn't counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def spread(times: list[float]) -> Spread:
    return Spread(statistics.median(times), min(times), max(times))


def gradients(shapes: Shapes, dtype: Any) -> dict[str, Any]:
    """Gradients that every step is given alike."""
    return drawn(shapes, dtype, seed=1, scale=SCALE * 1e-4)


def stepper(program: Compiled, step: Step, shapes: Shapes, grads: Any) -> Callable[[], Any]:
    """A function of nothing that takes the next step from where the last one ended."""
    params = drawn(shapes, jnp.float32, seed=0, scale=0.02)
    carry = [params, jax.jit(step.init)(params)]

    def run() -> Any:
        carry[:] = program.run(*carry, grads)
        return carry

    return run


def copier(shapes: Shapes) -> Callable[[], Any]:
    """Moves as many bytes as AdamW must at least, 28 for a parameter: 3.5 numbers are read and written where they stand."""
    numbers = [jnp.ones(7 * entries_of(shapes) // 2, jnp.float32)]
    move = jax.jit(lambda numbers: numbers * jnp.float32(1.5), donate_argnums=0)

    def run() -> Any:
        numbers[:] = [move(*numbers)]
        return numbers

    return run
