"""Pre-train a BERT in half precision on the prose that comes with Python, or on any text.

    python examples/pretrain_bert.py
    python examples/pretrain_bert.py --precision bf16 --steps 200
    python examples/pretrain_bert.py --text book.txt --size mini --batch-size 64 --length 128

Everything that has to do with half precision is in `training/optimizer.py` and `training/step.py`.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import optax_fp16 as fp16
from bert import SIZES, BertConfig, BertForPreTraining
from text import prose, wordpiece
from text.batches import Batches
from training import plot
from training.arguments import OneLineParser, add_training_arguments, check_divisible, fill_in, integer
from training.errors import exit_status
from training.folders import run_folder
from training.metrics import read
from training.optimizer import optimizer
from training.progress import scale_words
from training.resume import facts_of
from training.session import Outcome, Task, prepare, run
from training.step import AXIS, Batch, LossOf, sums_of

COLUMNS = ("loss", "masked_accuracy", "next_sentence_loss", "next_sentence_accuracy")
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


class Corpus(NamedTuple):
    """A text, encoded and split."""

    tokenizer: Tokenizer
    training: list[list[list[int]]]
    validation: list[list[list[int]]]
    digest: str


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 prose (default: Python's language reference)")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model")
    parser.add_argument("--vocab-size", type=integer(300), default=4096, help="WordPiece entries at most")
    add_training_arguments(
        parser, steps=1000, batch_size=16, length=64, learning_rate=1e-3, growth_interval=50, checkpoint_every=200
    )
    args = parser.parse_args(argv)
    fill_in(args)
    check_divisible(args.batch_size, jax.local_device_count(), args.accumulate)
    return args


def read_corpus(args: argparse.Namespace) -> Corpus:
    texts = prose.read_files(args.text) if args.text else prose.python_reference()
    training, validation = prose.documents(texts, 0.0 if args.text else prose.PROSE)
    tokenizer = wordpiece.train(texts, args.vocab_size)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    encoded = (wordpiece.encode(tokenizer, documents) for documents in (training, validation))
    return Corpus(tokenizer, *encoded, digest)


def batches(args: argparse.Namespace, corpus: Corpus, name: str) -> Batches:
    return Batches(
        getattr(corpus, name),
        length=args.length,
        batch_size=args.batch_size,
        vocabulary_size=corpus.tokenizer.get_vocab_size(),
        seed=args.seed,
        name=name,
    )


def mean_weights(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with weights that add up to 1, so that weighted sums over any of its parts add up to its means."""
    weights = {name: batch[name] / max(1.0, batch[name].sum()) for name in ("masked_weights", "pair_weights")}
    return {**batch, **{name: value.astype(np.float32) for name, value in weights.items()}}


def pretraining_loss(model: BertForPreTraining) -> LossOf:
    """Masked words and next sentence: the cross entropies, in fp32, summed with the weights of the batch."""

    def loss_of(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        inputs = (batch[name] for name in ("token_ids", "attention_mask", "token_types", "masked_positions"))
        rngs = None if key is None else {"dropout": key}
        words, pairs = model.apply({"params": params}, *inputs, deterministic=key is None, rngs=rngs)
        word_loss, word_accuracy = _weighted(words, batch["masked_labels"], batch["masked_weights"])
        pair_loss, pair_accuracy = _weighted(pairs, batch["is_next"], batch["pair_weights"])
        return word_loss + pair_loss, dict(
            zip(COLUMNS, (word_loss, word_accuracy, pair_loss, pair_accuracy), strict=True)
        )

    return loss_of


def _weighted(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of the cross entropy and of the right answers."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return -jnp.sum(chosen * weights), jnp.sum(right * weights)


def validate(loss_of: LossOf, params: Any, data: Batches) -> dict[str, float]:
    """The means of the metrics over the validation text."""
    sums = sums_of(loss_of)
    totals = dict.fromkeys(COLUMNS, 0.0)
    words = pairs = 0.0
    for batch in data.once():
        words, pairs = words + batch["masked_weights"].sum(), pairs + batch["pair_weights"].sum()
        totals = {name: totals[name] + value for name, value in sums(params, batch).items()}
    return {name: total / (pairs if name.startswith("next") else words) for name, total in totals.items()}


def report(
    args: argparse.Namespace, folder: Path, outcome: Outcome, validation: dict[str, float], entropy: float
) -> None:
    """The table at the end, and the picture."""
    metrics = read(folder / "metrics.csv")
    last = metrics["loss"][-100:]
    skipped = plot.skipped_steps(metrics)
    change = np.diff(np.log2(metrics["loss_scale"]))
    table = Table("what", "value", title=f"BERT-{args.size}, {args.precision}, {args.steps} steps")
    table.add_row(f"training loss, mean of the last {len(last)} steps", f"{plot.smoothed(last, len(last))[-1]:.3f}")
    table.add_row("validation loss", f"{validation['loss']:.3f}")
    table.add_row("unigram entropy of the text", f"{entropy:.3f}")
    table.add_row("validation: masked words guessed", f"{validation['masked_accuracy']:.1%}")
    table.add_row("validation: next sentences guessed", f"{validation['next_sentence_accuracy']:.1%}")
    table.add_row("steps per second", outcome.speed)
    table.add_row("steps skipped", f"{len(skipped)}")
    table.add_row("loss scale at the end", scale_words(float(fp16.loss_scale_of(outcome.state.opt_state))))
    table.add_row("loss scale grew / backed off", f"{np.sum(change > 0)} / {np.sum(change < 0)} times")
    Console().print(table)
    path = args.picture or folder / "run.png"
    plot.draw(
        path,
        metrics,
        title=f"Pre-training BERT-{args.size} in {args.precision}",
        lines={"unigram entropy": entropy},
        validation=validation["loss"],
    )
    print(f"picture {path}, metrics {folder / 'metrics.csv'}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    corpus = read_corpus(args)
    training, held_out = batches(args, corpus, "training"), batches(args, corpus, "validation")
    training.batch(0)  # refuses a text that doesn't fill a batch
    folder = run_folder(args, "pretrain")
    checkpoints = prepare(args, folder)
    corpus.tokenizer.save(str(folder / "tokenizer.json"))

    vocabulary = corpus.tokenizer.get_vocab_size()
    shape = {"vocab_size": vocabulary, "max_length": args.length, "dropout": args.dropout, **SIZES[args.size]}
    config = BertConfig(dtype=DTYPES[args.precision], **shape)
    loss_of = pretraining_loss(BertForPreTraining(config))
    facts = facts_of(args, {"size": args.size, "vocab_size": args.vocab_size, "text": corpus.digest}, shape)
    task = Task(loss_of, lambda step: mean_weights(training.batch(step)), COLUMNS, "masked_accuracy", facts)
    params = init_params(config, training.batch(0), args.seed)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"BERT-{args.size}: {parameters:,} parameters, {args.precision}, {jax.local_device_count()} device(s); "
        f"{training.sequences} sequences, {vocabulary} WordPieces; files in {folder}"
    )
    tx = optimizer(args, AXIS)
    outcome = run(task, args, argv, params=params, tx=tx, folder=folder, checkpoints=checkpoints)
    if outcome.interrupted:
        return 130
    entropy = wordpiece.unigram_entropy(corpus.training)
    report(args, folder, outcome, validate(loss_of, outcome.state.params, held_out), entropy)
    return 0


def init_params(config: BertConfig, batch: Batch, seed: int) -> Any:
    """fp32 parameters, whatever the model computes in."""
    model = BertForPreTraining(config)
    inputs = [batch[name][:1] for name in ("token_ids", "attention_mask", "token_types", "masked_positions")]
    return jax.jit(model.init)(jax.random.key(seed, impl="rbg"), *inputs)["params"]


if __name__ == "__main__":
    sys.exit(exit_status(main))
