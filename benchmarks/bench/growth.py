"""How the cost of a step grows with the parameters and with the number of arrays."""

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from . import steps
from .shapes import entries_of, even_shapes
from .tables import markdown
from .timing import compiled, gradients, interleaved, spread, stepper

STEPS = {
    "adamw alone": steps.bare,
    "recipe, apply_gradients": lambda: steps.guarded(steps.recipe()),
    "optax.apply_if_finite": steps.apply_if_finite,
    "Flax DynamicScale": steps.dynamic_scale,
}
SIZES = [1_000_000, 10_000_000, 110_000_000, 340_000_000]  # in LEAVES arrays
LEAVES = 200
COUNTS = [10, 100, 1000, 5000]  # arrays, of SIZE parameters in all
SIZE = 10_000_000
HEADER = ("M parameters", "arrays", "step", "ms", "ns/parameter", "× adamw", "trace s", "compile s", "in all × adamw")


class Point(NamedTuple):
    entries: int
    leaves: int
    name: str
    milliseconds: float
    trace: float
    seconds: float  # to trace, lower and compile


def measured(entries: int, leaves: int, grads: str, rounds: int) -> list[Point]:
    shapes = even_shapes(entries, leaves)
    programs, runs = {}, {}
    given = gradients(shapes, jnp.dtype(grads))
    for name, make in STEPS.items():
        step = make()
        programs[name] = compiled(step, shapes, jnp.dtype(grads))
        print(f"{entries} in {leaves}, {name}: compiled in {programs[name].seconds:.1f} s", file=sys.stderr, flush=True)
        runs[name] = stepper(programs[name], step, shapes, given)
    times = interleaved(runs, rounds)
    return [
        Point(entries_of(shapes), leaves, name, spread(times[name]).median, program.trace, program.seconds)
        for name, program in programs.items()
    ]


def rows(points: list[Point]) -> list[tuple[str, ...]]:
    base, *_ = points
    return [
        (
            f"{point.entries / 1e6:.1f}",
            str(point.leaves),
            point.name,
            f"{point.milliseconds:.1f}",
            f"{1e6 * point.milliseconds / point.entries:.2f}",
            f"{point.milliseconds / base.milliseconds:.2f}",
            f"{point.trace:.2f}",
            f"{point.seconds:.1f}",
            f"{point.seconds / base.seconds:.2f}",
        )
        for point in points
    ]


def draw(by_size: list[Point], by_leaves: list[Point], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name in STEPS:
        size = [point for point in by_size if point.name == name]
        leaves = [point for point in by_leaves if point.name == name]
        axes[0].loglog([p.entries for p in size], [p.milliseconds for p in size], "o-", label=name)
        axes[1].loglog([p.leaves for p in leaves], [p.milliseconds for p in leaves], "o-", label=name)
        axes[2].loglog([p.leaves for p in leaves], [p.seconds for p in leaves], "o-", label=name)
    axes[0].set(xlabel="parameters", ylabel="ms per step")
    axes[1].set(xlabel="arrays", ylabel="ms per step")
    axes[2].set(xlabel="arrays", ylabel="s to trace, lower and compile")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(options: argparse.Namespace) -> int:
    """Prints the table, and draws it if a file was named; with --quick, of sizes and counts that take seconds."""
    sizes, counts, size = (SIZES, COUNTS, SIZE) if not options.quick else ([1000], [1], 2000)
    by_size = [measured(entries, min(LEAVES, entries // 500), options.grads, options.rounds) for entries in sizes]
    by_leaves = [measured(size, count, options.grads, options.rounds) for count in counts]
    print(markdown(HEADER, [row for points in by_size + by_leaves for row in rows(points)]))
    if options.png:
        draw([*chain(*by_size)], [*chain(*by_leaves)], options.png)
        print(f"\nDrawn into {options.png}.")
    return 0
