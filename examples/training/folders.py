"""The folder of a run: found, made, and known to be writable before any work is done."""

import argparse
import tempfile
from pathlib import Path

from training.errors import InputError

RUNS = Path("runs")


def run_folder(args: argparse.Namespace, task: str) -> Path:
    """`--run-dir`, or the next free `runs/TASK-N`; to resume, the newest of these."""
    if args.run_dir is not None:
        return args.run_dir
    taken = [int(number) for path in RUNS.glob(f"{task}-*") if (number := path.name.removeprefix(f"{task}-")).isdigit()]
    newest = max(taken, default=0)
    return RUNS / f"{task}-{newest if args.resume and newest else newest + 1}"


def checkpoint_folder(args: argparse.Namespace, folder: Path) -> Path:
    """Where the checkpoints of the run in `folder` are."""
    return folder / "checkpoints" if args.checkpoint_dir is None else args.checkpoint_dir


def make_writable(folder: Path, option: str) -> None:
    """Make `folder`, and refuse it if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to the folder {folder} ({error.strerror}); give {option} one that can be written to"
        ) from None
