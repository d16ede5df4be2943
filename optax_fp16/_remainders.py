"""A fp32 master as a bf16 parameter and the 16 bits that it lacks."""

from typing import Any

import jax
import jax.numpy as jnp

from ._messages import shown


def is_remainder(kept: Any) -> bool:
    """Whether what the state keeps for a parameter is a remainder, and not a whole master."""
    return getattr(kept, "dtype", None) == jnp.int16


def remainder_zeros(param: Any) -> Any:
    if isinstance(param, jax.ShapeDtypeStruct):
        return param.update(dtype=jnp.dtype(jnp.int16), weak_type=False)
    return jnp.zeros_like(param, jnp.int16)


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(bf16, int16): the nearest bf16 number, ties away from zero, and the master's bits minus that number's bits.

    ::

        upper = (bits + 0x8000) >> 16;   lower = bits - (upper << 16)       in [-0x8000, 0x7fff]

    All in integers, so that subnormals survive a processor that flushes them. A NaN becomes the plain one.
    """
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    upper = ((bits + jnp.uint32(0x8000)) >> jnp.uint32(16)).astype(jnp.uint16)
    lower = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)
    # Adding to the bits of a NaN could carry into the sign: 0x7fffffff would become -0.
    nan = jnp.isnan(master)
    upper = jnp.where(nan, jnp.uint16(0x7FC0), upper)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16), jnp.where(nan, jnp.int16(0), lower)


def joined(param: jax.Array, lower: jax.Array) -> jax.Array:
    """f32: the master that `split` took apart."""
    if jnp.result_type(param) != jnp.bfloat16:
        raise TypeError(
            "params: a bf16 parameter with a remainder in the state of master_weights(..., remainder=True) came back as "
            f"{shown(jnp.result_type(param))}. It is the upper half of its master: hand the parameters over as init saw them."
        )
    upper = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return jax.lax.bitcast_convert_type(upper + lower.astype(jnp.int32).astype(jnp.uint32), jnp.float32)
