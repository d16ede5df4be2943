"""A mean over devices whose terms travel in half precision and can't overflow on the way."""

from typing import Any

import jax
import jax.numpy as jnp

from ._tree import widened


def to_travel(leaf: Any, count: int, dtype: Any) -> jax.Array:
    """This device's term of the sum that is half the mean over `count` devices; in `dtype`, or in fp32 for None.

    The division comes first, and by twice the count: rounded terms of the largest halves would add up to more than the largest.
    Complex numbers travel as they are.
    """
    wide = widened(leaf)
    term = wide / (2 * count)
    return term if dtype is None or jnp.iscomplexobj(term) else term.astype(dtype)


def arrived(total: jax.Array) -> jax.Array:
    """The mean, in fp32, from the sum of what travelled."""
    return 2 * widened(total)


def rounded_to(mean: jax.Array, dtype: Any) -> jax.Array:
    """A mean in the dtype of what it is the mean of: never beyond its largest number, unless it isn't finite itself."""
    if jnp.iscomplexobj(mean) or mean.dtype == dtype:
        return mean
    largest = jnp.asarray(jnp.finfo(dtype).max, mean.dtype)
    return jnp.where(jnp.isfinite(mean), jnp.clip(mean, -largest, largest), mean).astype(dtype)
