"""The BERT of the examples against an independent float64 forward pass, and what stays in which precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert import SIZES, BertConfig, BertEncoder, BertForClassification, BertForPreTraining
from bert.checkpoint import config_from_hugging_face, encoder_from_hugging_face
from tests.numpy_bert import encode, pretraining_logits, random_weights

CONFIG = BertConfig(vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_length=12)


def hugging_face_weights():
    return random_weights(0, vocab=40, hidden=16, layers=2, wide=24, positions=12)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, *inputs):
    return model.apply({"params": params}, *inputs)


def some_batch():
    rng = np.random.default_rng(1)
    mask = (np.arange(9) < np.array([[9], [4], [6]])).astype(np.int32)
    ids = rng.integers(0, 40, (3, 9), dtype=np.int32)
    types = rng.integers(0, 2, (3, 9), dtype=np.int32)
    return ids, mask, types, np.array([[0, 8], [1, 3], [2, 2]], np.int32)


def pretraining_params(weights):
    def dense(name):
        return {"kernel": jnp.asarray(weights[name + ".weight"].T), "bias": jnp.asarray(weights[name + ".bias"])}

    norm = "cls.predictions.transform.LayerNorm"
    return {
        "bert": encoder_from_hugging_face(weights, CONFIG),
        "pooler": dense("pooler.dense"),
        "next_sentence": dense("cls.seq_relationship"),
        "mlm_dense": dense("cls.predictions.transform.dense"),
        "mlm_norm": {"scale": jnp.asarray(weights[norm + ".weight"]), "bias": jnp.asarray(weights[norm + ".bias"])},
        "mlm_bias": jnp.asarray(weights["cls.predictions.bias"]),
    }


def test_the_forward_pass_is_the_float64_reference():
    weights = hugging_face_weights()
    ids, mask, types, positions = some_batch()
    hidden = encode(weights, ids, mask, types, heads=2, layers=2)
    words, pairs = pretraining_logits(weights, hidden, positions)
    model = BertForPreTraining(CONFIG)
    got_words, got_pairs = apply(model, pretraining_params(weights), ids, mask, types, positions)
    np.testing.assert_allclose(got_words, words, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(got_pairs, pairs, atol=2e-5, rtol=2e-5)
    got_hidden = apply(BertEncoder(CONFIG), pretraining_params(weights)["bert"], ids, mask, types)
    np.testing.assert_allclose(got_hidden, hidden, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.float16, 0.02), (jnp.bfloat16, 0.2)])
def test_a_half_precision_pass_is_near_and_its_logits_are_fp32(dtype, error):
    weights = hugging_face_weights()
    ids, mask, types, positions = some_batch()
    words, pairs = pretraining_logits(weights, encode(weights, ids, mask, types, heads=2, layers=2), positions)
    model = BertForPreTraining(dataclasses.replace(CONFIG, dtype=dtype))
    got_words, got_pairs = apply(model, pretraining_params(weights), ids, mask, types, positions)
    assert got_words.dtype == got_pairs.dtype == jnp.float32
    assert 0 < np.abs(got_words - words).max() < error * np.abs(words).max()
    assert 0 < np.abs(got_pairs - pairs).max() < error * np.abs(pairs).max()


def test_padding_changes_nothing():
    ids, mask, types, positions = some_batch()
    model, params = BertForPreTraining(CONFIG), pretraining_params(hugging_face_weights())
    words, pairs = apply(model, params, ids, mask, types, positions)
    other_words, other_pairs = apply(model, params, np.where(mask, ids, 7), mask, types, positions)
    inside = np.take_along_axis(mask, positions, axis=1) > 0
    np.testing.assert_array_equal(np.asarray(words)[inside], np.asarray(other_words)[inside])
    np.testing.assert_array_equal(pairs, other_pairs)


def test_parameters_are_fp32_and_the_layers_are_stacked():
    model = BertForPreTraining(dataclasses.replace(CONFIG, dtype=jnp.float16))
    ids, mask, types, positions = some_batch()
    params = jax.eval_shape(model.init, jax.random.key(0), ids, mask, types, positions)["params"]
    leaves = jax.tree.leaves(params)
    assert len(leaves) == 30
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["bert"]["layers"])} == {CONFIG.num_layers}


def test_base_has_the_parameters_of_bert_base():
    model = BertEncoder(BertConfig(vocab_size=30522, **SIZES["base"]))
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 108_891_648


def loss_of(model, ids, mask, types, positions, **call):
    def loss(params):
        words, pairs = model.apply({"params": params}, ids, mask, types, positions, **call)
        return words[:, :, 3].mean() + pairs[:, 1].mean()

    return loss


@pytest.mark.slow
def test_gradients_have_the_parameters_dtype_and_reach_every_parameter():
    params = pretraining_params(hugging_face_weights())
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    model = BertForPreTraining(dataclasses.replace(CONFIG, dtype=jnp.float16))
    batch = some_batch()
    fp32 = jax.jit(jax.grad(loss_of(BertForPreTraining(CONFIG), *batch)))(params)
    fp16 = jax.jit(jax.grad(loss_of(model, *batch)))(half)
    for path, want in jax.tree.leaves_with_path(fp32):
        got = fp16
        for key in path:
            got = got[key.key]
        assert got.dtype == jnp.float16
        # A key's bias moves all scores of a query alike, so softmax gives it no gradient.
        if [key.key for key in path[-2:]] != ["key", "bias"]:
            assert np.abs(want).max() > 0, path
            assert np.abs(got.astype(jnp.float32) - want).max() < 0.05 * np.abs(want).max(), path


def test_dropout_follows_from_its_key():
    params = pretraining_params(hugging_face_weights())
    batch, model = some_batch(), BertForPreTraining(CONFIG)

    @jax.jit
    def drawn(key):
        return loss_of(model, *batch, deterministic=False, rngs={"dropout": key})(params)

    first, again, other = (drawn(jax.random.key(seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_a_classifier_sees_the_mean_over_its_tokens_only():
    model = BertForClassification(CONFIG, num_classes=3)
    ids, mask, types, _ = some_batch()
    weights = hugging_face_weights()
    kernel = np.random.default_rng(2).standard_normal((16, 3)).astype(np.float32)
    head = {"kernel": jnp.asarray(kernel), "bias": jnp.arange(3.0)}
    params = {"bert": encoder_from_hugging_face(weights, CONFIG), "classifier": head}
    hidden = encode(weights, ids, mask, types, heads=2, layers=2)
    mean = np.stack([states[: row.sum()].mean(0) for states, row in zip(hidden, mask, strict=True)])
    np.testing.assert_allclose(apply(model, params, ids, mask, types), mean @ kernel + np.arange(3), atol=1e-4)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="hidden_size=16 is not a multiple of num_heads=3"):
        dataclasses.replace(CONFIG, num_heads=3)
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        dataclasses.replace(CONFIG, dropout=1.0)
    ids = jnp.zeros((1, 13), jnp.int32)
    with pytest.raises(ValueError, match="13 tokens; this BERT has positions for 12"):
        jax.eval_shape(BertEncoder(CONFIG).init, jax.random.key(0), ids, ids, ids)


SETTINGS = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
}


def test_a_config_json_gives_the_config():
    assert config_from_hugging_face(SETTINGS) == CONFIG
    assert config_from_hugging_face({**SETTINGS, "layer_norm_eps": 1e-5}, dropout=0.0) == dataclasses.replace(
        CONFIG, layer_norm_eps=1e-5, dropout=0.0
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({**SETTINGS, "model_type": "roberta"}, "model_type='roberta'; only 'bert'"),
        ({**SETTINGS, "hidden_act": "relu"}, "hidden_act='relu'"),
        ({k: v for k, v in SETTINGS.items() if k != "hidden_size"}, "has no hidden_size"),
    ],
)
def test_another_architecture_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        config_from_hugging_face(settings)


def test_missing_and_misshapen_arrays_are_named():
    weights = hugging_face_weights()
    prefixed = {"bert." + name: array for name, array in weights.items()}
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((a == b).all()),
            encoder_from_hugging_face(prefixed, CONFIG),
            encoder_from_hugging_face(weights, CONFIG),
        )
    )
    name = "encoder.layer.1.output.dense.weight"
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.output\.dense\.weight has shape \(24, 16\)"):
        encoder_from_hugging_face({**weights, name: weights[name].T}, CONFIG)
    del weights[name]
    with pytest.raises(ValueError, match=r"no array 'encoder\.layer\.1\.output\.dense\.weight'"):
        encoder_from_hugging_face(weights, CONFIG)
