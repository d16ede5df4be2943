"""The metrics file: one CSV line per step, written as the run goes."""

import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class MetricsFile:
    """Appends rows to a CSV file; going on at `step` drops later lines, and a line that a kill left unfinished."""

    def __init__(self, path: Path, columns: Sequence[str], step: int):
        self._path, self._columns, self._broken = path, columns, False
        kept = [row for row in _whole_rows(path, columns) if int(row[0]) <= step] if step else []
        fresh = path.with_suffix(".new")
        with fresh.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *kept])
        os.replace(fresh, path)
        self._file = path.open("a", newline="")

    def append(self, row: dict[str, float]) -> None:
        """Write one row; a disk that is full costs the line and a warning, never the run."""
        line = ",".join(str(row[name]) if isinstance(row[name], int) else f"{row[name]:.9g}" for name in self._columns)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            if not self._broken:
                print(f"warning: cannot write {self._path} ({error.strerror}); the run goes on", file=sys.stderr)
            self._broken = True

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:  # what `append` has warned of, once more
            self._broken = True


def _whole_rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [row for row in csv.reader(lines[1:]) if len(row) == len(columns) and row[0].isdigit()]


def read(path: Path) -> dict[str, np.ndarray]:
    """The columns of a metrics file, float64, by name."""
    with path.open(newline="") as file:
        columns = next(csv.reader(file))
    rows = [[float(value) for value in row] for row in _whole_rows(path, columns)]
    table = np.array(rows, np.float64).reshape(len(rows), len(columns))
    return {name: table[:, i] for i, name in enumerate(columns)}
