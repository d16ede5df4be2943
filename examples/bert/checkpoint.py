"""A BERT checkpoint in Hugging Face's layout, as a config and as the parameters of a `BertEncoder`."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from .config import BertConfig

# Ours to theirs, inside one encoder layer.
_DENSE = {
    ("attention", "query"): "attention.self.query",
    ("attention", "key"): "attention.self.key",
    ("attention", "value"): "attention.self.value",
    ("attention", "output"): "attention.output.dense",
    ("intermediate",): "intermediate.dense",
    ("output",): "output.dense",
}
_NORM = {("attention_norm",): "attention.output.LayerNorm", ("output_norm",): "output.LayerNorm"}
_TABLES = {"word": "word_embeddings", "position": "position_embeddings", "token_type": "token_type_embeddings"}


def config_from_hugging_face(settings: Mapping, **changes) -> BertConfig:
    """The BertConfig that a config.json describes, with changes.

    Raises:
      ValueError: it describes another architecture, or a BERT of a kind that this one isn't.
    """
    kinds = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for key, supported in kinds.items():
        if (given := settings.get(key, supported)) != supported:
            raise ValueError(f"config.json has {key}={given!r}; only {supported!r} is supported")
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_length": "max_position_embeddings",
        "type_vocab_size": "type_vocab_size",
    }
    if missing := [theirs for theirs in names.values() if theirs not in settings]:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    sizes = {ours: int(settings[theirs]) for ours, theirs in names.items()}
    eps = float(settings.get("layer_norm_eps", 1e-12))
    return BertConfig(**{**sizes, "layer_norm_eps": eps, **changes})


def encoder_from_hugging_face(weights: Mapping[str, np.ndarray], config: BertConfig) -> dict:
    """The parameters of `BertEncoder(config)`, fp32, from a checkpoint's named arrays.

    Dense kernels are transposed (theirs are [out, in]) and the layers stacked. A prefix "bert." is looked through, and
    what an encoder doesn't have (pooler, heads) is left out.

    Raises:
      ValueError: an array is missing or has another shape than the config says.
    """
    weights = {name.removeprefix("bert."): array for name, array in weights.items()}

    def array(name: str, *shape: int) -> np.ndarray:
        if name not in weights:
            raise ValueError(f"the weights have no array {name!r}")
        if weights[name].shape != shape:
            raise ValueError(f"{name} has shape {weights[name].shape}; the config says {shape}")
        return np.asarray(weights[name], np.float32)

    hidden, wide = config.hidden_size, config.intermediate_size
    sizes = {("intermediate",): (wide, hidden), ("output",): (hidden, wide)}

    def layer(i: int) -> dict[tuple[str, ...], np.ndarray]:
        flat = {}
        for ours, theirs in _DENSE.items():
            out_in = sizes.get(ours, (hidden, hidden))
            flat[*ours, "kernel"] = array(f"encoder.layer.{i}.{theirs}.weight", *out_in).T
            flat[*ours, "bias"] = array(f"encoder.layer.{i}.{theirs}.bias", out_in[0])
        for ours, theirs in _NORM.items():
            flat[*ours, "scale"] = array(f"encoder.layer.{i}.{theirs}.weight", hidden)
            flat[*ours, "bias"] = array(f"encoder.layer.{i}.{theirs}.bias", hidden)
        return flat

    rows = {"word": config.vocab_size, "position": config.max_length, "token_type": config.type_vocab_size}
    tables = {ours: array(f"embeddings.{name}.weight", rows[ours], hidden) for ours, name in _TABLES.items()}
    norm = {
        "scale": array("embeddings.LayerNorm.weight", hidden),
        "bias": array("embeddings.LayerNorm.bias", hidden),
    }
    layers = [layer(i) for i in range(config.num_layers)]
    stacked: dict = {}
    for path in layers[0]:
        inner = stacked
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = jnp.asarray(np.stack([each[path] for each in layers]))
    embeddings = {**{name: jnp.asarray(table) for name, table in tables.items()}}
    embeddings["norm"] = {name: jnp.asarray(x) for name, x in norm.items()}
    return {"embeddings": embeddings, "layers": stacked}
