"""The mean of gradients over devices, which cannot overflow."""

from typing import Any

import jax
import jax.numpy as jnp

from ._devices import Axes, device_count
from ._messages import floating_dtype
from ._transport import arrived, rounded_to, to_travel
from ._tree import map_gradients


def pmean_gradients(grads: Any, axis_name: Any, dtype: Any = None) -> Any:
    """The cross-device mean of gradients, in fp32, or transported in a half dtype without overflow.

    ::

        dtype=None:    2 · Σ fp32(g) / 2N
        dtype=fp16:    2 · Σ fp16(fp32(g) / 2N)     divided before it travels, so that the sum stays below 65504

    Args:
      grads: this device's own gradients, any tree; leaves that are no gradients come back as they are.
      axis_name: the axis of `pmap` or `shard_map`, or a tuple of them.
      dtype: what travels between the devices: None for fp32, or `jnp.float16` or `jnp.bfloat16` for half the traffic.

    Returns:
      The mean, each leaf in its own dtype, the same on every device.

    Raises:
      TypeError, ValueError: for a dtype that isn't a floating one, or an axis name that isn't one or isn't bound here.

    >>> import jax, jax.numpy as jnp
    >>> mean = jax.vmap(lambda g: pmean_gradients(g, "batch"), axis_name="batch")
    >>> print(int(mean(jnp.full((4, 1), 20000, jnp.float16))[0, 0]))
    20000

    References:
      The fp16 all-reduce of GluonNLP's and NeMo's trainers, which divided after it had summed.
    """
    axes = Axes(axis_name)
    if not axes.names:
        raise ValueError("axis_name must name the axis to average over, such as 'batch'; it is empty.")
    travelling = None if dtype is None else floating_dtype("dtype", dtype)
    axes.check_bound()
    count = device_count(frozenset(axes.names))

    def mean(leaf: Any) -> jax.Array:
        total = jax.lax.psum(to_travel(leaf, count, travelling), axes.names)
        return rounded_to(arrived(total), jnp.result_type(leaf))

    return map_gradients(mean, grads)
