"""The picture of a run: loss, loss scale and gradient norm over the steps, skipped steps marked."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

_SKIPPED = "tab:red"


def smoothed(values: np.ndarray, steps: int) -> np.ndarray:
    """The mean of the last `steps` finite values, for every step."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[steps:] -= sums[:-steps].copy()
    counts[steps:] -= counts[:-steps].copy()
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def skipped_steps(metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """The numbers of the skipped steps."""
    return metrics["step"][np.diff(metrics["skipped_total"], prepend=0) > 0]


def draw(
    path: Path,
    metrics: Mapping[str, np.ndarray],
    *,
    title: str,
    lines: Mapping[str, float],
    validation: float | None = None,
) -> None:
    """Write the picture as PNG.

    Args:
      path: where to; its folder is made.
      metrics: the columns of the metrics file.
      title: above it all.
      lines: losses to compare with, by their names: horizontal lines.
      validation: the validation loss at the end, if there is one.
    """
    from matplotlib.figure import Figure  # here, since a program that starts or goes on needn't wait a second for it

    steps, skipped = metrics["step"], skipped_steps(metrics)
    figure = Figure(figsize=(7, 6), layout="constrained")
    loss, scale, norm = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    loss.plot(steps, metrics["loss"], color="tab:blue", alpha=0.25, linewidth=0.8)
    loss.plot(steps, smoothed(metrics["loss"], 20), color="tab:blue", label="training, mean of 20 steps")
    if validation is not None:
        loss.plot(steps[-1:], [validation], "o", color="tab:orange", label=f"validation, {validation:.2f}")
    for name, value in lines.items():
        loss.axhline(value, color="gray", linestyle="--", linewidth=1, label=f"{name}, {value:.2f}")
    loss.set(ylabel="loss (nats)", title=title)
    loss.legend(loc="upper right")

    scale.step(steps, metrics["loss_scale"], where="post", color="tab:green")
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")

    applied = np.where(np.isfinite(metrics["grad_norm"]), metrics["grad_norm"], np.nan)
    norm.plot(steps, applied, color="tab:purple", linewidth=0.8)
    if np.any(applied > 0):
        norm.set_yscale("log")
        for formatter in (norm.yaxis.set_major_formatter, norm.yaxis.set_minor_formatter):
            formatter(lambda value, _: f"{value:g}")
    norm.set(ylabel="gradient norm", xlabel=f"step ({len(skipped)} skipped: the red marks)")
    for axes in (scale, norm):
        for step in skipped:
            axes.axvline(step, color=_SKIPPED, linewidth=0.8, alpha=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
