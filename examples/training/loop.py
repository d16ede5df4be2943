"""The loop: one step after the other, with checkpoints, until the end or until someone wants it to stop."""

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import optax_fp16 as fp16
from training.checkpoints import Checkpoints
from training.recorder import Recorder


class State(NamedTuple):
    """All that a run goes on from; data, masks and dropout follow from the seed and the step."""

    params: Any
    opt_state: Any
    step: int  # steps done


def train(
    step: Callable[..., Any],
    state: State,
    batch_of: Callable[[int], Any],
    *,
    steps: int,
    recorder: Recorder,
    save: Callable[[State], None],
    save_every: int,
    stop: threading.Event,
    validate: Callable[[State], None] | None = None,
    validate_every: int = 1,
) -> State:
    """Train to `steps`, saving every `save_every` steps, at the end and when `stop` is set.

    `step(params, opt_state, batch, number)` is from `train_step`; `batch_of(number)` gives a step's batch, from 0 on.
    `validate` looks at the state every `validate_every` steps.
    """
    params, opt_state = state.params, state.opt_state
    done = state.step
    for number in range(state.step, steps):
        params, opt_state, metrics = step(params, opt_state, batch_of(number), np.int32(number))
        done = number + 1
        recorder.add(done, metrics)
        stopping = stop.is_set()
        if done % save_every == 0 or done == steps or stopping:
            recorder.flush()
            save(State(params, opt_state, done))
        if validate is not None and done % validate_every == 0:
            validate(State(params, opt_state, done))
        if stopping:
            break
    return State(params, opt_state, done)


def saver(checkpoints: Checkpoints, facts: dict[str, Any]) -> Callable[[State], None]:
    """A `save` for `train`: a checkpoint that can't be written costs a warning, not the run."""

    def save(state: State) -> None:
        problem = checkpoints.save(state.step, {"params": state.params, "opt_state": state.opt_state}, facts)
        if problem:
            last = checkpoints.steps()
            kept = f"{checkpoints.path(last[-1])} is still there" if last else "there is no earlier one"
            _warn(f"step {state.step} could not be saved ({problem}); the run goes on, {kept}")
        if dead := fp16.stuck(state.opt_state):
            _warn(dead)

    return save


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
