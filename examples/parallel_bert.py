"""Pre-train a BERT under data, tensor and pipeline parallelism, with and without the distributed optimizer (ZeRO).

    python examples/parallel_bert.py --devices 4 --dp 2 --tp 2 --pp 1 --zero
    python examples/parallel_bert.py --devices 4 --table
    python examples/parallel_bert.py --dp 4 --zero --processes 2

On a CPU the devices are simulated. With --processes the program starts that many of itself on this machine; under a launcher
of your own, give each process --processes N --coordinator HOST:PORT --process-id I.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training.arguments import OneLineParser, integer, number
from training.errors import InputError, exit_status

_SIMULATED = "--xla_force_host_platform_device_count"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__.splitlines()[0])
    add = parser.add_argument_group("layout").add_argument
    add("--devices", type=integer(1), help="devices in all (default: dp x tp x pp; 4 for the table)")
    add("--dp", type=integer(1), default=1, help="data parallelism: parts of the batch")
    add("--tp", type=integer(1), default=1, help="tensor parallelism: parts of every layer")
    add("--pp", type=integer(1), default=1, help="pipeline parallelism: stages of layers")
    add(
        "--micro-batches",
        type=integer(1),
        default=4,
        help="parts of a device's batch that follow each other in the pipeline",
    )
    add("--zero", action="store_true", help="spread the optimizer over the data-parallel devices")
    add("--table", action="store_true", help="run every layout of the table, and write it to the run's folder")
    add = parser.add_argument_group("processes").add_argument
    add("--processes", type=integer(1), default=1, help="processes that the devices are divided between")
    add("--coordinator", metavar="HOST:PORT", help="where the first process listens, under a launcher of your own")
    add("--process-id", type=integer(0), help="which of the processes this is, from 0, under a launcher of your own")
    add = parser.add_argument_group("training").add_argument
    add("--size", choices=["tiny", "mini", "base"], default="tiny", help="of the model")
    add("--vocab-size", type=integer(300), default=1024, help="WordPiece entries at most")
    add("--length", type=integer(8), default=32, help="tokens in a sequence")
    add("--batch-size", type=integer(1), default=16, help="sequences in a step, over all devices")
    add("--steps", type=integer(1), default=20, help="optimizer steps")
    add("--learning-rate", type=number(0, open_low=True), default=1e-3, help="constant")
    add(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        default="fp16",
        help="what is computed in, and parameters are kept in",
    )
    add("--seed", type=integer(0), default=0, help="of parameters, data order and masks")
    add("--poison", type=integer(1), metavar="STEP", help="give the last data-parallel device an Inf in this step")
    add("--run-dir", type=Path, default=Path("runs/parallel"), help="folder of the table and the checkpoints")
    add("--checkpoint-every", type=integer(1), default=10, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, whatever the layout that wrote it")
    args = parser.parse_args(argv)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    """Decide how many devices there are, and refuse what doesn't fit together."""
    needed = 4 if args.table else args.dp * args.tp * args.pp
    args.devices = needed if args.devices is None else args.devices
    if args.devices < needed:
        raise InputError(f"this needs {needed} devices; write --devices {needed}, or smaller --dp, --tp and --pp")
    if (args.coordinator is None) != (args.process_id is None):
        raise InputError("--coordinator and --process-id go together: give each process both, or neither")
    if args.table and args.processes > 1:
        raise InputError("--table runs in one process; leave --processes out")
    if args.process_id is not None and args.process_id >= args.processes:
        raise InputError(
            f"--process-id counts from 0 to {args.processes - 1} where there are --processes {args.processes}"
        )
    if needed % args.processes or args.devices % args.processes:
        raise InputError(
            f"{args.processes} processes don't divide {needed} devices; write --processes {needed}, or fewer"
        )
    if args.processes > 1 and args.devices > needed:
        raise InputError(f"several processes must use all their devices; write --devices {needed}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.processes > 1 and args.process_id is None:
        from parallel.processes import launch

        return launch(__file__, argv, args.processes)
    # JAX reads these when it starts, so nothing that imports it may be imported before.
    flags = os.environ.get("XLA_FLAGS", "")
    if _SIMULATED not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_SIMULATED}={args.devices // args.processes}".strip()
    from parallel.program import main as run

    return run(args)


if __name__ == "__main__":
    sys.exit(exit_status(main))
