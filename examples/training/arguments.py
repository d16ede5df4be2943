"""The command line that the example programs share."""

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from training.errors import InputError

LATEST = "latest"
DYNAMIC = "dynamic"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line."""

    def __init__(self, description: str):
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {Path(self.prog).name} --help lists what there is")


def number(low: float, *, open_low: bool = False, high: float = math.inf) -> Callable[[str], float]:
    """A type for `add_argument`: a finite number from `low` (or above it) to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
            bounds = f"{'above' if open_low else 'of at least'} {low:g}" + (
                f" and at most {high:g}" if high < math.inf else ""
            )
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return value

    return parse


def integer(low: int) -> Callable[[str], int]:
    """A type for `add_argument`: a whole number of at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return value

    return parse


def _loss_scale(text: str) -> str | float:
    return DYNAMIC if text == DYNAMIC else number(0, open_low=True)(text)


def _resume(text: str) -> str | int:
    return LATEST if text == LATEST else integer(0)(text)


def add_training_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Everything that has to do with training and nothing with the task; `defaults` by the arguments' names."""
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=integer(1), help="optimizer steps, skipped ones included")
    add("--batch-size", type=integer(1), help="sequences in a step, over all devices and micro-batches")
    add("--length", type=integer(8), help="tokens in a sequence")
    add("--accumulate", type=integer(1), default=1, help="micro-batches that a step is cut into, to save memory")
    add("--learning-rate", type=number(0, open_low=True), help="at the end of the warm-up")
    add("--warmup", type=number(0, high=1), default=0.1, help="part of the steps in which the learning rate rises")
    add("--weight-decay", type=number(0), default=0.01, help="not on biases and LayerNorm")
    add("--max-grad-norm", type=number(0), default=1.0, help="clip to this global norm; 0: never")
    add("--dropout", type=number(0, high=0.9), default=0.1, help="rate of every dropout")
    add("--seed", type=integer(0), default=0, help="of parameters, data order, masks and dropout")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp16", help="what the model computes in")
    add(
        "--loss-scale",
        type=_loss_scale,
        metavar="dynamic|FLOAT",
        help="how the loss is scaled (default: dynamic for fp16, 1 otherwise)",
    )
    add("--init-scale", type=number(0, open_low=True), default=2.0**15, help="the dynamic loss scale at the start")
    add("--growth-interval", type=integer(1), help="finite steps in a row after which the dynamic scale doubles")
    add = parser.add_argument_group("files").add_argument
    add("--run-dir", type=Path, help="folder of this run's files (default: the next free one under runs/)")
    add("--checkpoint-dir", type=Path, help="folder of the checkpoints (default: checkpoints in the run's folder)")
    add("--checkpoint-every", type=integer(1), help="steps between checkpoints")
    add("--keep", type=integer(1), default=3, help="checkpoints to keep, the newest ones")
    add("--picture", type=Path, help="where the picture of the run goes (default: run.png in the run's folder)")
    add(
        "--resume",
        nargs="?",
        type=_resume,
        const=LATEST,
        metavar="STEP",
        help="go on from the newest checkpoint of the run, or from that of STEP",
    )
    parser.set_defaults(**defaults)


def fill_in(args: argparse.Namespace) -> None:
    """Decide what follows from other arguments."""
    if args.loss_scale is None:
        args.loss_scale = DYNAMIC if args.precision == "fp16" else 1.0


def check_divisible(batch_size: int, devices: int, accumulate: int) -> None:
    """Refuse a batch that the devices and micro-batches don't divide."""
    parts = devices * accumulate
    if batch_size % parts:
        lower, upper = batch_size // parts * parts, (batch_size // parts + 1) * parts
        choice = f"--batch-size {lower} or {upper}" if lower else f"--batch-size {upper}"
        cut = f"{devices} device(s) x {accumulate} micro-batch(es)"
        raise InputError(f"a batch of {batch_size} can't be cut into {cut}; write {choice}")


def resume_command(program: str, argv: Sequence[str], run_dir: Path) -> str:
    """The command that goes on with the run that `program argv` started in `run_dir`."""
    kept: list[str] = []
    dropping = False  # the value of an option that is dropped
    for word in argv:
        dropping = dropping and not word.startswith("-")
        if word.split("=")[0] in ("--resume", "--run-dir"):
            dropping = "=" not in word
        elif dropping:
            dropping = False
        else:
            kept.append(word)
    return shlex.join(["python", program, *kept, "--run-dir", str(run_dir), "--resume"])
