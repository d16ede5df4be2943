"""The loss scales of PyTorch, apex and DeepSpeed as ours, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from ._carry import HIGHEST, LOWEST, Knobs, carried, knobs_of, reader, state_of
from ._messages import integer
from .loss_scale import DynamicLossScaleState


def from_torch(state_dict: Mapping[str, Any]) -> tuple[Knobs, DynamicLossScaleState]:
    """The `state_dict()` of PyTorch's `GradScaler` as our loss scale.

    Args:
      state_dict: with scale, growth_factor, backoff_factor, growth_interval and _growth_tracker.

    Returns:
      (knobs, scale_state), as from `from_gluonnlp`.

    Raises:
      ValueError, TypeError: for an entry that is missing (a disabled scaler's are) or out of its range.

    >>> knobs, state = from_torch({
    ...     "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7})
    >>> print(state.loss_scale, state.finite_in_a_row)
    65536.0 7
    """
    read = reader("the state_dict() of an enabled torch GradScaler", state_dict)
    knobs = knobs_of(
        read("scale"), read("growth_interval"), read("growth_factor"), backoff_factor=read("backoff_factor")
    )
    return knobs, state_of(knobs, read("_growth_tracker"))


def to_torch(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Our loss scale as what PyTorch's `GradScaler.load_state_dict` takes.

    Args, Raises: as `to_gluonnlp`.

    Returns:
      A dict with scale, growth_factor, backoff_factor, growth_interval and _growth_tracker.

    >>> state = optax_fp16.dynamic_loss_scale().init(None)
    >>> print(to_torch({}, state, leave=("min_scale", "max_scale"))["scale"])
    32768.0
    >>> to_torch({}, state, leave=("max_scale",))
    Traceback (most recent call last):
        ...
    ValueError: min_scale=1.0 can't be carried over: torch's GradScaler has none. To go on without it, say leave=('min_scale',).
    """
    knobs = carried(
        knobs,
        scale_state,
        "torch's GradScaler",
        leave,
        tolerance=0.0,
        hysteresis=1,
        min_scale=LOWEST,
        max_scale=HIGHEST,
    )
    return {
        "scale": float(scale_state.loss_scale),
        "growth_factor": knobs["growth_factor"],
        "backoff_factor": knobs["backoff_factor"],
        "growth_interval": knobs["growth_interval"],
        "_growth_tracker": int(scale_state.finite_in_a_row),
    }


def from_apex(
    state_dict: Mapping[str, Any],
    *,
    loss_id: int = 0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> tuple[Knobs, DynamicLossScaleState]:
    """apex's `amp.state_dict()` as our loss scale. (For its `FP16_Optimizer`: `from_deepspeed`.)

    Args:
      state_dict: the whole of it, or the part of one loss: loss_scale and unskipped.
      loss_id: which loss, if it is the whole.
      scale_window, min_loss_scale, max_loss_scale: as apex was given them; its state doesn't hold them.

    Returns, Raises: as `from_torch`.

    >>> knobs, state = from_apex({"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 12}})
    >>> print(state.loss_scale, state.finite_in_a_row, knobs["max_scale"])
    4096.0 12 16777216.0
    """
    what = "apex's amp.state_dict()"
    if not (isinstance(state_dict, Mapping) and "loss_scale" in state_dict):
        state_dict = reader(what, state_dict)(f"loss_scaler{integer('loss_id', loss_id, low=0)}")
    read = reader(what, state_dict)
    bounds = {"min_scale": LOWEST if min_loss_scale is None else min_loss_scale, "max_scale": max_loss_scale}
    knobs = knobs_of(read("loss_scale"), scale_window, 2.0, **bounds)
    return knobs, state_of(knobs, read("unskipped"))


def to_apex(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Our loss scale as one loss's part of what apex's `amp.load_state_dict` takes.

    Args, Raises: as `to_gluonnlp`. Give `amp.initialize` the bounds, and a scaler the scale_window: apex saves neither.

    Returns:
      ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}}``

    >>> print(to_apex({}, optax_fp16.dynamic_loss_scale().init(None)))
    {'loss_scaler0': {'loss_scale': 32768.0, 'unskipped': 0}}
    """
    carried(knobs, scale_state, "apex's amp", leave, tolerance=0.0, hysteresis=1, growth_factor=2.0, backoff_factor=0.5)
    state = {"loss_scale": float(scale_state.loss_scale), "unskipped": int(scale_state.finite_in_a_row)}
    return {"loss_scaler0": state}


def from_deepspeed(scaler: Any) -> tuple[Knobs, DynamicLossScaleState]:
    """DeepSpeed's (or Megatron's, or apex's `FP16_Optimizer`'s) `DynamicLossScaler` as ours.

    DeepSpeed raises an error for an overflow at min_scale, unless told otherwise; we go on skipping, and `stuck` says so.

    Args:
      scaler: the object, or a mapping of its attributes: cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window,
        and where they are there min_scale, delayed_shift, cur_hysteresis, consecutive_hysteresis.

    Returns, Raises: as `from_torch`; ValueError for consecutive hysteresis, which ours isn't.

    >>> knobs, state = from_deepspeed({
    ...     "cur_scale": 512.0, "cur_iter": 10, "last_overflow_iter": 5, "scale_factor": 2.0, "scale_window": 1000,
    ...     "delayed_shift": 2, "cur_hysteresis": 1})
    >>> print(state.loss_scale, state.finite_in_a_row, state.hysteresis_left, knobs["hysteresis"])
    512.0 4 1 2
    """
    read = reader("DeepSpeed's DynamicLossScaler", scaler)
    window, shift = integer("scale_window", read("scale_window"), low=1), read("delayed_shift", default=1)
    if read("consecutive_hysteresis", default=False) and shift > 1:
        raise ValueError(
            "consecutive_hysteresis=True can't be carried over: our hysteresis counts the overflows since the last growth, in a "
            "row or not. Set it to False, or delayed_shift to 1."
        )
    bounds = {"min_scale": read("min_scale", default=1.0), "hysteresis": shift}
    knobs = knobs_of(read("cur_scale"), window, read("scale_factor"), **bounds)
    streak = (read("cur_iter") - 1 - read("last_overflow_iter")) % window
    return knobs, state_of(knobs, streak, hysteresis_left=read("cur_hysteresis", default=shift))


def to_deepspeed(knobs: Knobs, scale_state: DynamicLossScaleState, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Our loss scale as the attributes of DeepSpeed's `DynamicLossScaler`.

    Args, Raises: as `to_gluonnlp`.

    Returns:
      A dict of attributes: `vars(scaler).update(...)`.

    >>> state = optax_fp16.dynamic_loss_scale(hysteresis=2).init(None)
    >>> print(to_deepspeed({"hysteresis": 2}, state, leave=("max_scale",))["cur_hysteresis"])
    2
    """
    knobs = carried(
        knobs, scale_state, "DeepSpeed's DynamicLossScaler", leave, tolerance=0.0, max_scale=HIGHEST, symmetric=True
    )
    return {
        "cur_scale": float(scale_state.loss_scale),
        "cur_iter": int(scale_state.finite_in_a_row),
        "last_overflow_iter": -1,
        "scale_factor": knobs["growth_factor"],
        "scale_window": knobs["growth_interval"],
        "min_scale": knobs["min_scale"],
        "delayed_shift": knobs["hysteresis"],
        # Theirs stays at 1 where ours is used up: both back off on every overflow then.
        "cur_hysteresis": max(int(scale_state.hysteresis_left), 1),
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
    }
