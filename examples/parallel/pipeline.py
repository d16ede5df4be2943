"""GPipe: each stage has some of the layers, and the micro-batches go through the stages one behind the other.

::

    tick        0    1    2    3    4
    stage 0     m0   m1   m2   m3   .
    stage 1     .    m0   m1   m2   m3

The stages before the first and after the last micro-batch compute on zeros (the bubble): every device runs the same program.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from parallel.layout import PIPE


def through_the_stages(
    stage: Callable[[jax.Array, jax.Array], jax.Array], inputs: jax.Array, masks: jax.Array
) -> jax.Array:
    """What comes out of the last stage, on every stage.

    Args:
      stage: this device's layers, of hidden states [B, L, hidden] and an attention mask [B, L].
      inputs: hidden states [M, B, L, hidden] of M micro-batches.
      masks: their attention masks, [M, B, L].
    """
    stages, me = jax.lax.axis_size(PIPE), jax.lax.axis_index(PIPE)
    count = inputs.shape[0]

    def tick(arriving: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(me == 0, inputs[jnp.minimum(time, count - 1)], arriving)
        y = stage(x, masks[jnp.clip(time - me, 0, count - 1)])
        return jax.lax.ppermute(y, PIPE, [(each, each + 1) for each in range(stages - 1)]), y

    nothing = jnp.where(me == 0, inputs[0], 0) * 0  # of the type that a tick gives: it differs between the stages
    _, outputs = jax.lax.scan(tick, nothing, jnp.arange(count + stages - 1))
    return jax.lax.psum(jnp.where(me == stages - 1, outputs[stages - 1 :], 0), PIPE)
