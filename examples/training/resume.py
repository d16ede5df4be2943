"""Going on with a run: only as the same run."""

import argparse
from collections.abc import Mapping
from typing import Any

import jax

import optax_fp16 as fp16
from training.arguments import LATEST
from training.checkpoints import Checkpoints
from training.errors import InputError
from training.loop import State

# Options that decide what the numbers of a run are: to go on bit for bit they have to be the same.
_DECISIVE = (
    "steps",
    "batch_size",
    "length",
    "accumulate",
    "learning_rate",
    "warmup",
    "weight_decay",
    "max_grad_norm",
    "dropout",
    "seed",
    "precision",
    "loss_scale",
    "init_scale",
    "growth_interval",
)
_CONTENT = ("text", "data")  # options that facts hold the digest of


def facts_of(args: argparse.Namespace, task: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says about its run: `task` are the task's decisive options, `model` the model's numbers."""
    options = {name: getattr(args, name) for name in _DECISIVE}
    return {"options": {**task, **options}, "model": dict(model), "devices": jax.local_device_count()}


def refuse_to_overwrite(checkpoints: Checkpoints) -> None:
    """A new run doesn't start in the folder of another."""
    steps = checkpoints.steps()
    if steps:
        raise InputError(
            f"{checkpoints.folder} holds the checkpoints of a run, up to step {steps[-1]}; "
            "add --resume to go on with it, or give another --run-dir"
        )


def resumed(checkpoints: Checkpoints, wanted: str | int, facts: Mapping[str, Any], fresh: State) -> State:
    """The state to go on from: that of step `wanted` or of the newest checkpoint; `fresh` where there is none yet."""
    checkpoints.tidy()
    step = _step(checkpoints, wanted)
    if step is None:
        print(f"nothing to resume in {checkpoints.folder} yet: starting at step 0")
        return fresh
    saved = checkpoints.facts(step)
    _check_same(saved, facts, str(checkpoints.path(step)))
    for aside in checkpoints.set_aside_after(step):
        print(f"going back to step {step}: a later checkpoint is now {aside}")
    restored = checkpoints.restore(step, {"params": fresh.params, "opt_state": fresh.opt_state})
    print(f"going on at step {step}, loss scale {float(fp16.loss_scale_of(restored['opt_state'])):g}")
    return State(restored["params"], restored["opt_state"], step)


def _step(checkpoints: Checkpoints, wanted: str | int) -> int | None:
    steps = checkpoints.steps()
    if wanted == LATEST:
        return steps[-1] if steps else None
    if wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise InputError(f"{checkpoints.folder} has no checkpoint of step {wanted}; there are: {there}")
    return int(wanted)


def _check_same(saved: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> None:
    options, given = saved["options"], facts["options"]
    for option in sorted(options.keys() | given.keys(), key=lambda option: (option != "size", option)):
        if options.get(option) != given.get(option):
            dashed = "--" + option.replace("_", "-")
            if option in _CONTENT:
                raise InputError(f"the checkpoint {name} is of a run on another {dashed}; give the same as then")
            raise InputError(
                f"the checkpoint {name} is of a run with {dashed} {options.get(option)}, not {given.get(option)}; "
                f"write {dashed} {options.get(option)}, or start anew in another --run-dir without --resume"
            )
    if saved["model"] != facts["model"]:
        raise InputError(
            f"the checkpoint {name} is of another model ({saved['model']}); start anew in another --run-dir"
        )
    if saved["devices"] != facts["devices"]:
        print(f"the run was on {saved['devices']} device(s) and goes on on {facts['devices']}: no longer bit for bit")
