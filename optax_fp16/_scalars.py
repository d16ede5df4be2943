"""The small numbers of an optimizer's state, read from one place."""

from typing import Any

import jax
import jax.numpy as jnp

from ._devices import varying_axes
from ._messages import is_traced


def read_at_once(state: Any) -> Any:
    """The state with its scalars (scale, counters, step counts) as entries of one vector for each of fp32 and int32; same values.

    XLA for GPU merges kernels of the same shape that read an array in common, but not for the sake of a scalar: so the kernels
    that update the scalars become one, and those of like-shaped parameters, which all read the loss scale and the step count,
    one for every dozen. The vectors are two small kernels more.
    """
    leaves, structure = jax.tree.flatten(state)
    for dtype in (jnp.float32, jnp.int32):
        places = [place for place, leaf in enumerate(leaves) if _is_scalar(leaf, dtype)]
        if not places:
            continue
        # Behind the barrier it stays a vector: XLA would look through an entry of a concatenation at the scalar itself.
        # One of a single entry would count as a scalar.
        entries = [leaves[place] for place in places]
        vector = jax.lax.optimization_barrier(jnp.stack(entries if len(entries) > 1 else entries * 2))
        for entry, place in enumerate(places):
            leaves[place] = vector[entry]
    return jax.tree.unflatten(structure, leaves)


def _is_scalar(leaf: Any, dtype: Any) -> bool:
    """Whether a leaf is a strongly typed scalar that the program reads and every device holds alike."""
    if not is_traced(leaf) or leaf.shape or leaf.dtype != dtype:
        return False
    return not jax.typeof(leaf).weak_type and not varying_axes(leaf)
