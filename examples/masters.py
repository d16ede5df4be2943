"""Why half-precision parameters need fp32 masters: a small BERT fine-tuned with them and without, beside fp32.

    python examples/masters.py
    python examples/masters.py --picture docs/images/masters.png

Fine-tuning moves a weight by 0.00001 in a step, and by less towards its end. A bf16 weight of 0.02 moves in steps of
0.0001, an fp16 one in steps of 0.000015: smaller updates are rounded away. Masters, in fp32, add them up.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
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

PRETRAINING_STEPS, PRETRAINING_RATE = 200, 1e-3  # in fp32, the same for all
PASS = 8  # batches that the fine-tuning goes over again and again; reported losses are means over one pass


class Way(NamedTuple):
    """A precision of parameters and arithmetic, and how the parameters are updated."""

    name: str
    dtype: Any
    loss_scale: float | None  # None: dynamic
    half_params: bool = False

    def optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        """Always the same AdamW, in fp32 whatever the parameters are in."""
        adam = optax.adamw(learning_rate, eps=1e-6, mask=decayed)
        return fp16.mixed_precision(adam, max_norm=1.0, loss_scale=self.loss_scale, half_params=self.half_params)


FP32 = Way("fp32", jnp.float32, 1.0)
WAYS = (
    FP32,
    Way("fp16 with fp32 masters", jnp.float16, None, half_params=True),
    Way("fp16 without masters", jnp.float16, None),
    Way("bf16 with fp32 masters", jnp.bfloat16, 1.0, half_params=True),
    Way("bf16 without masters", jnp.bfloat16, 1.0),
)


def trainer(way: Way, shape: dict[str, Any]) -> Callable[..., tuple[Any, jax.Array]]:
    """`train(params, data, peak) -> (params, loss before every step)`, over batches stacked along the first axis."""
    loss_of = pretraining_loss(BertForPreTraining(BertConfig(dtype=way.dtype, **shape)))

    @jax.jit
    def train(params: Any, data: Any, peak: float) -> tuple[Any, jax.Array]:
        steps = len(jax.tree.leaves(data)[0])
        tx = way.optimizer(warmup_then_linear(peak, steps // 10, steps))

        def step(carry: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[tuple[Any, Any], jax.Array]:
            params, opt_state = carry
            (loss, _), grads = fp16.value_and_grad(loss_of, opt_state, has_aux=True)(params, batch, None)
            return fp16.apply_gradients(tx, grads, opt_state, params), loss

        params = jax.tree.map(lambda leaf: leaf.astype(way.dtype), params)
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), data)
        return params, losses

    return train


def compare(steps: int, learning_rate: float, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The losses of every way, or of those named, by name."""
    args = pretraining_arguments(["--vocab-size", "512", "--batch-size", "8", "--length", "32"])
    corpus = read_corpus(args)
    source = batches(args, corpus, "training")
    shape = {"vocab_size": corpus.tokenizer.get_vocab_size(), "max_length": 32, "dropout": 0.0, "num_heads": 2}
    shape |= {"hidden_size": 32, "num_layers": 1, "intermediate_size": 128}

    def stacked(numbers: Sequence[int]) -> Any:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(mean_weights(source.batch(n)) for n in numbers))

    params = init_params(BertConfig(**shape), mean_weights(source.batch(0)), seed=0)
    fp32 = trainer(FP32, shape)
    params, _ = fp32(params, stacked(range(PRETRAINING_STEPS)), PRETRAINING_RATE)
    data, losses = stacked([PRETRAINING_STEPS + step % PASS for step in range(steps)]), {}
    for way in (way for way in WAYS if names is None or way.name in names):
        train = fp32 if way is FP32 else trainer(way, shape)
        losses[way.name] = np.asarray(train(params, data, learning_rate)[1], np.float64)
    return losses


def learnt(losses: np.ndarray) -> float:
    """How far the loss has fallen from the first pass to the last."""
    return losses[:PASS].mean() - losses[-PASS:].mean()


def show(runs: dict[str, np.ndarray]) -> None:
    """The table: mean losses of the first and the last pass, and what was learnt beside fp32."""
    title = f"a BERT of one layer, fine-tuned for {len(runs['fp32'])} steps"
    table = Table("way", "first loss", "last loss", "learnt, to fp32", title=title)
    for name, losses in runs.items():
        part = f"{learnt(losses) / learnt(runs['fp32']):.1%}"
        table.add_row(name, f"{losses[:PASS].mean():.4f}", f"{losses[-PASS:].mean():.4f}", part)
    Console().print(table)


def draw(path: Path, runs: dict[str, np.ndarray]) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    looks = {"fp32": ("black", 3), "fp16": ("tab:blue", 1.2), "bf16": ("tab:orange", 1.2)}
    for name, losses in runs.items():
        color, width = looks[name[:4]]
        line = "--" if "without" in name else "-"
        steps = np.arange(PASS, len(losses) + 1)
        axes.plot(steps, smoothed(losses, PASS)[PASS - 1 :], line, label=name, color=color, linewidth=width)
    axes.set(xlabel="step", ylabel=f"loss, mean of {PASS} steps (nats)", title="Fine-tuning half-precision parameters")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=integer(2 * PASS), default=200)
    parser.add_argument(
        "--learning-rate", type=number(0, open_low=True), default=1e-5, help="at the end of the warm-up"
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
