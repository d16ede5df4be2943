"""How small gradients are: of a BERT after some steps of pre-training, drawn against fp16's range at the loss scale.

    python examples/exponents.py
    python examples/exponents.py --steps 200 --scale 1024 --picture exponents.png

The model computes in fp32 here, so that the picture shows what fp16 would make of the gradients.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import optax

import optax_fp16 as fp16
import pretrain_bert
from bert import SIZES, BertConfig, BertForPreTraining
from optax_fp16.plot import exponent_histogram
from training.arguments import OneLineParser, integer
from training.errors import InputError, exit_status


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=integer(1), default=100, help="of training before the gradients are taken")
    parser.add_argument("--scale", type=integer(1), default=2**15, help="the loss scale to draw fp16's range at")
    parser.add_argument("--picture", type=Path, default=Path("exponents.png"), metavar="FILE")
    args = parser.parse_args(argv)
    grads = gradients_after(args.steps)
    for scale in (1, args.scale):
        lost = underflow(grads, scale)
        print(
            f"at a loss scale of {scale}: {lost['underflow_share']:.4%} zero or subnormal, {lost['underflow_zero_share']:.4%} "
            f"zero; free of it from a scale of {lost['underflow_free_scale']:.0f} on"
        )
    try:
        figure = exponent_histogram(grads, args.scale, scaled=False).figure
        figure.set_size_inches(7.5, 4.2)  # so that a phone shows letters that can be read
        figure.savefig(args.picture, dpi=150, metadata={"Software": None})
    except (ImportError, OSError) as error:
        raise InputError(f"can't draw {args.picture}: {error}; give --picture a path that can be written") from error
    print(f"picture {args.picture}")
    return 0


def gradients_after(steps: int) -> Any:
    """The true gradients in fp32 of a small BERT that has learnt for some steps."""
    args = pretrain_bert.parse(["--precision", "fp32"])
    corpus = pretrain_bert.read_corpus(args)
    data = pretrain_bert.batches(args, corpus, "training")
    shape = {"vocab_size": corpus.tokenizer.get_vocab_size(), "max_length": args.length, "dropout": 0.0}
    config = BertConfig(**shape, **SIZES[args.size])
    loss_of = pretrain_bert.pretraining_loss(BertForPreTraining(config))
    tx = fp16.mixed_precision(optax.adam(1e-3), max_norm=1.0, loss_scale=1.0)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        grads, _ = jax.grad(loss_of, has_aux=True)(params, batch, None)
        return *fp16.apply_gradients(tx, grads, opt_state, params), grads

    params = pretrain_bert.init_params(config, data.batch(0), args.seed)
    opt_state, grads = tx.init(params), None
    for number in range(steps):
        params, opt_state, grads = step(params, opt_state, pretrain_bert.mean_weights(data.batch(number)))
    return grads


def underflow(grads: Any, scale: float) -> dict[str, Any]:
    """What fp16 would have lost of these true gradients, as a loss scale that watches for it says."""
    tx = fp16.static_loss_scale(scale, underflow="total")
    scaled = jax.tree.map(lambda leaf: leaf * scale, grads)
    return fp16.metrics_of(jax.jit(tx.update)(scaled, tx.init(None))[1])


if __name__ == "__main__":
    sys.exit(exit_status(main))
