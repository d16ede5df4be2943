"""Takes every step's metrics from the device one step late, so that the device never waits for the host."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from training.metrics import MetricsFile
from training.progress import Progress

# What the optimizer tells of itself; a task puts its own columns between the step and these.
OPTIMIZER_COLUMNS = ("loss_scale", "grad_norm", "skipped_total", "seconds")


class Recorder:
    """Writes the metrics file and moves the progress display.

    Args:
      path: of the metrics file.
      columns: the names of the task's metrics.
      progress: the display.
      step: where the run goes on; 0 for a new run.
    """

    def __init__(self, path: Path, columns: Sequence[str], progress: Progress, step: int):
        self._columns = ("step", *columns, *OPTIMIZER_COLUMNS)
        self._file = MetricsFile(path, self._columns, step)
        self._progress = progress
        self._waiting: deque[tuple[int, Any]] = deque()
        self._last = time.perf_counter()
        self._times: list[float] = []

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Record `step`, counted from 1, as soon as the next one is under way."""
        self._waiting.append((step, metrics))
        if len(self._waiting) > 1:
            self._record(*self._waiting.popleft())

    def flush(self) -> None:
        """Record what waits."""
        while self._waiting:
            self._record(*self._waiting.popleft())

    def close(self) -> None:
        self.flush()
        self._file.close()

    @property
    def steps_per_second(self) -> float:
        """Of this process, its first step left out, in which the step is compiled; 0 until there is another."""
        times = self._times[1:]
        return len(times) / sum(times) if times else 0.0

    def _record(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        values = jax.device_get({name: metrics[name] for name in self._columns if name in metrics})
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._times.append(seconds)
        row = {"step": step, "seconds": seconds} | {name: value.item() for name, value in values.items()}
        self._file.append(row)
        self._progress.update(step, row, self.steps_per_second)
