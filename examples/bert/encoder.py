"""Embeddings and post-LN encoder layers: token ids to hidden states."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from .config import BertConfig
from .layers import LayerNorm, attention_weights, dense, gelu, weight_init


class Embeddings(nn.Module):
    """Word, position and segment embeddings, added up in fp32, normalised, given back in the compute dtype."""

    config: BertConfig

    def setup(self):
        c = self.config
        self.word = self.param("word", weight_init, (c.vocab_size, c.hidden_size), jnp.float32)
        self.position = self.param("position", weight_init, (c.max_length, c.hidden_size), jnp.float32)
        self.token_type = self.param("token_type", weight_init, (c.type_vocab_size, c.hidden_size), jnp.float32)
        self.norm = LayerNorm(c.layer_norm_eps, c.dtype)
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, token_ids: jax.Array, token_types: jax.Array, deterministic: bool) -> jax.Array:
        length = token_ids.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"sequences of {length} tokens; this BERT has positions for {self.config.max_length}.")
        # The tables become fp32 before the look-up, so that half-precision ones get their gradients added up in fp32.
        word, position, token_type = (t.astype(jnp.float32) for t in (self.word, self.position, self.token_type))
        x = self.norm(word[token_ids], position[None, :length], token_type[token_types])
        return self.drop(x, deterministic=deterministic)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of every word for hidden states [..., hidden]: the tied output layer. fp32."""
        return (x @ self.word.astype(x.dtype).T).astype(jnp.float32)


class SelfAttention(nn.Module):
    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, attention_mask: jax.Array) -> jax.Array:
        c = self.config
        heads = (*x.shape[:2], c.num_heads, c.hidden_size // c.num_heads)
        q, k, v = (dense(c.hidden_size, c.dtype, name)(x).reshape(heads) for name in ("query", "key", "value"))
        # q is divided before the product: the sum over a head's width is what overflows fp16.
        q = q * jnp.asarray(1 / math.sqrt(heads[-1]), q.dtype)
        weights = attention_weights(jnp.einsum("bqhd,bkhd->bhqk", q, k), attention_mask)
        weights = nn.Dropout(c.dropout)(weights, deterministic=self.deterministic)
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return dense(c.hidden_size, c.dtype, "output")(context)


class EncoderLayer(nn.Module):
    """Attention, then feed-forward; the LayerNorm comes after each residual sum, as in the BERT paper."""

    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, attention_mask: jax.Array) -> tuple[jax.Array, None]:
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=self.deterministic)
        attended = drop(SelfAttention(c, self.deterministic, name="attention")(x, attention_mask))
        x = LayerNorm(c.layer_norm_eps, c.dtype, name="attention_norm")(x, attended)
        y = gelu(dense(c.intermediate_size, c.dtype, "intermediate")(x))
        y = drop(dense(c.hidden_size, c.dtype, "output")(y))
        return LayerNorm(c.layer_norm_eps, c.dtype, name="output_norm")(x, y), None


class BertEncoder(nn.Module):
    """Token ids [B, L] to hidden states [B, L, hidden] in the compute dtype.

    The layers are one scan, so each of a layer's 16 parameters is one array with the layers along its first axis.
    """

    config: BertConfig

    def setup(self):
        self.embeddings = Embeddings(self.config)

    @nn.compact
    def __call__(self, token_ids, attention_mask, token_types, deterministic: bool = True) -> jax.Array:
        x = self.embeddings(token_ids, token_types, deterministic)
        layers = nn.scan(
            EncoderLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.num_layers,
        )
        return layers(self.config, deterministic, name="layers")(x, attention_mask)[0]
