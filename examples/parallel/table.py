"""Every layout with and without the distributed optimizer, as a table: printed, as CSV and as Markdown."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parallel.layout import Layout
from parallel.run import Result

LAYOUTS = (Layout(4, 1, 1), Layout(2, 2, 1), Layout(2, 1, 2), Layout(2, 1, 1), Layout(1, 1, 1))
HEADER = (
    "ZeRO",
    "DP",
    "TP",
    "PP",
    "steps/s",
    "train loss",
    "validation loss",
    "parameters B",
    "by arithmetic",
    "optimizer B",
    "by arithmetic",
    "temporary B",
    "peak B",
)


def row(layout: Layout, zero: bool, result: Result) -> tuple[str, ...]:
    memory = result.memory
    return (
        "yes" if zero else "no",
        *(str(size) for size in layout),
        f"{result.steps_per_second:.2f}",
        f"{result.loss:.5f}",
        f"{result.validation_loss:.5f}",
        f"{memory.parameters}",
        f"{memory.parameters_expected}",
        f"{memory.optimizer}",
        f"{memory.optimizer_expected}",
        f"{memory.temporary}",
        f"{memory.peak}",
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def closeness(results: Sequence[Result]) -> str:
    """How far the rows' losses are from each other."""
    spans = []
    for name, losses in (
        ("training", [result.loss for result in results]),
        ("validation", [result.validation_loss for result in results]),
    ):
        spans.append(f"the {name} losses lie within {(max(losses) - min(losses)) / max(losses):.1e} of each other")
    return f"{' and '.join(spans)}: all rows compute the same sums, in other orders and, in half precision, rounded elsewhere."


def run_all(run: Callable[[Layout, bool], Result], folder: Path) -> None:
    """Go through the table's rows; what is done is on the disk after each."""
    rows: list[tuple[str, ...]] = []
    results: list[Result] = []
    shown = Table(*HEADER, title="BERT in parallel; bytes are of one device")
    for layout in LAYOUTS:
        for zero in (False, True):
            result = run(layout, zero)
            results.append(result)
            rows.append(row(layout, zero, result))
            shown.add_row(*rows[-1])
            write(rows, folder)
            print(
                f"dp {layout.dp} tp {layout.tp} pp {layout.pp} {'ZeRO' if zero else ''}: loss {result.loss:.5f}",
                flush=True,
            )
    console = Console()
    # A log has no width of its own, and a wrapped table can't be read.
    (console if console.is_terminal else Console(width=180)).print(shown)
    print(closeness(results))
    print(f"written to {folder / 'table.csv'} and {folder / 'table.md'}")


def write(rows: Sequence[Sequence[str]], folder: Path) -> None:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    (folder / "table.md").write_text(markdown(rows))
