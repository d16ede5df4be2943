"""Moving in and out: other libraries' loss scales as ours, and ours as theirs, with the same decisions from then on.

`from_x(theirs)` gives `(knobs, scale_state)`; `to_x(knobs, scale_state)` gives what X loads; `with_scale_state` puts the
state into an optimizer's. Decisions are the same step for step, and so are the scales as long as they are powers of two.
What the other rule doesn't have is refused, by name.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ._carry import HIGHEST, LOWEST, Knobs, carried, knobs_of, reader, state_of
from ._messages import integer
from ._migrate_jax import from_flax, from_jmp, to_flax, to_jmp
from ._migrate_torch import from_apex, from_deepspeed, from_torch, to_apex, to_deepspeed, to_torch
from .loss_scale import DynamicLossScaleState

__all__ = [
    "HIGHEST",
    "LOWEST",
    "from_apex",
    "from_deepspeed",
    "from_flax",
    "from_gluonnlp",
    "from_jmp",
    "from_torch",
    "to_apex",
    "to_deepspeed",
    "to_flax",
    "to_gluonnlp",
    "to_jmp",
    "to_torch",
    "with_scale_state",
]


def with_scale_state(opt_state: Any, scale_state: DynamicLossScaleState) -> Any:
    """An optimizer state with its loss scale's state replaced.

    Args:
      opt_state: any optimizer state with one `dynamic_loss_scale` in it, made with the knobs that came with `scale_state`.
      scale_state: from one of the functions here.

    Returns:
      The optimizer state, otherwise as it was; what it keeps of underflow stays.

    Raises:
      ValueError: when there is no dynamic loss scale in it, or more than one.

    >>> import jax.numpy as jnp, optax
    >>> knobs, scale_state = from_torch({
    ...     "scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7})
    >>> tx = optax_fp16.mixed_precision(optax.adamw(1e-4), loss_scale=optax_fp16.dynamic_loss_scale(**knobs))
    >>> opt_state = with_scale_state(tx.init({"w": jnp.ones(2)}), scale_state)
    >>> print(optax_fp16.loss_scale_of(opt_state))
    4096.0
    """

    def ours(node: Any) -> bool:
        return isinstance(node, DynamicLossScaleState)

    count = sum(map(ours, jax.tree.leaves(opt_state, is_leaf=ours)))
    if count != 1:
        raise ValueError(f"opt_state must have one dynamic_loss_scale in it; it has {count}.")
    return jax.tree.map(
        lambda node: scale_state._replace(underflow=node.underflow) if ours(node) else node, opt_state, is_leaf=ours
    )


def from_gluonnlp(scaler: Any) -> tuple[Knobs, DynamicLossScaleState]:
    """GluonNLP's (or fairseq's) `DynamicLossScaler` as ours.

    Args:
      scaler: the object, or a mapping of its attributes: loss_scale, scale_factor, scale_window, tolerance, _num_steps (`_iter`
        in fairseq), _last_overflow_iter, _last_rescale_iter, _overflows_since_rescale.

    Returns:
      (knobs, scale_state): for `dynamic_loss_scale(**knobs)`, and its state now (`with_scale_state` puts it in its place).

    Raises:
      ValueError, TypeError: for an attribute that is missing or out of its range.

    >>> knobs, state = from_gluonnlp({
    ...     "loss_scale": 1024.0, "scale_factor": 2.0, "scale_window": 2000, "tolerance": 0.01,
    ...     "_num_steps": 30, "_last_overflow_iter": 19, "_last_rescale_iter": 9, "_overflows_since_rescale": 1})
    >>> print(state.loss_scale, state.finite_in_a_row, state.steps_since_rescale, knobs["tolerance"])
    1024.0 10 20 0.01
    """
    read = reader("GluonNLP's DynamicLossScaler", scaler)
    steps = read("_num_steps", "_iter")
    window = integer("scale_window", read("scale_window"), low=1)
    knobs = knobs_of(read("loss_scale"), window, read("scale_factor"), tolerance=read("tolerance"))
    return knobs, state_of(
        knobs,
        (steps - 1 - read("_last_overflow_iter")) % window,
        steps_since_rescale=steps - 1 - read("_last_rescale_iter"),
        overflows_counted=read("_overflows_since_rescale"),
    )


def to_gluonnlp(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Our loss scale as the attributes of GluonNLP's `DynamicLossScaler`.

    Args:
      knobs: what `dynamic_loss_scale` was given.
      scale_state: its state.
      leave: names of knobs to leave behind, which would be refused otherwise.

    Returns:
      A dict of attributes: `vars(scaler).update(...)`.

    Raises:
      ValueError: for a knob that GluonNLP's rule doesn't have; the message names it.

    >>> knobs = {"tolerance": 0.01, "min_scale": LOWEST, "max_scale": HIGHEST}
    >>> print(to_gluonnlp(knobs, optax_fp16.dynamic_loss_scale(**knobs).init(None))["loss_scale"])
    32768.0
    """
    only: Knobs = {"hysteresis": 1, "min_scale": LOWEST, "max_scale": HIGHEST}
    knobs = carried(knobs, scale_state, "GluonNLP's DynamicLossScaler", leave, symmetric=True, **only)
    streak, since = int(scale_state.finite_in_a_row), int(scale_state.steps_since_rescale)
    steps = max(streak, since)
    return {
        "loss_scale": float(scale_state.loss_scale),
        "scale_factor": knobs["growth_factor"],
        "scale_window": knobs["growth_interval"],
        "tolerance": knobs["tolerance"],
        "_num_steps": steps,
        "_last_overflow_iter": steps - 1 - streak,
        "_last_rescale_iter": steps - 1 - since,
        "_overflows_since_rescale": int(scale_state.overflows_counted),
    }
