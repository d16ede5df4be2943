"""BERT's forward pass in numpy float64, over arrays named as in Hugging Face's: a reference for examples/bert."""

from math import erf

import numpy as np


def random_weights(seed, *, vocab, hidden, layers, wide, positions, types=2):
    """Arrays with a BERT's names and shapes, pre-training heads included, big enough that every one matters."""
    rng = np.random.default_rng(seed)
    weights = {}

    def add(name, *shape, centre=0.0, spread=0.3):
        weights[name] = (centre + spread * rng.standard_normal(shape)).astype(np.float32)

    def dense(name, fan_out, fan_in):
        add(name + ".weight", fan_out, fan_in)
        add(name + ".bias", fan_out)

    def norm(name):
        add(name + ".weight", hidden, centre=1.0)
        add(name + ".bias", hidden)

    for name, rows in (("word", vocab), ("position", positions), ("token_type", types)):
        add(f"embeddings.{name}_embeddings.weight", rows, hidden)
    norm("embeddings.LayerNorm")
    for i in range(layers):
        p = f"encoder.layer.{i}."
        for name in ("query", "key", "value"):
            dense(p + "attention.self." + name, hidden, hidden)
        dense(p + "attention.output.dense", hidden, hidden)
        norm(p + "attention.output.LayerNorm")
        dense(p + "intermediate.dense", wide, hidden)
        dense(p + "output.dense", hidden, wide)
        norm(p + "output.LayerNorm")
    dense("pooler.dense", hidden, hidden)
    dense("cls.predictions.transform.dense", hidden, hidden)
    norm("cls.predictions.transform.LayerNorm")
    add("cls.predictions.bias", vocab)
    dense("cls.seq_relationship", 2, hidden)
    return weights


def gelu(x):
    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def _dense(weights, name, x):
    return x @ weights[name + ".weight"].T.astype(np.float64) + weights[name + ".bias"]


def _norm(weights, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * weights[name + ".weight"] + weights[name + ".bias"]


def encode(weights, ids, mask, types, *, heads, layers):
    """Hidden states [B, L, hidden], float64, of ids [B, L] with mask 1 for a token and 0 for padding."""
    batch, length = ids.shape
    e = "embeddings."
    x = weights[e + "word_embeddings.weight"].astype(np.float64)[ids]
    x = x + weights[e + "position_embeddings.weight"][:length] + weights[e + "token_type_embeddings.weight"][types]
    x = _norm(weights, e + "LayerNorm", x)
    for i in range(layers):
        p = f"encoder.layer.{i}."
        q, k, v = (
            _dense(weights, p + "attention.self." + name, x).reshape(batch, length, heads, -1).swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        scores = np.where(mask[:, None, None, :] > 0, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        context = (scores / scores.sum(-1, keepdims=True)) @ v
        context = context.swapaxes(1, 2).reshape(batch, length, -1)
        attended = _dense(weights, p + "attention.output.dense", context)
        x = _norm(weights, p + "attention.output.LayerNorm", x + attended)
        y = _dense(weights, p + "output.dense", gelu(_dense(weights, p + "intermediate.dense", x)))
        x = _norm(weights, p + "output.LayerNorm", x + y)
    return x


def pretraining_logits(weights, hidden, positions):
    """(masked-word logits [B, M, vocab], next-sentence logits [B, 2]) of hidden states and masked positions [B, M]."""
    masked = np.stack([states[at] for states, at in zip(hidden, positions, strict=True)])
    p = "cls.predictions."
    y = _norm(weights, p + "transform.LayerNorm", gelu(_dense(weights, p + "transform.dense", masked)))
    words = y @ weights["embeddings.word_embeddings.weight"].T.astype(np.float64) + weights[p + "bias"]
    return words, _dense(weights, "cls.seq_relationship", np.tanh(_dense(weights, "pooler.dense", hidden[:, 0])))
