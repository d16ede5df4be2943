#!/usr/bin/env python3
"""Milliseconds of a whole BERT pre-training step (forward, backward, optimizer) in fp32, bf16, and fp16 O1 and O2.

    python benchmarks/bert_step.py                                    # BERT-base, where JAX finds a GPU
    python benchmarks/bert_step.py --size tiny --batch 2 --length 16  # on any CPU

O1 has fp32 parameters and computes in fp16; O2 has fp16 parameters and fp32 masters in the optimizer's state. The words are drawn
at random: this measures time and memory, not learning. Dropout is on.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench.tables import markdown
from bench.timing import interleaved, spread

import optax_fp16 as fp16
from bert.config import SIZES, BertConfig
from bert.models import BertForPreTraining

VOCABULARY = 30522
MASKED = 0.15  # of the words


class Way(NamedTuple):
    name: str
    compute: Any
    params: Any
    loss_scale: float | None  # None: dynamic


WAYS = [
    Way("fp32", jnp.float32, jnp.float32, 1.0),
    Way("bf16", jnp.bfloat16, jnp.float32, 1.0),
    Way("fp16, O1", jnp.float16, jnp.float32, None),
    Way("fp16, O2", jnp.float16, jnp.float16, None),
]
HEADER = ("precision", "ms", "low", "high", "× first", "sequences/s", "arguments MB", "temp MB", "loss", "skipped")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="base")
    parser.add_argument(
        "--precision", action="append", choices=[way.name for way in WAYS], help="only this one; repeatable"
    )
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sequences (default: 32)")
    parser.add_argument(
        "--length", type=int, default=128, metavar="N", help="words of a sequence, up to 512 (default: 128)"
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="how often each step runs (default: 20)")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a profile of three steps of each here")
    options = parser.parse_args(argv)
    for name, low, high in (("batch", 1, 4096), ("length", 8, 512), ("rounds", 1, 10_000)):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} must be from {low} to {high}, not {getattr(options, name)}")
    return options


def random_batch(options: argparse.Namespace) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (options.batch, options.length)
    masked = max(1, round(MASKED * options.length))
    places = np.stack([rng.choice(options.length, masked, replace=False) for _ in range(options.batch)])
    batch = {
        "token_ids": rng.integers(0, VOCABULARY, shape),
        "attention_mask": np.ones(shape),
        "token_types": np.zeros(shape),
        "masked_positions": places,
        "words": rng.integers(0, VOCABULARY, places.shape),
        "next": rng.integers(0, 2, options.batch),
    }
    return {name: jnp.asarray(values, jnp.int32) for name, values in batch.items()}


def training_step(way: Way, options: argparse.Namespace) -> tuple[Callable[..., Any], Any, Any]:
    """(step, params, opt_state) of one way to train."""
    config = BertConfig(VOCABULARY, dtype=way.compute, **SIZES[options.size])
    model = BertForPreTraining(config)
    half = way.params == jnp.float16
    tx = fp16.mixed_precision(optax.adamw(1e-4), max_norm=1.0, loss_scale=way.loss_scale, half_params=half)

    def inputs(batch: dict[str, jax.Array]) -> list[jax.Array]:
        return [batch[name] for name in ("token_ids", "attention_mask", "token_types", "masked_positions")]

    def loss_of(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        words, following = model.apply(params, *inputs(batch), deterministic=False, rngs={"dropout": key})
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return cross_entropy(words, batch["words"]).mean() + cross_entropy(following, batch["next"]).mean()

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array], number: jax.Array) -> tuple[Any, Any, jax.Array]:
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), number)
        loss, grads = fp16.value_and_grad(loss_of, opt_state)(params, batch, key)
        return *fp16.apply_gradients(tx, grads, opt_state, params), loss

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, *inputs(random_batch(options)))
        params = jax.tree.map(lambda leaf: leaf.astype(way.params), params)
        return params, tx.init(params)

    return step, *jax.jit(start)(jax.random.key(0))


def stepper(way: Way, options: argparse.Namespace, batch: Any) -> tuple[Any, Callable[[], Any], list[Any]]:
    """(compiled program, a function of nothing that takes the next step, [params, opt_state, loss] as they are now)."""
    step, params, opt_state = training_step(way, options)
    number = jnp.zeros((), jnp.int32)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, batch, number).compile()
    now = [params, opt_state, number]

    def run() -> Any:
        now[:] = program(now[0], now[1], batch, number)
        return now

    return program, run, now


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    batch = random_batch(options)
    made = {way.name: stepper(way, options, batch) for way in WAYS if way.name in (options.precision or [way.name])}
    times = interleaved({name: run for name, (_, run, _) in made.items()}, options.rounds)
    device = jax.devices()[0]
    print(
        f"BERT-{options.size}, {options.batch} × {options.length} words; {device.device_kind} ({device.platform}),",
        end=" ",
    )
    print(f"JAX {jax.__version__}, {options.rounds} rounds.\n")
    rows, base = [], spread(next(iter(times.values()))).median
    for name, (program, _, (_, opt_state, loss)) in made.items():
        time, memory = spread(times[name]), program.memory_analysis()
        row = [name, *(f"{value:.1f}" for value in time), f"{time.median / base:.2f}"]
        row += [f"{1e3 * options.batch / time.median:.0f}", f"{memory.argument_size_in_bytes / 1e6:.0f}"]
        skipped = fp16.metrics_of(opt_state)["skipped_total"]
        rows.append((*row, f"{memory.temp_size_in_bytes / 1e6:.0f}", f"{loss:.3f}", str(skipped)))
    print(markdown(HEADER, rows))
    with jax.profiler.trace(options.profile) if options.profile else contextlib.nullcontext():
        for _, run, _ in made.values() if options.profile else ():
            jax.block_until_ready([run() for _ in range(3)][-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
