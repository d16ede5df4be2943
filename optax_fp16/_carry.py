"""What of a loss-scale rule can be carried over to another library's rule, and what has to be refused."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ._messages import integer, number, shown
from .loss_scale import DynamicLossScaleState, dynamic_loss_scale

Knobs = dict[str, Any]

# Bounds out of the way: rules without a floor or a ceiling have the widest that `dynamic_loss_scale` takes.
LOWEST, HIGHEST = 2.0**-126, 2.0**126

_REQUIRED = object()


def reader(what: str, source: Any) -> Callable[..., Any]:
    """A function that reads a field of a mapping or an object, under the first of its names that is there."""

    def read(*names: str, default: Any = _REQUIRED) -> Any:
        for name in names:
            if isinstance(source, Mapping) and name in source:
                return source[name]
            if not isinstance(source, Mapping) and hasattr(source, name):
                return getattr(source, name)
        if default is _REQUIRED:
            raise ValueError(f"{names[0]} is missing: this should be {what}, not {shown(source)}.")
        return default

    return read


def knobs_of(scale: Any, interval: Any, growth: Any, **others: Any) -> Knobs:
    """Knobs for `dynamic_loss_scale`, checked by it; a back-off divides by what a growth multiplies by, if none is given."""
    growth = number("growth_factor", growth, "above 1", low=1.0)  # so that it has an inverse; the rule checks the rest
    knobs: Knobs = {
        "init_scale": scale,
        "growth_interval": interval,
        "growth_factor": growth,
        "backoff_factor": 1 / growth,
        "min_scale": LOWEST,
        "max_scale": HIGHEST,
    }
    knobs |= others
    dynamic_loss_scale(**knobs)
    return {name: value if isinstance(value, int) else float(value) for name, value in knobs.items()}


def state_of(knobs: Knobs, streak: Any, **fields: Any) -> DynamicLossScaleState:
    """The state of `dynamic_loss_scale(**knobs)` after `streak` finite steps in a row."""
    streak = integer("finite steps in a row", streak, low=0, high=knobs["growth_interval"] - 1)
    fields = {"finite_in_a_row": streak, "steps_since_rescale": streak} | fields
    counts = {name: jnp.asarray(integer(name, value, low=0), jnp.int32) for name, value in fields.items()}
    fresh: Any = dynamic_loss_scale(**knobs).init(())
    return fresh._replace(**counts)


def carried(
    knobs: Knobs, scale_state: Any, what: str, leave: Sequence[str], *, symmetric: bool = False, **only: Any
) -> Knobs:
    """All knobs, defaults included, after making sure that the other rule has them.

    Args:
      knobs: what `dynamic_loss_scale` was given.
      scale_state: its state.
      what: the other rule.
      leave: the knobs to leave behind.
      symmetric: whether the other's back-off undoes a growth.
      only: knobs for which the other rule has one value and no other.
    """
    if not isinstance(scale_state, DynamicLossScaleState):
        raise TypeError(f"scale_state must be the state of a dynamic_loss_scale, not {shown(scale_state)}.")
    if not isinstance(knobs, Mapping):
        raise TypeError(f"knobs must be a dict of arguments of dynamic_loss_scale, not {shown(knobs)}.")
    if not isinstance(leave, (tuple, list)) or not all(isinstance(name, str) for name in leave):
        raise TypeError(f"leave must be a tuple of names, such as ('min_scale',), not {shown(leave)}.")
    tx = inspect.signature(dynamic_loss_scale).parameters
    unknown = [name for name in (*knobs, *leave) if name not in tx]
    if unknown:
        raise ValueError(f"{unknown[0]} is no argument of dynamic_loss_scale.")
    dynamic_loss_scale(**knobs)
    full = {name: parameter.default for name, parameter in tx.items()} | knobs
    if symmetric:
        only["backoff_factor"] = 1 / full["growth_factor"]
    for name, value in only.items():
        if name not in leave and not _same(name, full[name], value):
            none = "none" if value in (LOWEST, HIGHEST) else f"{value} only"
            raise ValueError(
                f"{name}={full[name]} can't be carried over: {what} has {none}. To go on without it, say leave=({name!r},)."
            )
    return full


def _same(name: str, ours: Any, theirs: Any) -> bool:
    """Equal, or as good as no bound: a scale that far out is dead anyway."""
    if theirs in (LOWEST, HIGHEST):
        return ours <= 2.0**-100 if name == "min_scale" else ours >= 2.0**100
    return float(ours) == float(theirs)
