"""Reading the package's fields out of any optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp

from ._messages import integer, is_traced
from ._tree import is_gradient, path_words
from .clipping import ClipByGlobalNormState
from .loss_scale import DynamicLossScaleState, StaticLossScaleState
from .skipping import SkipIfNonfiniteState
from .underflow import UnderflowState

_SCALES = (DynamicLossScaleState, StaticLossScaleState)


def _found(opt_state: Any, kinds: tuple[type, ...]) -> list[tuple[str, Any]]:
    """(path, state) of every state of these kinds, however deep, the outermost first."""

    def wanted(node: Any) -> bool:
        return isinstance(node, kinds)

    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=wanted)
    return [(jax.tree_util.keystr(path) or "the state itself", leaf) for path, leaf in leaves if wanted(leaf)]


def _value(field: Any) -> jax.Array:
    """A field's array: Flax NNX wraps each leaf of an optimizer state in a variable, which is a tree of one leaf."""
    return jnp.asarray(jax.tree.leaves(field)[0])


def _one(found: list[tuple[str, Any]], field: str) -> jax.Array:
    """The field of the first state found, after making sure that the others don't say otherwise."""
    (first_path, first), *others = found
    value = _value(getattr(first, field))
    for path, other in others:
        another = _value(getattr(other, field))
        if another is value:
            continue
        unknown = is_traced(value) or is_traced(another)
        if unknown or value.shape != another.shape or not bool(jnp.all(value == another)):
            what = "that may differ" if unknown else f"that differ ({value} and {another})"
            raise ValueError(
                f"the state holds two loss scales {what}: at {first_path} and at {path}. One loss has one scale: put "
                "dynamic_loss_scale outermost in the chain, outside of optax.partition and optax.masked, once."
            )
    return value


def loss_scale_of(opt_state: Any) -> jax.Array:
    """The loss scale in any optimizer state: what the next loss has to be multiplied by.

    Args:
      opt_state: the state of `dynamic_loss_scale`, `static_loss_scale` or `mixed_precision`, bare or anywhere inside
        `optax.chain`, `MultiSteps`, `inject_hyperparams`, `masked`, `partition`, a Flax TrainState or an `nnx.Optimizer`.

    Returns:
      f32[], on the device. In a state stacked by `pmap`, with its leading axis.

    Raises:
      ValueError: when there is no loss scale, or there are two that differ; the message names both places.

    >>> import optax
    >>> tx = optax.chain(optax_fp16.dynamic_loss_scale(1024.0), optax.sgd(0.1))
    >>> print(loss_scale_of(tx.init({"w": 1.0})))
    1024.0
    """
    found = _found(opt_state, _SCALES)
    if not found:
        raise ValueError(
            "there is no loss scale in this optimizer state. Put optax_fp16.dynamic_loss_scale() first in the optax.chain, or "
            "make the optimizer with optax_fp16.mixed_precision(...)."
        )
    return _one(found, "loss_scale")


def metrics_of(opt_state: Any) -> dict[str, jax.Array]:
    """What the last step did, out of any optimizer state, as scalars that stay on the device.

    Args:
      opt_state: any optimizer state with one of the package's transformations in it, wherever.

    Returns:
      A dict with those of these keys that the state can answer:

      - `loss_scale`: f32[], the scale of the next forward pass.
      - `steps_since_rescale`: i32[], steps since the scale last grew or backed off.
      - `overflows_at_floor`: i32[], overflows in a row with the scale at min_scale already.
      - `grad_norm`: f32[], the norm of the last gradients, unscaled and before clipping; Inf when it wasn't finite.
      - `clip_ratio`: f32[], what clipping divided them by, 1 or more; Inf when the norm wasn't finite.
      - `grads_finite`: bool[], whether the last step was applied.
      - `applied_total`, `skipped_total`, `skipped_in_a_row`: i32[], steps counted.
      - `underflow_share`: f32[], with `underflow=` only: what share of the last gradients was zero or subnormal in fp16.
      - `underflow_zero_share`: f32[], likewise: those of them that were zero, or would be in fp16.
      - `underflow_free_scale`: f32[], likewise: the scale at which none but the zeros would be either; 0 if all are zero.

    Raises:
      ValueError: when nothing of ours is in the state, or two loss scales that differ.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax_fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0)
    >>> params = jnp.ones(2)
    >>> params, state = optax_fp16.apply_gradients(tx, jnp.array([3.0, 4.0]) * 2**15, tx.init(params), params)
    >>> metrics = metrics_of(state)
    >>> print(metrics["grad_norm"], metrics["clip_ratio"], metrics["applied_total"])
    5.0 5.0 1
    """
    metrics: dict[str, jax.Array] = {}
    scales = _found(opt_state, _SCALES)
    if scales:
        metrics["loss_scale"] = _one(scales, "loss_scale")
    dynamic = [state for _, state in scales if isinstance(state, DynamicLossScaleState)]
    for field in ("steps_since_rescale", "overflows_at_floor") if dynamic else ():
        metrics[field] = _value(getattr(dynamic[0], field))
    for field in UnderflowState._fields[:3] if scales and scales[0][1].underflow is not None else ():
        metrics[field] = _value(getattr(scales[0][1].underflow, field))
    # The search doesn't look inside what it finds: a clip in the list is one outside of every guard.
    outermost = [state for _, state in _found(opt_state, (SkipIfNonfiniteState, ClipByGlobalNormState))]
    guards = [state for state in outermost if isinstance(state, SkipIfNonfiniteState)]
    clips = [state for state in outermost if isinstance(state, ClipByGlobalNormState)]
    if guards:
        metrics |= _guard_metrics(guards[0])
    if clips:
        metrics |= _clip_metrics(clips[0])
    elif guards and (inside := _found(guards[0].inner_state, (ClipByGlobalNormState,))):
        # A clip behind the guard doesn't see a skipped step: the guard's norm is the newer.
        ratio = _value(inside[0][1].clip_ratio)
        metrics["clip_ratio"] = jnp.where(metrics["grads_finite"], ratio, metrics["grad_norm"])
    if not metrics:
        raise ValueError(
            "there is nothing of optax_fp16 in this optimizer state: no loss scale, no skip_if_nonfinite, no "
            "clip_by_global_norm_fp32."
        )
    return metrics


def _guard_metrics(guard: SkipIfNonfiniteState) -> dict[str, jax.Array]:
    fields = ("grad_norm", "grads_finite", "applied_total", "skipped_total", "skipped_in_a_row")
    return {field: _value(getattr(guard, field)) for field in fields}


def _clip_metrics(clip: ClipByGlobalNormState) -> dict[str, jax.Array]:
    return {"grad_norm": _value(clip.norm_before_clip), "clip_ratio": _value(clip.clip_ratio)}


def underflow_by_leaf(opt_state: Any, params: Any) -> dict[str, dict[str, float]]:
    """Which parameters' gradients are too small for fp16: of a loss scale made with `underflow="per_leaf"`.

    ``share = #(|g·S| < 2^-14) / entries``, ``free_scale = S · 2^ceil(log2(2^-14 / min |g·S| > 0))`` in the last step. It waits
    for the device: call it when you log, not at every step.

    Args:
      opt_state: any optimizer state with such a loss scale in it.
      params: the parameters, for the names of the leaves.

    Returns:
      For each leaf, by path: `share`, of its entries that were zero or subnormal in fp16; and `free_scale`, the scale at which
      none but the zeros would be, 0 for a leaf of zeros.

    Raises:
      ValueError: when the state keeps nothing by leaf, or has other leaves than the parameters.

    >>> import jax.numpy as jnp
    >>> tx = optax_fp16.dynamic_loss_scale(8.0, underflow="per_leaf")
    >>> params = {"bias": jnp.zeros(2), "kernel": jnp.zeros(2)}
    >>> scaled_grads = {"bias": jnp.array([2.0**-15, 1.0]), "kernel": jnp.ones(2)}
    >>> updates, state = tx.update(scaled_grads, tx.init(params))
    >>> print(underflow_by_leaf(state, params)["bias"])
    {'share': 0.5, 'free_scale': 16.0}

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    kept = [state.underflow for _, state in _found(opt_state, _SCALES) if state.underflow is not None]
    if not kept or kept[0].underflow_by_leaf is None:
        raise ValueError(
            "the state keeps no underflow by leaf: make the loss scale with "
            'optax_fp16.dynamic_loss_scale(underflow="per_leaf").'
        )
    rows = jax.device_get(_value(kept[0].underflow_by_leaf))
    rows = rows[0] if rows.ndim == 3 else rows  # stacked by pmap: every device has the same
    paths = [path_words(path) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_gradient(leaf)]
    if len(paths) != len(rows):
        raise ValueError(f"params has {len(paths)} leaves with gradients, and the state was made for {len(rows)}.")
    return {
        path: {"share": float(share), "free_scale": float(free)}
        for path, (share, free) in zip(paths, rows, strict=True)
    }


def stuck(opt_state: Any, patience: int = 50) -> str | None:
    """Words about a run that is dead, or None: every one of the last `patience` steps was skipped.

    It looks at the values, so it waits for the device: call it when you log, not at every step.

    Args:
      opt_state: any optimizer state with `skip_if_nonfinite`, `mixed_precision` or `dynamic_loss_scale` in it.
      patience: how many steps skipped in a row are too many.

    Returns:
      None, or a message that says what happened and what the likely causes are.

    Raises:
      ValueError, TypeError: for a patience below 1, or a state with nothing of ours.

    >>> import optax
    >>> print(stuck(optax_fp16.mixed_precision(optax.sgd(0.1)).init({"w": 1.0})))
    None
    """
    patience = integer("patience", patience, low=1)
    metrics = {name: jnp.max(value) for name, value in metrics_of(opt_state).items()}
    in_a_row = int(metrics.get("skipped_in_a_row", metrics.get("overflows_at_floor", 0)))
    at_floor = int(metrics.get("overflows_at_floor", 0))
    if max(in_a_row, at_floor) < patience:
        return None
    if at_floor >= patience:
        return (
            f"The last {max(in_a_row, at_floor)} steps were all skipped, {at_floor} of them with the loss scale already at its "
            f"floor of {float(metrics['loss_scale']):g}: a smaller scale won't help. Likely causes: Inf or NaN in the parameters "
            "or the data, a learning rate too high, or an operation (softmax, LayerNorm, division, log) that has to be in fp32. "
            "nonfinite_report(grads) names the parameters in which it starts."
        )
    scale = f" (loss scale {float(metrics['loss_scale']):g})" if "loss_scale" in metrics else ""
    return (
        f"The last {in_a_row} steps were all skipped{scale}. If the scale is still falling, wait; if it isn't, look for Inf or "
        "NaN in the parameters or the data: nonfinite_report(grads) names the parameters in which it starts."
    )
