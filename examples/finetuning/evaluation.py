"""How good a classifier is on held-out text: accuracy, confusion, and where it is most wrong."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from bert import BertForClassification
from finetuning.batches import Batches
from finetuning.task import logits_of
from training.step import AXIS, split


class Predictions(NamedTuple):
    """What a classifier said about every text."""

    probabilities: np.ndarray  # float64 [N, classes]
    classes: np.ndarray  # int32 [N], the right ones

    @property
    def chosen(self) -> np.ndarray:
        return self.probabilities.argmax(axis=1)

    @property
    def accuracy(self) -> float:
        return float((self.chosen == self.classes).mean())

    @property
    def loss(self) -> float:
        """The mean cross entropy, in nats."""
        right = self.probabilities[np.arange(len(self.classes)), self.classes]
        return float(-np.log(np.maximum(right, np.finfo(np.float32).tiny)).mean())

    def confusion(self) -> np.ndarray:
        """int [classes, classes]: how many texts of the row's class were taken for the column's."""
        counts = np.zeros((self.probabilities.shape[1],) * 2, int)
        np.add.at(counts, (self.classes, self.chosen), 1)
        return counts

    def worst(self, count: int) -> list[int]:
        """The numbers of the wrongly classified texts, those the classifier was surest about first."""
        wrong = np.flatnonzero(self.chosen != self.classes)
        right = self.probabilities[wrong, self.classes[wrong]]
        return wrong[np.argsort(right, kind="stable")][:count].tolist()


def predictor(model: BertForClassification) -> Callable[[Any, Batches], Predictions]:
    """A function of (params, batches) that classifies every text once, on all local devices."""
    compiled = jax.pmap(
        lambda params, batch: jax.nn.softmax(logits_of(model, params, jax.tree.map(lambda x: x[0], batch), None)),
        AXIS,
        in_axes=(None, 0),
    )

    def predict(params: Any, batches: Batches) -> Predictions:
        probabilities = np.zeros((len(batches.classes), model.num_classes))
        for rows, batch in batches.once():
            found = np.asarray(compiled(params, split(batch, 1))).reshape(-1, model.num_classes)
            probabilities[rows] = found[: len(rows)]
        return Predictions(probabilities, batches.classes)

    return predict


def draw_confusion(path: Path, counts: np.ndarray, names: Sequence[str], title: str) -> None:
    """Write the confusion matrix as PNG: shares of each row as shades, the counts as numbers while there is room."""
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    side = min(14, 3 + 0.7 * len(names))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the label's texts", shrink=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="classified as", ylabel="label", title=title)
    if len(names) <= 15:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count}", ha="center", va="center", color=color)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
