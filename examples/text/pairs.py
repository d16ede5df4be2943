"""Pairs of text for next-sentence prediction: B follows A, or comes from another document."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from text.wordpiece import CLS, PAD, SEP, SPECIAL

_PAD_ID, _CLS_ID, _SEP_ID = (SPECIAL.index(token) for token in (PAD, CLS, SEP))
SPECIALS_PER_PAIR = 3  # [CLS] A [SEP] B [SEP]
_SHORTEST = 4  # tokens of a chunk that are worth a sequence


class Chunk(NamedTuple):
    """Consecutive sentences of one document, about one sequence long."""

    sentences: tuple[Sequence[int], ...]
    document: int


class Pairs(NamedTuple):
    """Fixed-shape model inputs before masking."""

    token_ids: np.ndarray  # int32[B, L]
    attention_mask: np.ndarray  # int32[B, L]
    token_types: np.ndarray  # int32[B, L]
    is_next: np.ndarray  # int32[B]; 1 where B follows A


def chunks(documents: Sequence[Sequence[Sequence[int]]], length: int) -> list[Chunk]:
    """Cut every document into runs of sentences that fill `length` tokens; a short remainder is dropped."""
    room = length - SPECIALS_PER_PAIR
    result = []
    for number, document in enumerate(documents):
        run: list[Sequence[int]] = []
        for sentence in _no_longer_than(document, room):
            if run and sum(map(len, run)) + len(sentence) > room:
                result.append(Chunk(tuple(run), number))
                run = []
            run.append(sentence)
        if sum(map(len, run)) >= _SHORTEST:
            result.append(Chunk(tuple(run), number))
    return result


def _no_longer_than(document: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    return [sentence[i : i + room] for sentence in document for i in range(0, len(sentence), room)]


def _cut(chunk: Chunk, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A and B: the chunk cut between two of its sentences, or inside its only one."""
    tokens = [token for sentence in chunk.sentences for token in sentence]
    if len(chunk.sentences) > 1:
        ends = np.cumsum([len(sentence) for sentence in chunk.sentences])
        at = int(rng.choice(ends[:-1]))
    else:
        at = int(rng.integers(1, max(2, len(tokens))))
    return tokens[:at], tokens[at:]


def _other_document(chunk: Chunk, everything: Sequence[Chunk], rng: np.random.Generator) -> Chunk:
    while True:  # at least two documents have chunks: `Batches` checks it
        other = everything[rng.integers(len(everything))]
        if other.document != chunk.document:
            return other


def draw(chosen: Sequence[Chunk], everything: Sequence[Chunk], length: int, rng: np.random.Generator) -> Pairs:
    """One pair for each chunk in `chosen`; half of them get their B from another document of `everything`."""
    ids = np.full((len(chosen), length), _PAD_ID, np.int32)
    types = np.zeros((len(chosen), length), np.int32)
    used = np.zeros((len(chosen), length), np.int32)
    is_next = (rng.random(len(chosen)) < 0.5).astype(np.int32)
    for row, chunk in enumerate(chosen):
        first, second = _cut(chunk, rng)
        if not is_next[row]:
            _, second = _cut(_other_document(chunk, everything, rng), rng)
        second = second[: length - SPECIALS_PER_PAIR - len(first)]
        pair = [_CLS_ID, *first, _SEP_ID, *second, _SEP_ID]
        ids[row, : len(pair)] = pair
        types[row, len(first) + 2 : len(pair)] = 1
        used[row, : len(pair)] = 1
    return Pairs(ids, used, types, is_next)
