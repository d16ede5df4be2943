"""What `parallel_bert.py` does once it knows its devices."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parallel import run, step
from parallel.checkpoints import Checkpoints
from parallel.data import Data, read
from parallel.layout import Layout, check
from parallel.processes import end_with_the_launcher
from parallel.table import LAYOUTS, run_all
from training.errors import InputError
from training.folders import make_writable
from training.progress import scale_words

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
HEARTBEAT = 60  # seconds without a sign of life after which JAX ends a run whose processes somebody else started


def main(args: argparse.Namespace) -> int:
    if args.process_id is None:
        return _run(args)
    return together(args, _run)


def together(args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """`work(args)` with the devices of all processes as one set; when one of the others is lost, this one ends too."""
    end_with_the_launcher()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator,
        num_processes=args.processes,
        process_id=args.process_id,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    try:
        return work(args)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and "Gloo" not in str(error):  # JAX raises it as either
            raise
        reason = str(error).splitlines()[0]
        print(
            f"error: process {args.process_id} lost the others ({reason}); start again with --resume", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(1)  # the ordinary way out would wait for the others


def _run(args: argparse.Namespace) -> int:
    layouts = LAYOUTS if args.table else (Layout(args.dp, args.tp, args.pp),)
    data = read(
        size=args.size,
        vocabulary=args.vocab_size,
        length=args.length,
        batch_size=args.batch_size,
        seed=args.seed,
        dtype=DTYPES[args.precision],
    )
    for layout in layouts:
        check(layout, data.config, args.batch_size, args.micro_batches)
    make_writable(args.run_dir, "--run-dir")
    if args.table:
        run_all(lambda layout, zero: _one(args, data, layout, zero, Silent()), args.run_dir)
    else:
        _single(args, data, layouts[0])
    return 0


class Silent:
    """Looks at no step and saves nothing."""

    def start(self, plan: step.Spread, params: Any) -> tuple[Any, Any, int]:
        return params, step.init_state(plan, params), 0

    def after(self, number: int, params: Any, state: Any, metrics: dict[str, Any]) -> None:
        del number, params, state, metrics


class Watched(Silent):
    """Prints every step in the first process, and saves."""

    def __init__(self, args: argparse.Namespace, checkpoints: Checkpoints):
        self._args, self._checkpoints = args, checkpoints
        self._plan: Any = None

    def start(self, plan: step.Spread, params: Any) -> tuple[Any, Any, int]:
        self._plan = plan
        latest = self._checkpoints.latest()
        if latest is None:
            return super().start(plan, params)
        if not self._args.resume:
            raise InputError(
                f"{self._args.run_dir} holds the checkpoints of a run, up to step {latest}; add --resume to go on with it, or "
                "give another --run-dir"
            )
        if latest >= self._args.steps:
            raise InputError(f"the run in {self._args.run_dir} has done its {latest} steps; write more --steps")
        say(f"going on from step {latest}")
        return *self._checkpoints.restore(latest, plan, params), latest

    def after(self, number: int, params: Any, state: Any, metrics: dict[str, Any]) -> None:
        loss, scale, norm = (float(metrics[name]) for name in ("loss", "loss_scale", "grad_norm"))
        skipped = "" if bool(metrics["grads_finite"]) else "  skipped"
        say(f"step {number}/{self._args.steps}  loss {loss:.5f}  scale {scale_words(scale)}  |g| {norm:.4g}{skipped}")
        if number % self._args.checkpoint_every == 0 or number == self._args.steps:
            self._checkpoints.save(number, self._plan, params, state)


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def _single(args: argparse.Namespace, data: Data, layout: Layout) -> None:
    facts = {name: getattr(args, name) for name in ("size", "vocab_size", "length", "batch_size", "precision", "seed")}
    checkpoints = Checkpoints(args.run_dir / "checkpoints", facts)
    result = _one(args, data, layout, args.zero, Watched(args, checkpoints))
    checkpoints.close()
    memory = result.memory
    say(f"loss {result.loss:.5f}, validation loss {result.validation_loss:.5f}, {result.steps_per_second:.2f} steps/s")
    say(
        f"bytes on a device: parameters {memory.parameters} (by arithmetic {memory.parameters_expected}), optimizer "
        f"{memory.optimizer} (by arithmetic {memory.optimizer_expected}), temporary {memory.temporary}, peak {memory.peak}"
    )


def _one(args: argparse.Namespace, data: Data, layout: Layout, zero: bool, watch: Silent) -> run.Result:
    plan = run.plan_of(data, layout, args.micro_batches, zero=zero, learning_rate=args.learning_rate)
    params = step.put(run.init_params(data.config, args.seed), plan.mesh, plan.param_specs)
    params, state, done = watch.start(plan, params)
    return run.train(
        plan,
        data,
        layout,
        params,
        state,
        first=done + 1,
        last=args.steps,
        poison_at=args.poison,
        after=watch.after,
    )
