"""The same batches for every layout: words of Python's reference, in sequences, each batch a function of its step."""

from typing import NamedTuple

import numpy as np

from bert import SIZES, BertConfig
from text import prose, wordpiece
from text.batches import Batch, Batches

VOCABULARY_MULTIPLE = 8  # Megatron pads the vocabulary too, so that tensor parallelism divides it


class Data(NamedTuple):
    training: Batches
    validation: Batches
    config: BertConfig


def read(*, size: str, vocabulary: int, length: int, batch_size: int, seed: int, dtype: object) -> Data:
    """The text, cut into batches, and the model that fits it; no dropout, which would differ from layout to layout."""
    texts = prose.python_reference()
    training, validation = prose.documents(texts, prose.PROSE)
    tokenizer = wordpiece.train(texts, vocabulary)
    entries = tokenizer.get_vocab_size()

    def batches(name: str, documents: list[prose.Document]) -> Batches:
        encoded = wordpiece.encode(tokenizer, documents)
        return Batches(encoded, length=length, batch_size=batch_size, vocabulary_size=entries, seed=seed, name=name)

    padded = -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    config = BertConfig(vocab_size=padded, max_length=length, dropout=0.0, dtype=dtype, **SIZES[size])
    return Data(batches("training", training), batches("validation", validation), config)


def weighted(batch: Batch) -> Batch:
    """The batch with weights that add up to 1, so that sums over any of its parts add up to its means."""
    weights = {name: batch[name] / max(1.0, batch[name].sum()) for name in ("masked_weights", "pair_weights")}
    return {**batch, **{name: value.astype(np.float32) for name, value in weights.items()}}
