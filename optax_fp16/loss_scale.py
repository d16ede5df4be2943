"""The loss scale: the rule by which it moves, and the links that divide gradients by it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._devices import Axes
from ._messages import integer, number
from ._reduce import global_norm, is_finite
from ._scalars import read_at_once
from ._tree import map_gradients, widened
from .underflow import UnderflowState, checked_mode, fresh_underflow, watched

FP32_MAX = float(jnp.finfo(jnp.float32).max)
FP32_TINY = float(jnp.finfo(jnp.float32).tiny)


class DynamicLossScaleState(NamedTuple):
    """What the rule remembers; every field is a strongly typed scalar."""

    loss_scale: jax.Array  # f32[]: the scale of the next forward pass
    finite_in_a_row: jax.Array  # i32[]: finite steps since the last overflow or growth
    overflows_counted: jax.Array  # i32[]: overflows since the last back-off
    steps_since_rescale: jax.Array  # i32[]: steps since the last growth or back-off, or since the start
    hysteresis_left: jax.Array  # i32[]: overflows that will still be forgiven, this one included
    overflows_at_floor: jax.Array  # i32[]: overflows in a row that found the scale at min_scale already
    underflow: UnderflowState | None = None  # no leaf unless the link was made with underflow=


class StaticLossScaleState(NamedTuple):
    loss_scale: jax.Array  # f32[]: never moves
    underflow: UnderflowState | None = None  # no leaf unless the link was made with underflow=


class ScaleRule(NamedTuple):
    """The knobs of the rule, checked by `dynamic_loss_scale`."""

    growth_interval: int
    growth_factor: float
    backoff_factor: float
    tolerance: float
    hysteresis: int
    min_scale: float
    max_scale: float


def next_loss_scale(state: DynamicLossScaleState, finite: jax.Array, rule: ScaleRule) -> DynamicLossScaleState:
    """The rule, as a pure function of the state and of whether this step's gradients were finite.

    ::

        steps_since_rescale += 1
        if finite:
            finite_in_a_row += 1
            if finite_in_a_row >= growth_interval:           # a growth; > only under an interval shortened since
                scale *= growth_factor;  finite_in_a_row = steps_since_rescale = 0;  hysteresis_left = hysteresis
        else:
            finite_in_a_row = 0;  overflows_counted += 1;  hysteresis_left = max(hysteresis_left - 1, 0)
            if overflows_counted / steps_since_rescale >= tolerance and hysteresis_left == 0:   # a back-off
                scale *= backoff_factor;  overflows_counted = steps_since_rescale = 0
        scale = clip(scale, min_scale, max_scale)
    """
    zero = jnp.zeros((), jnp.int32)
    overflow = jnp.logical_not(finite)
    steps = optax.safe_increment(state.steps_since_rescale)
    in_a_row = jnp.where(finite, optax.safe_increment(state.finite_in_a_row), zero)
    overflows = jnp.where(overflow, optax.safe_increment(state.overflows_counted), state.overflows_counted)
    left = jnp.where(overflow, jnp.maximum(state.hysteresis_left - 1, 0), state.hysteresis_left)

    grow = finite & (in_a_row >= rule.growth_interval)
    # A product, since GPUs round quotients each their own way; a hair below, so that 1 in 100 is 0.01 however it rounds.
    enough = jnp.float32(rule.tolerance * (1 - 2**-21)) * jnp.asarray(steps, jnp.float32)
    back_off = overflow & (overflows.astype(jnp.float32) >= enough) & (left == 0)
    factor = jnp.where(grow, jnp.float32(rule.growth_factor), jnp.float32(1))
    factor = jnp.where(back_off, jnp.float32(rule.backoff_factor), factor)
    at_floor = overflow & (state.loss_scale <= jnp.float32(rule.min_scale))
    return DynamicLossScaleState(
        loss_scale=jnp.clip(state.loss_scale * factor, jnp.float32(rule.min_scale), jnp.float32(rule.max_scale)),
        finite_in_a_row=jnp.where(grow, zero, in_a_row),
        overflows_counted=jnp.where(back_off, zero, overflows),
        steps_since_rescale=jnp.where(grow | back_off, zero, steps),
        hysteresis_left=jnp.where(grow, jnp.int32(rule.hysteresis), left),
        overflows_at_floor=jnp.where(at_floor, optax.safe_increment(state.overflows_at_floor), zero),
        underflow=state.underflow,
    )


class LossScaleTransformation(optax.GradientTransformationExtraArgs):
    """A loss-scale link, with its rule as `adjust(state, finite) -> state` for those who know already what is finite."""

    adjust: Callable[[Any, jax.Array], Any]

    def __new__(cls, init: Callable[..., Any], update: Callable[..., Any], adjust: Callable[..., Any]):
        self = super().__new__(cls, init, update)
        self.adjust = adjust
        return self


def dynamic_loss_scale(
    init_scale: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    tolerance: float = 0.0,
    hysteresis: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    underflow: str | None = None,
    axis_name: Any = None,
    sharded: Any = False,
) -> LossScaleTransformation:
    """Divides the gradients by the loss scale into fp32, then adapts the scale to whether they were finite.

    The scale S multiplies the loss (`scale_loss`), so that gradients too small for fp16 survive the backward pass. S doubles
    after `growth_interval` finite steps in a row and halves when gradients overflow; Inf and NaN go on to the next link, which
    is where `skip_if_nonfinite` belongs::

        g = fp32(gradients) / S;    S = next(S, isfinite(||g||))

    Args:
      init_scale: S at the start, within [min_scale, max_scale]. Above 2**15 an fp16 loss can overflow whatever the data.
      growth_interval: the scale grows on exactly this many finite steps in a row; an overflow or a growth restarts the count.
      growth_factor: what a growth multiplies S by, above 1.
      backoff_factor: what a back-off multiplies S by, between 0 and 1.
      tolerance: back off only when the overflows since the last back-off are at least this share of the steps since the last
        rescale of either kind. 0: on every overflow.
      hysteresis: back off only from this many overflows on, counted since the last growth (not necessarily in a row).
      min_scale: S never falls below it; at the floor, overflowing steps are still skipped.
      max_scale: S never rises above it.
      underflow: "total" or "per_leaf" keeps what share of the gradients was zero or subnormal in fp16, for `metrics_of`.
      axis_name: the axis of `pmap` or `shard_map` (or a tuple of them) whose devices must agree.
      sharded: whether each device holds different shards of the gradients: a bool, or a tree of bools or PartitionSpecs.

    Returns:
      A link for `optax.chain`. Its updates are fp32; its state is a `DynamicLossScaleState`.

    Raises:
      ValueError, TypeError: for a knob out of its range; the message names it and says what is allowed.

    >>> import jax.numpy as jnp
    >>> tx = dynamic_loss_scale(8.0, growth_interval=2)
    >>> state = tx.init(None)
    >>> updates, state = tx.update(jnp.array([4.0], jnp.float16), state)
    >>> print(updates, state.loss_scale)
    [0.5] 8.0
    >>> updates, state = tx.update(jnp.array([jnp.inf], jnp.float16), state)
    >>> print(updates, state.loss_scale)
    [inf] 4.0

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. With `tolerance=0.01, growth_interval=2000` and the bounds out
      of the way the rule is that of GluonNLP's `DynamicLossScaler`, step for step.
    """
    rule = ScaleRule(
        growth_interval=integer("growth_interval", growth_interval, low=1),
        # In fp32 a factor nearer to 1 than these is 1, and the scale would never move.
        growth_factor=number("growth_factor", growth_factor, "above 1 and within fp32", low=1 + 2**-23, high=FP32_MAX),
        backoff_factor=number(
            "backoff_factor", backoff_factor, "between 0 and 1 in fp32", low=FP32_TINY, high=1 - 2**-24
        ),
        tolerance=number("tolerance", tolerance, "a share from 0 to 1", low=0.0, high=1.0),
        hysteresis=integer("hysteresis", hysteresis, low=1),
        min_scale=checked_scale("min_scale", min_scale),
        max_scale=checked_scale("max_scale", max_scale),
    )
    start = checked_scale("init_scale", init_scale)
    if rule.min_scale > rule.max_scale:
        raise ValueError(f"min_scale must be at most max_scale, {rule.max_scale:g}, not {rule.min_scale:g}.")
    if not rule.min_scale <= start <= rule.max_scale:
        raise ValueError(
            f"init_scale must be within [min_scale, max_scale] = [{rule.min_scale:g}, {rule.max_scale:g}], not {start:g}."
        )

    mode = checked_mode(underflow)

    def init(params: Any) -> DynamicLossScaleState:
        return DynamicLossScaleState(
            loss_scale=jnp.asarray(start, jnp.float32),
            finite_in_a_row=jnp.zeros((), jnp.int32),
            overflows_counted=jnp.zeros((), jnp.int32),
            steps_since_rescale=jnp.zeros((), jnp.int32),
            hysteresis_left=jnp.asarray(rule.hysteresis, jnp.int32),
            overflows_at_floor=jnp.zeros((), jnp.int32),
            underflow=fresh_underflow(mode, params),
        )

    return _link(init, lambda state, finite: next_loss_scale(state, finite, rule), Axes(axis_name, sharded))


def static_loss_scale(
    scale: float, *, underflow: str | None = None, axis_name: Any = None, sharded: Any = False
) -> LossScaleTransformation:
    """Divides the gradients by a loss scale that never moves, into fp32.

    ``g = fp32(gradients) / scale``. Inf and NaN go on to the next link.

    Args:
      scale: a positive number; a power of two divides without rounding.
      underflow, axis_name, sharded: as for `dynamic_loss_scale`, so that one can take the other's place.

    Returns:
      A link for `optax.chain`. Its updates are fp32; its state is a `StaticLossScaleState`.

    Raises:
      ValueError, TypeError: for a scale that isn't a positive finite number.

    >>> import jax.numpy as jnp
    >>> tx = static_loss_scale(128.0)
    >>> print(tx.update(jnp.array([64.0], jnp.float16), tx.init(None))[0])
    [0.5]

    References:
      GluonNLP's `StaticLossScaler`.
    """
    fixed = checked_scale("scale", scale)
    mode = checked_mode(underflow)

    def init(params: Any) -> StaticLossScaleState:
        return StaticLossScaleState(jnp.asarray(fixed, jnp.float32), fresh_underflow(mode, params))

    return _link(init, lambda state, finite: state, Axes(axis_name, sharded))


def checked_scale(name: str, value: Any) -> float:
    allowed = "a number from 2**-126 to 2**126, which fp32 can hold and so its inverse"
    return number(name, value, allowed, low=FP32_TINY, high=1 / FP32_TINY)


def _link(init: Callable[..., Any], adjust: Callable[..., Any], axes: Axes) -> LossScaleTransformation:
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params, extra
        state = read_at_once(state)
        unscaled = unscale(updates, state.loss_scale)
        adjusted = adjust(state, is_finite(global_norm(unscaled, axes)))
        return unscaled, watched(adjusted, updates, state.loss_scale, axes)

    return LossScaleTransformation(init, update, adjust)


def unscale(grads: Any, scale: jax.Array) -> Any:
    """The gradients in fp32, divided by the scale of their own forward pass."""

    def divided(leaf: Any) -> jax.Array:
        wide = widened(leaf)
        return jax.lax.div(wide, jax.lax.convert_element_type(scale, wide.dtype))

    return map_gradients(divided, grads)
