"""The sizes of a BERT and the precision it computes in."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """What a BERT is made of.

    Attributes:
      vocab_size: entries of the WordPiece vocabulary.
      hidden_size: width of the residual stream, a multiple of `num_heads`.
      num_layers: encoder layers.
      num_heads: attention heads of a layer.
      intermediate_size: width of the feed-forward layer.
      max_length: the longest sequence that has position embeddings.
      type_vocab_size: segments that a sequence can be made of.
      dropout: rate of every dropout, attention weights included.
      layer_norm_eps: added to the variance in every LayerNorm.
      dtype: what the matrix products and the stored activations are in. Parameters are fp32 whatever it is, and so are
        LayerNorm, softmax, GELU and the logits.
    """

    vocab_size: int
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_length: int = 512
    type_vocab_size: int = 2
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}; "
                f"every head gets hidden_size / num_heads of the width."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1); write dropout=0.1, or 0 for none.")


# By name, everything but the vocabulary: BertConfig(vocab_size=4096, **SIZES["tiny"]).
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 512},
    "mini": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "intermediate_size": 1024},
    "base": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072},
}
