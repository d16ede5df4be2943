"""The loss scales of Flax and jmp as ours, and back."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ._carry import HIGHEST, LOWEST, Knobs, carried, knobs_of, reader, state_of
from .loss_scale import DynamicLossScaleState


def from_flax(scale: Any) -> tuple[Knobs, DynamicLossScaleState]:
    """Flax's `DynamicScale` as our loss scale. Its scale grows one step after its growth_interval, so ours is one more.

    Args:
      scale: the object, or a mapping of its fields: scale, fin_steps, growth_factor, backoff_factor, growth_interval,
        minimum_scale.

    Returns, Raises: as `from_torch`.

    >>> from flax.training.dynamic_scale import DynamicScale
    >>> knobs, state = from_flax(DynamicScale(growth_interval=2000, scale=4096.0))
    >>> print(state.loss_scale, knobs["growth_interval"])
    4096.0 2001
    """
    read = reader("Flax's DynamicScale", scale)
    floor = read("minimum_scale")
    knobs = knobs_of(
        read("scale"),
        read("growth_interval") + 1,
        read("growth_factor"),
        backoff_factor=read("backoff_factor"),
        min_scale=LOWEST if floor is None else floor,
    )
    return knobs, state_of(knobs, read("fin_steps"))


def to_flax(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> Any:
    """Our loss scale as Flax's `DynamicScale`.

    Args, Raises: as `to_gluonnlp`.

    Returns:
      A `flax.training.dynamic_scale.DynamicScale`, whose growth_interval is one less than ours.

    >>> scale = to_flax({"growth_interval": 2000}, optax_fp16.dynamic_loss_scale().init(None), leave=("max_scale",))
    >>> print(scale.scale, scale.growth_interval)
    32768.0 1999
    """
    from flax.training.dynamic_scale import DynamicScale

    knobs = carried(knobs, scale_state, "Flax's DynamicScale", leave, tolerance=0.0, hysteresis=1, max_scale=HIGHEST)
    # Arrays, where its annotations say numbers: as numbers they would be traced anew at the second step.
    arrays: Any = {"fin_steps": jnp.asarray(scale_state.finite_in_a_row), "scale": jnp.asarray(scale_state.loss_scale)}
    return DynamicScale(
        growth_factor=knobs["growth_factor"],
        backoff_factor=knobs["backoff_factor"],
        growth_interval=knobs["growth_interval"] - 1,
        minimum_scale=knobs["min_scale"],
        **arrays,
    )


def from_jmp(scale: Any) -> tuple[Knobs, DynamicLossScaleState]:
    """jmp's `DynamicLossScale` as ours.

    jmp loses its min_loss_scale in any `jax.tree.map`, and has 1 from then on: set `knobs["min_scale"]` if it was another.

    Args:
      scale: the object, or a mapping of its fields: loss_scale, counter, period, factor, min_loss_scale.

    Returns, Raises: as `from_torch`.

    >>> knobs, state = from_jmp({
    ...     "loss_scale": 256.0, "counter": 3, "period": 100, "factor": 2, "min_loss_scale": 1.0})
    >>> print(state.loss_scale, state.finite_in_a_row, knobs["growth_interval"])
    256.0 3 100
    """
    read = reader("jmp's DynamicLossScale", scale)
    knobs = knobs_of(read("loss_scale"), read("period"), read("factor"), min_scale=read("min_loss_scale"))
    return knobs, state_of(knobs, read("counter"))


def to_jmp(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Our loss scale as the arguments of jmp's `DynamicLossScale`.

    Args, Raises: as `to_gluonnlp`.

    Returns:
      A dict: ``jmp.DynamicLossScale(**to_jmp(knobs, scale_state))``.

    >>> print(to_jmp({}, optax_fp16.dynamic_loss_scale().init(None), leave=("max_scale",))["period"])
    2000
    """
    knobs = carried(
        knobs,
        scale_state,
        "jmp's DynamicLossScale",
        leave,
        tolerance=0.0,
        hysteresis=1,
        max_scale=HIGHEST,
        symmetric=True,
    )
    return {
        "loss_scale": jnp.asarray(scale_state.loss_scale),
        "counter": jnp.asarray(scale_state.finite_in_a_row),
        "period": knobs["growth_interval"],
        "factor": knobs["growth_factor"],
        "min_loss_scale": jnp.float32(knobs["min_scale"]),
    }
