"""Five ways of training the same classifier, in turn in one process: speed, memory, and where the loss ends."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import optax_fp16 as fp16
from bert import BertConfig, BertForClassification
from finetuning.batches import Batches
from finetuning.evaluation import predictor
from finetuning.flax_peer import flax_ways
from finetuning.task import classification_loss
from finetuning.weights import halved
from training.arguments import DYNAMIC
from training.optimizer import optimizer
from training.step import AXIS, on_every_device, split, train_step

STEPS = 25  # of a run, unless --steps says otherwise
_SEED_STRIDE = 1_000_000  # between the step numbers of two seeds, from which dropout is drawn


class Way(NamedTuple):
    """A way of training."""

    name: str
    dtype: Any
    loss_scale: Any
    half_params: bool = False
    flax: bool = False


WAYS = (
    Way("fp32", jnp.float32, 1.0),
    Way("bf16, fp32 parameters", jnp.bfloat16, 1.0),
    Way("fp16, fp32 parameters", jnp.float16, DYNAMIC),
    Way("fp16 with fp32 masters", jnp.float16, DYNAMIC, half_params=True),
    Way("fp16, Flax's DynamicScale", jnp.float16, DYNAMIC, flax=True),
)


class Setting(NamedTuple):
    """What all ways have in common."""

    args: argparse.Namespace
    config: BertConfig
    params_of: Callable[[int], Any]  # fp32 parameters of a BertForClassification, by seed
    training: Callable[[int], Batches]  # batches of one shape, by seed
    validation: Batches
    names: list[str]  # of the classes
    length: int  # of the sentences, in tokens


class Result(NamedTuple):
    """One way, run with every seed."""

    steps_per_second: float
    argument_bytes: int
    temp_bytes: int
    losses: list[float]  # of validation, by seed
    accuracies: list[float]
    skipped: int  # in all runs


def measure(way: Way, setting: Setting, bar: Progress) -> Result:
    """Compile one way's step once, and train with it from every seed; says how each run ended."""
    args = setting.args
    model = BertForClassification(dataclasses.replace(setting.config, dtype=way.dtype), len(setting.names))
    init, step = _init_and_step(way, model, args)
    predict = predictor(model)
    task, compiled, seconds, losses, accuracies, skipped = bar.task_ids[0], None, [], [], [], 0
    for seed in range(args.seed, args.seed + args.seeds):
        bar.update(task, description=f"{way.name}, seed {seed}")
        params = setting.params_of(seed)
        params = halved(params, way.dtype) if way.half_params else params
        params, opt_state = on_every_device((params, init(params)))
        for number, batch in _batches(setting.training(seed), args, seed):
            compiled = compiled or step.lower(params, opt_state, batch, number).compile()
            started = time.perf_counter()
            params, opt_state, metrics = jax.block_until_ready(compiled(params, opt_state, batch, number))
            seconds.append(time.perf_counter() - started)
            bar.advance(task)
        skipped += int(metrics["skipped_total"])
        found = predict(params, setting.validation)
        losses.append(found.loss)
        accuracies.append(found.accuracy)
        bar.console.print(
            f"{way.name}, seed {seed}: {1 / np.median(seconds):.2f} steps/s, "
            f"validation loss {found.loss:.4f}, accuracy {found.accuracy:.1%}",
            highlight=False,
            soft_wrap=True,
        )
    memory = compiled.memory_analysis()
    speed = 1 / float(np.median(seconds))
    return Result(speed, memory.argument_size_in_bytes, memory.temp_size_in_bytes, losses, accuracies, skipped)


def _init_and_step(way: Way, model: BertForClassification, args: argparse.Namespace) -> tuple[Any, Any]:
    loss_of = classification_loss(model)
    if way.flax:
        return flax_ways(loss_of, args)
    options = argparse.Namespace(**{**vars(args), "loss_scale": way.loss_scale})
    tx = optimizer(options, AXIS, adam=fp16.bert_adam, half_params=way.half_params)
    return tx.init, train_step(loss_of, tx, seed=0, accumulate=1)


def _batches(data: Batches, args: argparse.Namespace, seed: int) -> Iterator[tuple[np.int32, Any]]:
    for step in range(args.steps):
        yield np.int32(seed * _SEED_STRIDE + step), split(data.batch(step), 1)


def compare(setting: Setting) -> list[Result]:
    """Run every way and print the table, and what it says and can't say."""
    args, console = setting.args, Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task("", total=len(WAYS) * args.seeds * args.steps)
        results = [measure(way, setting, bar) for way in WAYS]
    Console(width=130).print(_table(results, setting))
    first = results[0].losses
    half = [result for way, result in zip(WAYS, results, strict=True) if way.dtype == jnp.float16]
    apart = max(abs(b - a) for result in half for a, b in zip(first, result.losses, strict=True))
    print(f"loss and accuracy are of validation, means over the seeds; fp32's losses by seed: {_numbers(first)}")
    print(
        f"noise of the seeds in fp32: {max(first) - min(first):.4f}; fp16 is at most {apart:.4f} from fp32's same seed"
    )
    print("arguments: parameters, optimizer state and batch; temporary: what the compiled step needs besides")
    if jax.default_backend() == "cpu":
        print("a CPU has no fp16 arithmetic: these speeds say nothing about GPUs; this command is ready to run on one")
    return results


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _table(results: list[Result], setting: Setting) -> Table:
    args, first = setting.args, results[0]
    machine = f"{jax.local_device_count()} x {jax.devices()[0].device_kind}"
    title = (
        f"{args.steps} steps, {args.batch_size} sentences of {setting.length} tokens, {args.seeds} seed(s), {machine}"
    )
    table = Table("way", title=title)
    for head in ("steps/s", "to fp32", "arguments MB", "temporary MB", "loss", "accuracy", "skipped"):
        table.add_column(head, justify="right")
    for way, result in zip(WAYS, results, strict=True):
        table.add_row(
            way.name,
            f"{result.steps_per_second:.2f}",
            f"x {result.steps_per_second / first.steps_per_second:.2f}",
            f"{result.argument_bytes / 1e6:.3g}",
            f"{result.temp_bytes / 1e6:.3g}",
            f"{np.mean(result.losses):.4f}",
            f"{np.mean(result.accuracies):.1%}",
            f"{result.skipped}",
        )
    return table
