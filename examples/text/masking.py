"""BERT's masked words: 15% are asked for, of which 80% are hidden, 10% replaced and 10% left alone."""

from typing import NamedTuple

import numpy as np

from text.wordpiece import FIRST_WORD_ID, MASK, SPECIAL

RATE = 0.15
_HIDDEN, _REPLACED = 0.8, 0.9  # cumulative
_MASK_ID = SPECIAL.index(MASK)


class Masked(NamedTuple):
    """What the masked-LM head sees and is asked for; M = `masks_per_sequence(L)`."""

    token_ids: np.ndarray  # int32[B, L]
    positions: np.ndarray  # int32[B, M]; 0 where unused
    labels: np.ndarray  # int32[B, M]; 0 where unused
    used: np.ndarray  # float32[B, M]; 1 where a word is asked for


def masks_per_sequence(length: int) -> int:
    """How many words of a full sequence are asked for."""
    return max(1, round(RATE * length))


def mask(token_ids: np.ndarray, vocabulary_size: int, rng: np.random.Generator) -> Masked:
    """Draw the masked words of `token_ids`, int32[B, L]; special tokens and padding are never drawn."""
    batch, length = token_ids.shape
    words = token_ids >= FIRST_WORD_ID
    most = masks_per_sequence(length)
    # The words with the smallest of random numbers, specials last: a sample without replacement for all rows at once.
    order = np.argsort(np.where(words, rng.random((batch, length)), 2.0), axis=1)[:, :most]
    wanted = np.clip(np.rint(RATE * words.sum(axis=1)), 1, most)
    used = np.arange(most) < np.minimum(wanted, words.sum(axis=1))[:, None]
    positions = np.where(used, order, 0).astype(np.int32)
    rows = np.arange(batch)[:, None]
    labels = np.where(used, token_ids[rows, positions], 0).astype(np.int32)

    fate = rng.random((batch, most))
    random_words = rng.integers(FIRST_WORD_ID, vocabulary_size, size=(batch, most))
    shown = np.where(fate < _HIDDEN, _MASK_ID, np.where(fate < _REPLACED, random_words, labels))
    masked_ids = token_ids.copy()
    row, column = np.nonzero(used)
    masked_ids[row, positions[row, column]] = shown[row, column]
    return Masked(masked_ids, positions, labels, used.astype(np.float32))
