"""BERT with its two pre-training heads, and with a classifier."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from .config import BertConfig
from .encoder import BertEncoder
from .layers import LayerNorm, dense, gelu


class BertForPreTraining(nn.Module):
    """Masked-word and next-sentence logits, both fp32.

    Args of the call:
      token_ids: int32 [B, L].
      attention_mask: [B, L], 1 for a token and 0 for padding.
      token_types: int32 [B, L], the segment of each token.
      masked_positions: int32 [B, M], where in each sequence a word is to be guessed.
      deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
    Returns:
      (mlm_logits fp32 [B, M, vocab], nsp_logits fp32 [B, 2]).
    """

    config: BertConfig

    def setup(self):
        c = self.config
        self.bert = BertEncoder(c)
        self.pooler = dense(c.hidden_size, c.dtype)
        self.next_sentence = dense(2, jnp.float32)
        self.mlm_dense = dense(c.hidden_size, c.dtype)
        self.mlm_norm = LayerNorm(c.layer_norm_eps, c.dtype)
        self.mlm_bias = self.param("mlm_bias", nn.initializers.zeros, (c.vocab_size,), jnp.float32)

    def __call__(self, token_ids, attention_mask, token_types, masked_positions, deterministic: bool = True):
        x = self.bert(token_ids, attention_mask, token_types, deterministic)
        masked = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        logits = self.bert.embeddings.logits(self.mlm_norm(gelu(self.mlm_dense(masked))))
        pooled = jnp.tanh(self.pooler(x[:, 0]).astype(jnp.float32))
        return logits + self.mlm_bias.astype(jnp.float32)[None, None, :], self.next_sentence(pooled)


class BertForClassification(nn.Module):
    """Class logits fp32 [B, num_classes] from the mean of a sequence's hidden states.

    The mean, not the first token: it is what sentence encoders are trained with, and any other BERT can learn from it.
    """

    config: BertConfig
    num_classes: int

    def setup(self):
        self.bert = BertEncoder(self.config)
        self.drop = nn.Dropout(self.config.dropout)
        self.classifier = dense(self.num_classes, jnp.float32)

    def __call__(self, token_ids, attention_mask, token_types, deterministic: bool = True) -> jax.Array:
        x = self.bert(token_ids, attention_mask, token_types, deterministic).astype(jnp.float32)
        weights = attention_mask.astype(jnp.float32)[:, :, None]
        mean = (x * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1)
        return self.classifier(self.drop(mean, deterministic=deterministic))
