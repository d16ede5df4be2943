"""The pieces that stay in fp32 inside a half-precision BERT, and the dense layer that doesn't.

Each fp32 piece is a `jax.checkpoint`: the backward pass keeps its half-precision input and computes it again, where it
would keep several fp32 arrays of that size otherwise. All are elementwise or reduce over one row, so that is cheap.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

weight_init = nn.initializers.truncated_normal(0.02)


def dense(features: int, dtype: Any, name: str | None = None) -> nn.Dense:
    """A dense layer with fp32 parameters that computes in `dtype`."""
    return nn.Dense(features, dtype=dtype, param_dtype=jnp.float32, kernel_init=weight_init, name=name)


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x·Φ(x), computed in fp32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def attention_weights(scores: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """Softmax in fp32 over the last axis of scores [B, heads, L, L], with no weight where the mask [B, L] is 0."""
    allowed = attention_mask[:, None, None, :] > 0
    weights = jax.nn.softmax(jnp.where(allowed, scores.astype(jnp.float32), jnp.float32(-1e30)), axis=-1)
    return weights.astype(scores.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normalize(terms: tuple[jax.Array, ...], scale: jax.Array, bias: jax.Array, eps: float, dtype: Any) -> jax.Array:
    x = sum((term.astype(jnp.float32) for term in terms[1:]), start=terms[0].astype(jnp.float32))
    x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + eps)
    wide = (1,) * (x.ndim - 1) + scale.shape
    return (x * scale.astype(jnp.float32).reshape(wide) + bias.astype(jnp.float32).reshape(wide)).astype(dtype)


class LayerNorm(nn.Module):
    """LayerNorm of the sum of its arguments, which is added up and normalised in fp32 and given back in `dtype`."""

    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, *terms: jax.Array) -> jax.Array:
        width = terms[0].shape[-1:]
        scale = self.param("scale", nn.initializers.ones, width, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, width, jnp.float32)
        return _normalize(terms, scale, bias, self.eps, self.dtype)
