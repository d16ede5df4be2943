"""Batches for pre-training; each is a function of the seed and the step alone, so a resumed run sees the same ones."""

from collections.abc import Iterator, Sequence

import numpy as np

from text.masking import mask
from text.pairs import Chunk, chunks, draw
from training.errors import InputError

Batch = dict[str, np.ndarray]
_ORDER, _CONTENT, _VALIDATION = range(3)  # what a random stream is for, next to the seed


class Batches:
    """An endless run over encoded documents: shuffled every epoch, with new cuts, pairs and masks every time.

    Args:
        documents: token ids of the sentences of every document.
        length: tokens in a sequence.
        batch_size: sequences in a batch.
        vocabulary_size: entries of the vocabulary, from which random words are drawn.
        seed: of the order, the pairs and the masks.
        name: what the text is for, used in the error when it is too small.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[Sequence[int]]],
        *,
        length: int,
        batch_size: int,
        vocabulary_size: int,
        seed: int,
        name: str,
    ):
        self._chunks = chunks(documents, length)
        if len({chunk.document for chunk in self._chunks}) < 2:
            raise InputError(f"the {name} text is too small for next-sentence pairs; add text with --text FILE FILE...")
        self._length, self._batch_size = length, batch_size
        self._vocabulary_size, self._seed = vocabulary_size, seed

    @property
    def sequences(self) -> int:
        """Sequences in an epoch."""
        return len(self._chunks)

    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0; a remainder smaller than a batch is left out of its epoch."""
        per_epoch = self.sequences // self._batch_size
        if per_epoch == 0:
            raise InputError(
                f"the text is too small: {self.sequences} sequences of {self._length} tokens don't fill one batch of "
                f"{self._batch_size}; give a smaller --batch-size or more text with --text FILE FILE..."
            )
        epoch, index = divmod(step, per_epoch)
        order = np.random.default_rng([self._seed, _ORDER, epoch]).permutation(self.sequences)
        rows = order[index * self._batch_size : (index + 1) * self._batch_size]
        chosen = [self._chunks[row] for row in rows]
        return self._build(chosen, np.random.default_rng([self._seed, _CONTENT, step]))

    def once(self) -> Iterator[Batch]:
        """Every sequence once, the same in every run whatever its seed; the last batch is padded with weight 0."""
        rng = np.random.default_rng([_VALIDATION])
        for start in range(0, self.sequences, self._batch_size):
            yield self._build(self._chunks[start : start + self._batch_size], rng)

    def _build(self, chosen: Sequence[Chunk], rng: np.random.Generator) -> Batch:
        pairs = draw(chosen, self._chunks, self._length, rng)
        masked = mask(pairs.token_ids, self._vocabulary_size, rng)
        batch = {
            "token_ids": masked.token_ids,
            "attention_mask": pairs.attention_mask,
            "token_types": pairs.token_types,
            "masked_positions": masked.positions,
            "masked_labels": masked.labels,
            "masked_weights": masked.used,
            "is_next": pairs.is_next,
            "pair_weights": np.ones(len(chosen), np.float32),
        }
        missing = self._batch_size - len(chosen)
        if missing:
            batch = {name: np.pad(value, [(0, missing)] + [(0, 0)] * (value.ndim - 1)) for name, value in batch.items()}
        return batch
