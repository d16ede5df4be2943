"""Train a WordPiece vocabulary that is the same in every run.

`tokenizers` keeps characters in hash maps and numbers them in the order of iteration, so two runs of its trainer
differ. Handing it every character, alone and as a continuation, as a sorted list of special tokens fixes all their
numbers; the finished vocabulary then goes into a fresh tokenizer, where only the five real special tokens are special.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from training.errors import InputError

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST_WORD_ID = len(SPECIAL)


def _tokenizer(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def train(corpus: Sequence[str], size: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer of at most `size` entries, the special ones first: [PAD] is 0."""
    blank = _tokenizer(models.WordPiece(unk_token=UNKNOWN))
    words = {
        word
        for text in corpus
        for word, _ in blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str(text))
    }
    characters = sorted({character for word in words for character in word})
    continuations = sorted({"##" + character for word in words for character in word[1:]})
    alphabet = [*SPECIAL, *characters, *continuations]
    if size < len(alphabet):
        raise InputError(f"--vocab-size {size} has no room for the text's characters; give at least {len(alphabet)}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=alphabet,
        initial_alphabet=characters,
        show_progress=False,
    )
    blank.train_from_iterator(corpus, trainer)
    vocabulary = blank.get_vocab()
    trained = _tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=100))
    trained.add_special_tokens(list(SPECIAL))
    return trained


def encode(tokenizer: Tokenizer, documents: Iterable[Sequence[str]]) -> list[list[list[int]]]:
    """The ids of every sentence of every document, sentences without any token left out."""
    encoded = []
    for document in documents:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(document), add_special_tokens=False)]
        encoded.append([sentence for sentence in ids if sentence])
    return encoded


def unigram_entropy(documents: Iterable[Sequence[Sequence[int]]]) -> float:
    """Nats per token of a model that knows only how often each token occurs: what a trained model has to beat."""
    counts = Counter(token for document in documents for sentence in document for token in sentence)
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())
