"""Flax's TrainState with the guarded step."""

from typing import Any

import jax

try:
    from flax.training import train_state
except ImportError as error:
    raise ImportError("optax_fp16.flax needs Flax: pip install 'optax_fp16[flax]', or flax.") from error

from .reading import loss_scale_of, metrics_of
from .scaling import scale_loss
from .skipping import apply_gradients


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, whose `apply_gradients` skips bad steps whole, in one guarded step with the update.

    ``params, opt_state = apply_gradients(tx, grads, opt_state, params);  step += 1``. `step` counts the calls, as in Flax;
    `metrics["applied_total"]` counts the steps that were applied, and schedules inside `tx` move with those.

    Args:
      apply_fn, params, tx: as for Flax's own `TrainState.create`; make `tx` with `mixed_precision` or with the links.

    Raises:
      ValueError: from the properties, when the optimizer state holds nothing of ours.

    >>> import jax.numpy as jnp, optax
    >>> state = TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax_fp16.mixed_precision(optax.sgd(0.1), loss_scale=8.0))
    >>> print(state.loss_scale, state.scale_loss(jnp.float16(2.0)))
    8.0 16.0
    >>> state = state.apply_gradients(grads={"w": jnp.array([8.0, jnp.inf])})
    >>> print(state.params["w"], state.metrics["skipped_total"])
    [1. 1.] 1
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """The state after one guarded step; keyword arguments replace further fields, as in Flax."""
        params, opt_state = apply_gradients(self.tx, grads, self.opt_state, self.params)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @property
    def loss_scale(self) -> jax.Array:
        """f32[]: what the next loss has to be multiplied by."""
        return loss_scale_of(self.opt_state)

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """What the last step did, as `metrics_of` says it."""
        return metrics_of(self.opt_state)

    def scale_loss(self, loss: jax.Array | float) -> jax.Array:
        """The loss times the loss scale, in fp32: what to differentiate."""
        return scale_loss(loss, self.opt_state)
