"""Why half-precision parameters need fp32 masters: a small BERT pre-trained with them and without, beside fp32.

    python examples/masters.py
    python examples/masters.py --picture docs/images/masters.png

A bf16 weight of 0.02 moves in steps of 0.0001, an fp16 one in steps of 0.000015: smaller updates are rounded away, and
others rounded. Masters, in fp32, add them up. Optax alone on fp16 parameters keeps its moments in fp16 besides, where the
squares of gradients are zero.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import optax_fp16 as fp16
from bert import BertConfig, BertForPreTraining
from pretrain_bert import batches, init_params, mean_weights, pretraining_loss, read_corpus
from pretrain_bert import parse as pretraining_arguments
from training.arguments import OneLineParser, integer, number
from training.errors import InputError, exit_status
from training.optimizer import decayed, warmup_then_linear
from training.plot import smoothed

AVERAGED = 20  # steps at the end, of which the reported losses are the means


class Way(NamedTuple):
    """A precision of parameters and arithmetic, and how the parameters are updated."""

    name: str
    dtype: Any
    tx: optax.GradientTransformation
    plain: bool = False  # by Optax alone


def ways(adam: optax.GradientTransformation) -> tuple[Way, ...]:
    """fp32; half-precision parameters with masters; without, `adam` still in fp32; and `adam` alone."""

    def recipe(loss_scale: float | None, half_params: bool) -> optax.GradientTransformation:
        return fp16.mixed_precision(adam, max_norm=1.0, loss_scale=loss_scale, half_params=half_params)

    return (
        Way("fp32", jnp.float32, recipe(1.0, half_params=False)),
        Way("fp16 with fp32 masters", jnp.float16, recipe(None, half_params=True)),
        Way("fp16 without masters", jnp.float16, recipe(None, half_params=False)),
        Way("bf16 with fp32 masters", jnp.bfloat16, recipe(1.0, half_params=True)),
        Way("bf16 without masters", jnp.bfloat16, recipe(1.0, half_params=False)),
        Way("fp16, Optax alone", jnp.float16, adam, plain=True),
    )


def losses_of(way: Way, shape: dict[str, Any], params: Any, data: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """float [steps]: the loss before every step over `data`, from the same fp32 parameters in every way."""
    loss_of = pretraining_loss(BertForPreTraining(BertConfig(dtype=way.dtype, **shape)))
    params = jax.tree.map(lambda leaf: leaf.astype(way.dtype), params)

    @jax.jit
    def step(params, opt_state, batch):
        if way.plain:
            (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch, None)
            updates, opt_state = way.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss
        (loss, _), grads = fp16.value_and_grad(loss_of, opt_state, has_aux=True)(params, batch, None)
        params, opt_state = fp16.apply_gradients(way.tx, grads, opt_state, params)
        return params, opt_state, loss

    opt_state, losses = way.tx.init(params), []
    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return np.array(jax.device_get(losses), np.float64)


def compare(steps: int, learning_rate: float, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The losses of every way, or of those named, by name."""
    args = pretraining_arguments(["--vocab-size", "512", "--batch-size", "8", "--length", "32"])
    corpus = read_corpus(args)
    source = batches(args, corpus, "training")
    data = [mean_weights(source.batch(step)) for step in range(steps)]
    shape = {"vocab_size": corpus.tokenizer.get_vocab_size(), "max_length": 32, "dropout": 0.0, "num_heads": 2}
    shape |= {"hidden_size": 32, "num_layers": 1, "intermediate_size": 128}
    params = init_params(BertConfig(**shape), data[0], seed=0)
    adam = optax.adamw(warmup_then_linear(learning_rate, steps // 10, steps), eps=1e-6, mask=decayed)
    chosen = [way for way in ways(adam) if names is None or way.name in names]
    return {way.name: losses_of(way, shape, params, data) for way in chosen}


def show(runs: dict[str, np.ndarray]) -> None:
    """The table: mean losses of the last steps."""
    fp32 = runs["fp32"][-AVERAGED:].mean()
    table = Table("way", "loss", "to fp32", title=f"a BERT of one layer after {len(runs['fp32'])} steps")
    for name, losses in runs.items():
        loss = losses[-AVERAGED:].mean()
        table.add_row(name, f"{loss:.4f}", f"{loss / fp32 - 1:+.2%}")
    Console().print(table)


def draw(path: Path, runs: dict[str, np.ndarray]) -> None:
    """Losses above; below, how far each is above fp32's, for those that stay near it."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    colors = dict(zip(runs, ("black", "tab:blue", "tab:cyan", "tab:green", "tab:orange", "tab:red"), strict=False))
    for name, losses in runs.items():
        above.plot(smoothed(losses, AVERAGED), label=name, color=colors[name], linewidth=3 if name == "fp32" else 1.2)
        apart = smoothed(losses - runs["fp32"], AVERAGED)
        if abs(apart[-1]) < 0.1 and name != "fp32":
            below.plot(apart, label=name, color=colors[name])
    above.set(ylabel="loss (nats)", title=f"Half-precision parameters, mean of {AVERAGED} steps")
    below.axhline(0, color="black", linewidth=0.8)
    below.set(ylabel="above the loss of fp32", xlabel="step")
    for axes in (above, below):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=integer(AVERAGED), default=200)
    parser.add_argument(
        "--learning-rate", type=number(0, open_low=True), default=1e-3, help="at the end of the warm-up"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses into this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    runs = compare(args.steps, args.learning_rate)
    show(runs)
    if args.picture is not None:
        try:
            draw(args.picture, runs)
        except OSError as error:
            raise InputError(f"cannot write {args.picture} ({error.strerror}); give --picture another path") from None
        print(f"picture {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
