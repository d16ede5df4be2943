"""What a person sees while it trains: a bar on a terminal, a line now and then in a log."""

import math
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SMOOTHED = 20  # steps that the shown loss and accuracy are means of
_WIDE = 110  # columns of a terminal with room for a bar too
_LINES = 20  # in a log, for the whole run


def scale_words(value: float) -> str:
    """A loss scale as people speak of it.

    >>> scale_words(32768.0), scale_words(1.0), scale_words(1000.0)
    ('2^15', '1', '1000')
    """
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 4 else f"{value:g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Progress:
    """Shows loss, accuracy, loss scale, gradient norm, skipped steps, steps/s and the time left.

    Args:
      steps: of the whole run.
      done: steps done before this process.
      accuracy: the column that is shown as the accuracy.
      console: where to.
    """

    def __init__(self, steps: int, done: int, accuracy: str, console: Console):
        self._steps, self._accuracy, self._console = steps, accuracy, console
        self._recent: deque[tuple[float, float]] = deque(maxlen=_SMOOTHED)
        self._narrow = console.width < _WIDE
        self._bar = Bar(
            *([] if self._narrow else [BarColumn(bar_width=20)]),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, shown="compiling ...")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, step: int, row: Mapping[str, float], steps_per_second: float) -> None:
        if math.isfinite(row["loss"]):
            self._recent.append((row["loss"], row[self._accuracy]))
        loss, accuracy = (_mean(values) for values in zip(*self._recent or [(math.nan, math.nan)], strict=True))
        shown = (
            f"loss {loss:.3f}  acc {accuracy:.1%}  scale {scale_words(row['loss_scale'])}  "
            f"|g| {row['grad_norm']:.3g}  skipped {row['skipped_total']}  {steps_per_second:.2f} steps/s"
        )
        self._bar.update(self._task, completed=step, shown=shown.replace("  ", " ") if self._narrow else shown)
        if not self._console.is_terminal and (step % max(1, self._steps // _LINES) == 0 or step == self._steps):
            left = f"{(self._steps - step) / steps_per_second:.0f}" if steps_per_second else "?"
            self._console.print(f"step {step}/{self._steps}  {shown}  {left} s left", highlight=False, soft_wrap=True)
