"""BERT's arithmetic on a device's part of the parameters, inside `shard_map`.

The parameters are those of `bert.BertForPreTraining`. `shard_map` types its values, so JAX knows which differ along the axis
"model" and inserts the sums of the backward pass by itself; those of the forward pass are the `psum`s here.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from bert import BertConfig
from bert.layers import LayerNorm, attention_weights
from parallel.gelu import gelu
from parallel.layout import MODEL

Params = Any


def _columns(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)


def _rows(p: Params, x: jax.Array) -> jax.Array:
    return jax.lax.psum(x @ p["kernel"].astype(x.dtype), MODEL) + p["bias"].astype(x.dtype)


def _norm(p: Params, config: BertConfig, *terms: jax.Array) -> jax.Array:
    return LayerNorm(config.layer_norm_eps, config.dtype).apply({"params": p}, *terms)


def _here(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(row of this device's part of the vocabulary, whether it has it) for word ids."""
    local = ids - jax.lax.axis_index(MODEL) * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


def embed(p: Params, config: BertConfig, token_ids: jax.Array, token_types: jax.Array) -> jax.Array:
    """[..., L] to [..., L, hidden]; a device looks up the words that it has."""
    word, position, token_type = (p[name].astype(jnp.float32) for name in ("word", "position", "token_type"))
    row, have = _here(token_ids, word.shape[0])
    words = jax.lax.psum(jnp.where(have[..., None], word[row], 0), MODEL)
    return _norm(p["norm"], config, words, position[: token_ids.shape[-1]], token_type[token_types])


def encoder_layer(p: Params, config: BertConfig, x: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """One layer, [B, L, hidden]; a device has whole heads."""
    attention = p["attention"]
    width = config.hidden_size // config.num_heads
    q, k, v = (_columns(attention[name], x).reshape(*x.shape[:2], -1, width) for name in ("query", "key", "value"))
    q = q * jnp.asarray(1 / math.sqrt(width), q.dtype)
    weights = attention_weights(jnp.einsum("bqhd,bkhd->bhqk", q, k), attention_mask)
    context = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1)
    x = _norm(p["attention_norm"], config, x, _rows(attention["output"], context))
    y = _rows(p["output"], gelu(_columns(p["intermediate"], x)))
    return _norm(p["output_norm"], config, x, y)


def losses(p: Params, config: BertConfig, x: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(masked words, next sentence): weighted sums of cross entropies, of hidden states [B, L, hidden]."""
    masked = jnp.take_along_axis(x, batch["masked_positions"][:, :, None], axis=1)
    hidden = _norm(p["mlm_norm"], config, gelu(_columns(p["mlm_dense"], masked)))
    word = p["bert"]["embeddings"]["word"]
    logits = (hidden @ word.astype(hidden.dtype).T).astype(jnp.float32) + p["mlm_bias"].astype(jnp.float32)
    words = jnp.sum(_cross_entropy(logits, batch["masked_labels"]) * batch["masked_weights"])
    pooled = jnp.tanh(_columns(p["pooler"], x[:, 0]).astype(jnp.float32))
    pairs = jax.nn.log_softmax(_columns(p["next_sentence"], pooled))
    chosen = jnp.take_along_axis(pairs, batch["is_next"][:, None], axis=-1)[:, 0]
    return words, -jnp.sum(chosen * batch["pair_weights"])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of logits that are split along their last axis: three numbers for each word go over the devices."""
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(axis=-1), MODEL)
    total = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(axis=-1), MODEL)
    row, have = _here(labels, logits.shape[-1])
    own = jnp.where(have, jnp.take_along_axis(logits, row[..., None], axis=-1)[..., 0], 0)
    return jnp.log(total) + highest - jax.lax.psum(own, MODEL)
