"""The example's text: paragraphs, vocabulary, pairs, masks and batches."""

from collections import Counter

import numpy as np
import pytest

from text import prose, wordpiece
from text.batches import Batches
from text.masking import mask, masks_per_sequence
from text.pairs import chunks, draw
from training.errors import InputError

CLS, SEP, MASK = (wordpiece.SPECIAL.index(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
VOCABULARY = 4096


@pytest.fixture(scope="module")
def split():
    return prose.documents(prose.python_reference(), prose.PROSE)


@pytest.fixture(scope="module")
def tokenizer():
    return wordpiece.train(prose.python_reference(), VOCABULARY)


@pytest.fixture(scope="module")
def encoded(tokenizer, split):
    return tuple(wordpiece.encode(tokenizer, documents) for documents in split)


def batches_of(encoded, **changes):
    options = {"length": 64, "batch_size": 16, "vocabulary_size": VOCABULARY, "seed": 0, "name": "training"}
    return Batches(encoded, **(options | changes))


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


# Paragraphs and sentences


def test_a_paragraph_that_repeats_itself_is_kept_once_whatever_its_case_and_spacing():
    assert prose.paragraphs(["One  two.\n\nThree.", "ONE\ntwo.\n\nThree.\n\nFour."]) == ["One two.", "Three.", "Four."]


def test_a_text_without_blank_lines_has_a_paragraph_on_every_line():
    assert prose.paragraphs(["One.\nTwo.\nThree."]) == ["One.", "Two.", "Three."]


def test_underlines_of_headings_are_not_words():
    assert prose.paragraphs(["A heading\n*********\n\nText."]) == ["A heading", "Text."]


def test_a_grammar_is_left_out_of_prose_and_kept_otherwise():
    text = 'with_stmt ::= "with" ("(" a_b ")" | c) ":"\n\nThis is a sentence.'
    assert prose.paragraphs([text], prose.PROSE) == ["This is a sentence."]
    assert len(prose.paragraphs([text])) == 2


def test_sentences_end_before_a_capital_only():
    assert prose.sentences("See e.g. this. Is it so? 3 times.") == ["See e.g. this.", "Is it so?", "3 times."]


def test_no_validation_paragraph_is_also_in_the_training_text(split):
    training, validation = ({" ".join(document) for document in documents} for documents in split)
    assert len(validation) == pytest.approx(len(training) / 9, rel=0.1)
    whole = " ".join(training).lower()
    for document in prose.documents(prose.python_reference(), prose.PROSE)[1]:
        assert " ".join(document).lower() not in whole


def test_a_text_of_few_paragraphs_is_refused_with_the_number_it_needs():
    with pytest.raises(InputError, match=r"too small: 3 different paragraphs.*needs 80.*--text"):
        prose.documents(["One.\n\nTwo.\n\nThree."])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"", "is empty"), (b" \n\n ", "is empty"), (b"\xff\xfe\x00", "not UTF-8")],
    ids=["missing", "empty", "blank", "binary"],
)
def test_a_text_file_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "prose.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        prose.read_files([str(path)])
    assert str(path) in str(error.value)


def test_a_folder_in_place_of_a_text_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        prose.read_files([str(tmp_path)])


# Vocabulary


def test_the_vocabulary_is_the_same_in_every_run(tokenizer):
    again = wordpiece.train(prose.python_reference(), VOCABULARY)
    assert tokenizer.get_vocab() == again.get_vocab()
    assert tokenizer.to_str() == again.to_str()


def test_the_default_text_fills_the_vocabulary_and_the_special_tokens_come_first(tokenizer):
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(wordpiece.SPECIAL)


def test_a_vocabulary_without_room_for_the_characters_is_refused_with_the_least_it_needs():
    assert wordpiece.train(["ab cd"], 12).get_vocab_size() <= 12
    with pytest.raises(InputError, match=r"--vocab-size 10 has no room .* at least 11"):
        wordpiece.train(["ab cd"], 10)


def test_words_are_cut_into_the_longest_known_pieces(tokenizer):
    pieces = tokenizer.encode("contextmanagers", add_special_tokens=False).tokens
    assert "".join(piece.removeprefix("##") for piece in pieces) == "contextmanagers"
    assert len(pieces) < 6


def test_the_unigram_entropy_is_that_of_the_counts():
    assert wordpiece.unigram_entropy([[[5, 6], [7, 8]]]) == pytest.approx(np.log(4))
    assert wordpiece.unigram_entropy([[[5, 5, 5, 6]]]) == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))


# Pairs


def test_a_chunk_never_exceeds_its_room_and_a_long_sentence_is_cut():
    made = chunks([[[10] * 5, [11] * 40, [12] * 4], [[13] * 20]], length=23)
    assert all(sum(map(len, chunk.sentences)) <= 20 for chunk in made)
    assert Counter(t for chunk in made for s in chunk.sentences for t in s) == {10: 5, 11: 40, 12: 4, 13: 20}


def documents_of(tokens):
    return {int(token) // 10 for token in tokens if token >= 10}


def test_a_true_pair_is_the_chunk_and_a_false_one_ends_in_another_document():
    documents = [[[10 * d + s] * 4 for s in range(4)] for d in range(1, 4)]
    everything = chunks(documents, 32)
    pairs = draw(everything * 40, everything, 32, np.random.default_rng(0))
    assert 0.35 < pairs.is_next.mean() < 0.65
    for ids, used, types, is_next in zip(*pairs, strict=True):
        first, second = ids[(types == 0) & (used == 1)], ids[types == 1]
        assert first[0] == CLS
        assert first[-1] == second[-1] == SEP
        assert len(documents_of(first)) == len(documents_of(second)) == 1
        assert (documents_of(first) == documents_of(second)) == bool(is_next)
        if is_next:
            assert np.array_equal(np.concatenate([first[1:-1], second[:-1]]), np.repeat(sorted(set(ids[ids >= 10])), 4))


# Masks


def test_masks_follow_the_80_10_10_rule_and_spare_special_tokens():
    rng = np.random.default_rng(1)
    ids = rng.integers(5, 1000, size=(400, 64)).astype(np.int32)
    ids[:, 0], ids[:, 30], ids[:, 50], ids[:, 51:] = CLS, SEP, SEP, 0
    masked = mask(ids, 1000, rng)
    rows = np.arange(400)[:, None]
    used = masked.used == 1
    shown = masked.token_ids[rows, masked.positions][used]
    labels = masked.labels[used]
    assert np.array_equal(labels, ids[rows, masked.positions][used])
    assert labels.min() >= 5
    assert used.sum(axis=1).tolist() == [round(0.15 * 48)] * 400
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (shown == labels).mean() == pytest.approx(0.1, abs=0.02)
    changed = masked.token_ids != ids
    assert changed.sum() == (shown != labels).sum()


def test_no_word_is_asked_for_twice_and_unused_places_weigh_nothing():
    ids = np.full((8, 64), 7, np.int32)
    ids[4:, 9:] = 0
    masked = mask(ids, 100, np.random.default_rng(0))
    assert masked.positions.shape == (8, masks_per_sequence(64)) == (8, 10)
    for positions, used in zip(masked.positions, masked.used, strict=True):
        assert len(set(positions[used == 1])) == int(used.sum())
    assert masked.used[4:].sum(axis=1).tolist() == [1, 1, 1, 1]
    assert masked.labels[masked.used == 0].max() == 0


def test_a_sequence_without_a_word_asks_for_nothing():
    assert mask(np.zeros((2, 16), np.int32), 100, np.random.default_rng(0)).used.sum() == 0


# Batches


def test_every_batch_has_the_same_shapes_and_dtypes(encoded):
    batches = batches_of(encoded[0])
    shapes = {name: (value.shape, value.dtype) for name, value in batches.batch(0).items()}
    assert shapes["token_ids"] == ((16, 64), np.int32)
    assert shapes["masked_weights"] == ((16, 10), np.float32)
    for step in (1, 17, 5000):
        assert {name: (value.shape, value.dtype) for name, value in batches.batch(step).items()} == shapes


def test_a_batch_depends_on_the_seed_and_the_step_alone(encoded):
    one, other = batches_of(encoded[0]), batches_of(encoded[0])
    for step in range(5):
        one.batch(step)
    assert same(one.batch(300), other.batch(300))
    assert not same(one.batch(300), one.batch(301))
    assert not same(one.batch(300), batches_of(encoded[0], seed=1).batch(300))


def test_an_epoch_sees_every_sequence_once_in_its_own_order_and_masks_it_afresh():
    batches = batches_of([[[5 + d] * 40] for d in range(20)], batch_size=4, length=48)
    epochs = [[batches.batch(5 * epoch + i) for i in range(5)] for epoch in (0, 1)]
    orders = []
    for epoch in epochs:
        firsts = [row[row >= 5] for b in epoch for row in np.where(b["token_types"] == 0, b["token_ids"], 0)]
        orders.append([Counter(row.tolist()).most_common(1)[0][0] if len(row) else None for row in firsts])
    for order in orders:
        words = [word for word in order if word in range(5, 25)]  # a first segment may be masked whole
        assert len(words) == len(set(words)) > 15
    assert orders[0] != orders[1]
    assert not same(epochs[0][0], epochs[1][0])


def test_validation_batches_are_the_same_whatever_the_seed_and_the_last_is_padded_with_weight_0(encoded):
    one = list(batches_of(encoded[1], batch_size=100).once())
    other = list(batches_of(encoded[1], batch_size=100, seed=7).once())
    assert all(same(a, b) for a, b in zip(one, other, strict=True))
    assert sum(batch["pair_weights"].sum() for batch in one) == batches_of(encoded[1]).sequences
    padded = one[-1]["pair_weights"] == 0
    assert padded.any()
    assert one[-1]["masked_weights"][padded].sum() == 0


def test_a_text_smaller_than_a_batch_is_refused(encoded):
    with pytest.raises(InputError, match=r"too small: \d+ sequences of 64 tokens.*batch of 4000.*--batch-size"):
        batches_of(encoded[0], batch_size=4000).batch(0)


def test_one_document_has_no_wrong_next_sentence_to_offer(encoded):
    with pytest.raises(InputError, match="validation text is too small for next-sentence pairs"):
        batches_of(encoded[0][:1], name="validation")
