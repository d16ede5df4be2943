"""The exact GELU where `shard_map` types its arrays.

`jax.lax.erf` of JAX 0.12.0 refuses arrays that differ between devices ("Primitive polynomial requires varying manual axes to
match"), so the error function is written out here, as the rational function that XLA uses for fp32: right to 2e-7.
"""

import functools
import math

import jax
import jax.numpy as jnp

_NUMERATOR = (
    0.00022905065861350646,
    0.0034082910107109506,
    0.050955695062380861,
    0.18520832239976145,
    1.128379143519084,
)
_DENOMINATOR = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)
_FLAT_FROM = 3.832506856900711  # beyond it erf is ±1 in fp32


def erf(x: jax.Array) -> jax.Array:
    """The error function of fp32 numbers."""
    x = jnp.clip(x, -_FLAT_FROM, _FLAT_FROM)
    numerator, denominator = (
        functools.reduce(lambda sum_, c: sum_ * (x * x) + c, terms) for terms in (_NUMERATOR, _DENOMINATOR)
    )
    return x * numerator / denominator


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), computed in fp32; computed again in the backward pass, which so keeps only the half-precision input."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + erf(wide / math.sqrt(2)))).astype(x.dtype)
