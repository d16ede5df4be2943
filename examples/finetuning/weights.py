"""A folder with a BERT in Hugging Face's layout: config.json, model.safetensors, tokenizer.json."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from safetensors.flax import load_file
from tokenizers import Tokenizer

from bert import BertConfig
from bert.checkpoint import config_from_hugging_face, encoder_from_hugging_face
from training.errors import InputError


class Checkpoint(NamedTuple):
    """A pre-trained encoder."""

    config: BertConfig
    params: Any  # of BertEncoder(config), fp32
    tokenizer: Tokenizer
    digest: str  # of model.safetensors


def load(folder: Path, **changes: Any) -> Checkpoint:
    """The BERT in `folder`, its config with `changes`."""
    advice = "give --weights a folder with config.json, model.safetensors and tokenizer.json of a BERT"
    files = [folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    if missing := [path.name for path in files if not path.is_file()]:
        raise InputError(f"{folder} has no {', no '.join(missing)}; {advice}")
    settings, weights, tokenizer = files
    try:
        config = config_from_hugging_face(json.loads(settings.read_text()), **changes)
        params = encoder_from_hugging_face(load_file(weights), config)
        words = Tokenizer.from_file(str(tokenizer))
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    except Exception as error:  # safetensors and tokenizers raise a class of their own or a bare Exception
        raise InputError(f"{folder} can't be used ({' '.join(str(error).split())}); {advice}") from None
    if words.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"{folder} is inconsistent: its tokenizer has {words.get_vocab_size()} words, its model {config.vocab_size}"
        )
    # Checkpoints come with fixed padding and truncation switched on.
    words.no_padding()
    words.no_truncation()
    return Checkpoint(config, params, words, digest)


def halved(params: Any, dtype: Any) -> Any:
    """The parameters in half precision, LayerNorm's excepted: those are few, and scale everything after them."""

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        module = str(path[-2].key) if len(path) > 1 else ""
        return leaf if module.endswith("norm") else jnp.asarray(leaf, dtype)

    return jax.tree.map_with_path(cast, params)
