"""One run of a task from its arguments to its end: resume, train, save, and say how to go on."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from rich.console import Console

from training.arguments import resume_command
from training.checkpoints import Checkpoints
from training.folders import checkpoint_folder, make_writable
from training.interrupts import stop_requested
from training.loop import State, saver, train
from training.progress import Progress
from training.recorder import Recorder
from training.resume import refuse_to_overwrite, resumed
from training.step import Batch, LossOf, on_every_device, split, train_step


class Task(NamedTuple):
    """What is trained, and on what."""

    loss_of: LossOf
    batch_of: Callable[[int], Batch]  # the batch of a step, counted from 0, before `split`
    columns: Sequence[str]  # the metrics of `loss_of`; "loss" is one of them
    accuracy: str  # the column shown as the accuracy
    facts: dict[str, Any]


class Outcome(NamedTuple):
    """Where a run ended."""

    state: State
    steps_per_second: float
    interrupted: bool

    @property
    def speed(self) -> str:
        """For the table at the end: a run that had ended already has no step to time."""
        return f"{self.steps_per_second:.2f}" if self.steps_per_second else "no step timed"


def prepare(args: argparse.Namespace, folder: Path) -> Checkpoints:
    """Make the folders of the run, or say why they won't do."""
    make_writable(folder, "--run-dir")
    checkpoints = Checkpoints(checkpoint_folder(args, folder), args.keep)
    make_writable(checkpoints.folder, "--checkpoint-dir")
    if args.picture is not None:
        make_writable(args.picture.parent, "--picture")
    if args.resume is None:
        refuse_to_overwrite(checkpoints)
    return checkpoints


def run(
    task: Task,
    args: argparse.Namespace,
    argv: Sequence[str],
    *,
    params: Any,
    tx: optax.GradientTransformation,
    folder: Path,
    checkpoints: Checkpoints,
    validate: Callable[[State], None] | None = None,
    validate_every: int = 1,
) -> Outcome:
    """Train `params` on `task`, or go on with what `checkpoints` hold; `validate` sees every `validate_every` steps."""
    state = State(params, tx.init(params), 0)
    if args.resume is not None:
        state = resumed(checkpoints, args.resume, task.facts, state)
    params, opt_state = on_every_device((state.params, state.opt_state))
    state = State(params, opt_state, state.step)
    step = train_step(task.loss_of, tx, seed=args.seed, accumulate=args.accumulate)
    with Progress(args.steps, state.step, task.accuracy, Console()) as progress, stop_requested() as stop:
        recorder = Recorder(folder / "metrics.csv", task.columns, progress, state.step)
        try:
            state = train(
                step,
                state,
                lambda number: split(task.batch_of(number), args.accumulate),
                steps=args.steps,
                recorder=recorder,
                save=saver(checkpoints, task.facts),
                save_every=args.checkpoint_every,
                stop=stop,
                validate=validate,
                validate_every=validate_every,
            )
        finally:
            recorder.close()
    jax.block_until_ready(state.params)
    interrupted = state.step < args.steps
    if interrupted:
        print(
            f"stopped after step {state.step}, which is saved. To go on:\n  {resume_command(sys.argv[0], argv, folder)}"
        )
    return Outcome(state, recorder.steps_per_second, interrupted)
