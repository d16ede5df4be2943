"""A BERT of one layer in Hugging Face's layout, and labelled sentences of words that it knows."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from tests.numpy_bert import random_weights

SIZES = {"vocab": 40, "hidden": 16, "layers": 1, "wide": 32, "positions": 64}
GOOD, BAD, PLAIN = ("fine", "great", "lovely"), ("awful", "dull", "poor"), tuple("abcdefghijklmnopqrs")


def write_checkpoint(folder, seed=0):
    """Random weights, and a tokenizer with fixed padding and truncation switched on, as checkpoints come."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "bert",
        "vocab_size": SIZES["vocab"],
        "hidden_size": SIZES["hidden"],
        "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": 2,
        "intermediate_size": SIZES["wide"],
        "max_position_embeddings": SIZES["positions"],
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(random_weights(seed, **SIZES), folder / "model.safetensors")
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *PLAIN)
    tokenizer = Tokenizer(WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(32)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sentences(count, seed=0):
    """(label, text) pairs: one telling word among plain ones, of 1 to 12 words."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label, telling = (("good", GOOD), ("bad", BAD))[number % 2]
        words = [*rng.choice(PLAIN, rng.integers(0, 12)), rng.choice(telling)]
        rows.append((label, " ".join(rng.permutation(words))))
    return rows


def write_table(path, rows):
    path.write_text("".join(f"{label}\t{text}\n" for label, text in rows))
    return path
