"""Read prose, cut it into paragraphs that occur once, and keep some of them for validation."""

import pydoc_data.topics
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from training.errors import InputError

PARAGRAPHS_PER_DOCUMENT = 4  # neighbours stay together, so that a next sentence exists
DOCUMENTS_PER_VALIDATION = 10  # every tenth document is for validation
FEWEST_DOCUMENTS = 2 * DOCUMENTS_PER_VALIDATION  # a wrong next sentence comes from another document of the same split

PROSE = 0.75  # of a paragraph's characters are letters and spaces, in Python's reference

_BLANK_LINES = re.compile(r"\n\s*\n")
_DECORATION = re.compile(r"^[\s*=~^\-]+$", re.MULTILINE)  # the underlines of headings
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[\"'(“]?[A-Z0-9])")

Document = list[str]  # sentences in their order


def python_reference() -> list[str]:
    """The English prose that every CPython carries: the language reference's topics."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def read_files(paths: Iterable[str]) -> list[str]:
    """The texts of `paths`, refused with the file's name if one is missing, unreadable, empty or not UTF-8."""
    texts = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot read the text file {path} ({error.strerror}); give --text an existing file"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"the text file {path} is not UTF-8; convert it, for example with iconv") from None
        if not text.strip():
            raise InputError(f"the text file {path} is empty; give --text a file with prose in it")
        texts.append(text)
    return texts


def paragraphs(texts: Iterable[str], least_letters: float = 0.0) -> list[str]:
    """Every paragraph of `texts` once, in order, white space normalised; lines count where no line is blank.

    One with less than `least_letters` of letters and spaces in it is a grammar, a table or code, and is left out.
    """
    seen: dict[str, str] = {}
    for text in texts:
        text = _DECORATION.sub("", text).strip()
        parts = _BLANK_LINES.split(text)
        for part in parts if len(parts) > 1 else text.splitlines():
            paragraph = " ".join(part.split())
            if paragraph and _share_of_letters(paragraph) >= least_letters:
                seen.setdefault(paragraph.lower(), paragraph)
    return list(seen.values())


def _share_of_letters(paragraph: str) -> float:
    return sum(character.isalpha() or character == " " for character in paragraph) / len(paragraph)


def sentences(paragraph: str) -> list[str]:
    """`paragraph` cut after `.`, `!`, `?` or `:` where a capital or a digit follows.

    >>> sentences("It is so. Is it? See e.g. this.")
    ['It is so.', 'Is it?', 'See e.g. this.']
    """
    return _SENTENCE_END.split(paragraph)


def documents(texts: Sequence[str], least_letters: float = 0.0) -> tuple[list[Document], list[Document]]:
    """Training and validation documents; no paragraph is in both, or twice in either."""
    unique = paragraphs(texts, least_letters)
    runs = [unique[i : i + PARAGRAPHS_PER_DOCUMENT] for i in range(0, len(unique), PARAGRAPHS_PER_DOCUMENT)]
    if len(runs) < FEWEST_DOCUMENTS:
        needed = FEWEST_DOCUMENTS * PARAGRAPHS_PER_DOCUMENT
        raise InputError(
            f"the text is too small: {len(unique)} different paragraphs, and a split into training and validation "
            f"needs {needed}; add text with --text FILE FILE..."
        )
    split: tuple[list[Document], list[Document]] = ([], [])
    for i, run in enumerate(runs):
        held_out = i % DOCUMENTS_PER_VALIDATION == DOCUMENTS_PER_VALIDATION - 1
        split[held_out].append([sentence for paragraph in run for sentence in sentences(paragraph)])
    return split
