"""Labelled sentences: movie reviews by default, or a table of one's own; split once and for all."""

import csv
import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.errors import InputError

_RATED = "movieReviewSnippets"


class Labelled(NamedTuple):
    """Texts with the numbers of their classes."""

    texts: list[str]
    classes: np.ndarray  # int32 [N]


class Labels(NamedTuple):
    """A set of labelled texts, split; `names` has the classes' names, in the order of their numbers."""

    names: list[str]
    training: Labelled
    validation: Labelled
    digest: str  # of everything, to know it again


def movie_reviews(sdist: Path) -> list[tuple[str, str]]:
    """(label, sentence) of the rated movie-review sentences in vaderSentiment's sdist; those rated 0 are left out."""
    try:
        with tarfile.open(sdist) as outer:
            inner = next(m for m in outer if m.name.endswith("additional_resources/hutto_ICWSM_2014.tar.gz"))
            data = outer.extractfile(inner).read()
        with tarfile.open(fileobj=io.BytesIO(data)) as rated:
            text = rated.extractfile(f"hutto_ICWSM_2014/{_RATED}_GroundTruth.txt").read().decode()
    except (tarfile.TarError, StopIteration, KeyError, EOFError) as error:
        raise InputError(f"{sdist} can't be read ({error}); delete it and start again to fetch it anew") from None
    rows = [line.split("\t") for line in text.split("\r\n") if line]
    rated_rows = [(float(rating), sentence) for _, rating, sentence in rows]
    return [("positive" if rating > 0 else "negative", sentence) for rating, sentence in rated_rows if rating]


def read_table(path: Path) -> list[tuple[str, str]]:
    """(label, text) of the rows of a .tsv or .csv file; a first row that says "label" and "text" is a heading."""
    dialects = {".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}, ".csv": {"strict": True}}
    if path.suffix not in dialects:
        raise InputError(f"{path} is neither .tsv nor .csv; give a file of two columns, label and text")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(_rows(path, csv.reader(file, **dialects[path.suffix])))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); give --data a file of labels and texts") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8; convert it first") from None
    except csv.Error as error:
        raise InputError(f"{path} is not a table that can be read ({error}); two columns, label and text") from None


def _rows(path: Path, reader) -> Iterator[tuple[str, str]]:
    first = True
    for row in reader:
        heading, first = first and [name.strip().lower() for name in row] == ["label", "text"], False
        if not row or heading:
            continue
        where = f"{path} line {reader.line_num}"
        if len(row) != 2:
            raise InputError(f"{where} has {len(row)} column(s), not 2; every row is a label and a text")
        label, text = (part.strip() for part in row)
        if not label:
            raise InputError(f"{where} has no label ({text[:40]!r}); label it or take it out")
        if not text:
            raise InputError(f"{where} has no text (its label is {label!r}); add it or take the row out")
        yield label, text


def split(rows: Sequence[tuple[str, str]], validation: float, source: str) -> Labels:
    """Rows without repeated texts, shuffled the same way in every run, a part of them held out."""
    first_label: dict[str, str] = {}
    for label, text in rows:
        first_label.setdefault(text, label)
    names = sorted(set(first_label.values()))
    if len(names) < 2:
        found = f"the only label is {names[0]!r}" if names else "there are no rows"
        raise InputError(f"{source} has nothing to tell apart: {found}; give texts of at least two classes")
    texts = list(first_label)
    held_out = round(len(texts) * validation)
    if not 0 < held_out < len(texts):
        raise InputError(f"{source} has {len(texts)} different texts, too few to hold out some; give more")
    numbers = {name: number for number, name in enumerate(names)}
    order = np.random.default_rng(0).permutation(len(texts))

    def part(indices: np.ndarray) -> Labelled:
        chosen = [texts[i] for i in indices]
        return Labelled(chosen, np.array([numbers[first_label[text]] for text in chosen], np.int32))

    training, validating = part(order[held_out:]), part(order[:held_out])
    if len(set(training.classes.tolist())) < len(names):
        raise InputError(f"{source} has a class with so few texts that all were held out; give more of each")
    digest = hashlib.sha256("\0".join(part for row in first_label.items() for part in row).encode()).hexdigest()
    return Labels(names, training, validating, digest)
