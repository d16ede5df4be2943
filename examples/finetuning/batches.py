"""Batches of sentences of about one length, padded to a multiple of 8; a function of the seed and the step alone."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from finetuning.labels import Labelled
from training.errors import InputError

Batch = dict[str, np.ndarray]


class Encoded(NamedTuple):
    """Token ids of sentences, with their classes."""

    ids: list[np.ndarray]
    classes: np.ndarray  # int32 [N]


def encode(tokenizer: Tokenizer, labelled: Labelled, length: int) -> Encoded:
    """The ids, [CLS] and [SEP] included, of at most `length` tokens."""
    tokenizer.enable_truncation(length)
    ids = [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(labelled.texts)]
    return Encoded(ids, labelled.classes)


def bucket(tokens: int) -> int:
    """The length that so many tokens are padded to.

    >>> [bucket(tokens) for tokens in (1, 8, 9)]
    [8, 8, 16]
    """
    return -(-tokens // 8) * 8


def merged(lengths: np.ndarray) -> np.ndarray:
    """The lengths with rare ones taken up into the next longer one: each costs a compilation.

    >>> merged(np.array([8] + [16] * 60 + [24] + [32])).tolist()[-4:]
    [16, 16, 32, 32]
    """
    lengths = lengths.copy()
    for shorter, longer in itertools.pairwise(np.unique(lengths)):
        chosen = lengths == shorter
        if chosen.sum() < len(lengths) / 32:
            lengths[chosen] = longer
    return lengths


def _padded(data: Encoded) -> np.ndarray:
    return np.array([bucket(len(ids)) for ids in data.ids])


class Batches:
    """Endless batches over encoded sentences, each epoch in another order; the last batch of one may be part padding.

    Args:
      data: the sentences.
      batch_size: sequences in a batch.
      seed: of the order.
    """

    def __init__(self, data: Encoded, batch_size: int, seed: int):
        self._data, self._batch_size, self._seed = data, batch_size, seed
        self._buckets = merged(_padded(data))
        self._epoch, self._plan = -1, []

    @property
    def classes(self) -> np.ndarray:
        """int32 [N]: every sentence's class."""
        return self._data.classes

    @property
    def commonest_length(self) -> int:
        """What most sentences are padded to."""
        lengths, counts = np.unique(_padded(self._data), return_counts=True)
        return int(lengths[counts.argmax()])

    def of_length(self, length: int, seed: int) -> "Batches":
        """Batches of only the sentences that are padded to `length`, in another order."""
        rows = np.flatnonzero(_padded(self._data) == length)
        if not len(rows):
            raise InputError(f"no text has {length - 7} to {length} tokens")
        return Batches(Encoded([self._data.ids[row] for row in rows], self.classes[rows]), self._batch_size, seed)

    @property
    def per_epoch(self) -> int:
        return -(-len(self._data.ids) // self._batch_size)

    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0, with weights that add up to 1."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._planned(np.random.default_rng([self._seed, epoch]))
        return self._build(self._plan[index])

    def once(self) -> Iterator[tuple[np.ndarray, Batch]]:
        """Every sentence once, by length: (their numbers, the batch); rows after those are padding."""
        order = np.argsort(self._buckets, kind="stable")
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            yield rows, self._build(rows)

    def _planned(self, rng: np.random.Generator) -> list[np.ndarray]:
        """An epoch's batches: shuffled within each bucket, what is left over going up into the next longer one."""
        plan, rest = [], np.array([], np.int64)
        for length in np.unique(self._buckets):
            rows = np.concatenate([rest, rng.permutation(np.flatnonzero(self._buckets == length))])
            whole = len(rows) // self._batch_size * self._batch_size
            plan += list(rows[:whole].reshape(-1, self._batch_size))
            rest = rows[whole:]
        if len(rest):
            plan.append(rest)
        return [plan[i] for i in rng.permutation(len(plan))]

    def _build(self, rows: np.ndarray) -> Batch:
        length = self._buckets[rows].max()
        token_ids = np.zeros((self._batch_size, length), np.int32)
        attention_mask = np.zeros((self._batch_size, length), np.int32)
        for row, number in enumerate(rows):
            ids = self._data.ids[number]
            token_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        classes, weights = np.zeros(self._batch_size, np.int32), np.zeros(self._batch_size, np.float32)
        classes[: len(rows)] = self._data.classes[rows]
        weights[: len(rows)] = 1 / len(rows)
        return {"token_ids": token_ids, "attention_mask": attention_mask, "classes": classes, "weights": weights}
