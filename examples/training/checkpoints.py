"""Checkpoints that are whole or not there: written aside by orbax, sealed, then renamed into place.

::

    checkpoints/step_00000200/state/       the arrays, by orbax
                              facts.json   what the run was given, and the step
                              seal.json    the SHA-256 of all of it
    checkpoints/writing-...                being written; whoever finds one may delete it
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from training import seals
from training.errors import InputError

_NAME = "step_{:08d}"
_WRITING, _REMOVING, _ASIDE = "writing-", "removing-", "set-aside-"


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep = folder, keep
        self._orbax = ocp.PyTreeCheckpointer()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        found = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        return sorted(int(name) for name in found if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / _NAME.format(step)

    def save(self, step: int, state: Any, facts: dict[str, Any]) -> str | None:
        """Save a pytree of arrays; None, or why it could not be saved: earlier checkpoints are untouched then."""
        writing = self.folder / f"{_WRITING}{_NAME.format(step)}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            self._orbax.save(writing.absolute() / "state", jax.device_get(state))
            (writing / "facts.json").write_text(json.dumps({**facts, "step": step}, indent=1))
            seals.seal(writing)
            replaced = self._renamed_away(step)  # there is one where a run went back and comes by again
            writing.rename(self.path(step))
            for old in (replaced, *map(self._renamed_away, self.steps()[: -self._keep])):
                shutil.rmtree(old, ignore_errors=True)
        except Exception as error:  # tensorstore reports a full disk as a ValueError, orbax in several other ways
            shutil.rmtree(writing, ignore_errors=True)
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def tidy(self) -> None:
        """Delete what a killed process left half written or half deleted."""
        for prefix in (_WRITING, _REMOVING):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, from which a run that goes back to `step` must not go on."""
        moved = []
        for later in self.steps():
            if later > step:
                aside = self.folder / f"{_ASIDE}{_NAME.format(later)}"
                shutil.rmtree(aside, ignore_errors=True)
                moved.append(self.path(later).rename(aside))
        return moved

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved besides the arrays; refuses a checkpoint with a single changed byte."""
        damage = seals.damage(self.path(step))
        if damage:
            raise InputError(f"the checkpoint {self.path(step)} is damaged: {damage}; {self._way_out(step)}")
        return json.loads((self.path(step) / "facts.json").read_text())

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of `step` in a tree with the structure, shapes and dtypes of `like`."""
        target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return self._orbax.restore(self.path(step).absolute() / "state", item=target, restore_args=restore_args)

    def _way_out(self, step: int) -> str:
        for earlier in reversed(self.steps()):
            if earlier < step and not seals.damage(self.path(earlier)):
                return f"the one before it, {self.path(earlier).name}, is whole: write --resume {earlier}"
        return "there is none before it: start again in another --run-dir without --resume"

    def _renamed_away(self, step: int) -> Path:
        """Where a checkpoint waits to be deleted: no moment shows half of one under its name."""
        removing = self.folder / f"{_REMOVING}{_NAME.format(step)}-{os.getpid()}"
        if self.path(step).exists():
            self.path(step).rename(removing)
        return removing
