"""How the cost of a step grows with the parameters and with the number of arrays."""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from . import steps
from .shapes import entries_of, even_shapes
from .tables import markdown
from .timing import compiled, gradients, interleaved, spread, stepper, traced

BARE = "adamw alone"
STEPS = {
    BARE: steps.bare,
    "recipe, apply_gradients": lambda: steps.guarded(steps.recipe()),
    "recipe, update": lambda: steps.applied(steps.recipe()),
    "nested": lambda: steps.applied(steps.nested()),
    "links": lambda: steps.applied(steps.links()),
    "optax.apply_if_finite": steps.apply_if_finite,
    "Flax DynamicScale": steps.dynamic_scale,
    "jmp.DynamicLossScale": steps.jmp_scale,
}
SIZES = [1_000_000, 10_000_000, 110_000_000, 340_000_000]  # in LEAVES arrays
LEAVES = 200
COUNTS = [10, 100, 1000, 5000]  # arrays, of SIZE parameters in all
SIZE = 10_000_000
HEADER = ("M parameters", "arrays", "step", "ms", "× adamw", "trace s", "lower s", "compile s", "in all × adamw")


class Point(NamedTuple):
    entries: int
    leaves: int
    name: str
    milliseconds: float | None  # None: not run, and not compiled either
    stages: tuple[float, ...]  # seconds to trace, to lower and to compile


def measured(entries: int, leaves: int, options: argparse.Namespace) -> list[Point]:
    """AdamW alone and the steps that were asked for, one after the other: together they would need several times the memory."""
    shapes, dtype = even_shapes(entries, leaves), jnp.dtype(options.grads)
    given = {} if options.trace_only else gradients(shapes, dtype)
    points = []
    for name, make in STEPS.items():
        if name != BARE and options.only not in name:
            continue
        step, time = make(), None
        if options.trace_only:
            stages = traced(step, shapes, dtype)[1:]
        else:
            program = compiled(step, shapes, dtype)
            stages = program[1:]
            run = stepper(program, step, shapes, given)
            time = spread(interleaved({name: run}, options.rounds)[name]).median
        points.append(Point(entries_of(shapes), leaves, name, time, stages))
        print(f"{entries} in {leaves}, {name}: {sum(stages):.1f} s to compile", file=sys.stderr, flush=True)
    return points


def rows(points: list[Point]) -> list[tuple[str, ...]]:
    base, *_ = points
    return [
        (
            f"{point.entries / 1e6:.1f}",
            str(point.leaves),
            point.name,
            f"{point.milliseconds:.1f}" if point.milliseconds else "",
            f"{point.milliseconds / base.milliseconds:.2f}" if point.milliseconds and base.milliseconds else "",
            *(f"{seconds:.2f}" for seconds in point.stages),
            *([""] * (3 - len(point.stages))),
            f"{sum(point.stages) / sum(base.stages):.2f}",
        )
        for point in points
    ]


def draw(points: list[Point], by_leaves: bool, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for name in dict.fromkeys(point.name for point in points):
        own = [point for point in points if point.name == name]
        along = [point.leaves if by_leaves else point.entries for point in own]
        axes[0].loglog(along, [point.milliseconds or float("nan") for point in own], "o-", label=name)
        axes[1].loglog(along, [sum(point.stages) for point in own], "o-", label=name)
    axes[0].set(ylabel="ms per step")
    axes[1].set(ylabel="s to trace, lower and compile")
    axes[0].legend(fontsize="small")
    for axis in axes:
        axis.set(xlabel="arrays" if by_leaves else "parameters")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(options: argparse.Namespace) -> int:
    """Prints the table, and draws it if a file was named; with --quick, of sizes and counts that take seconds."""
    by_leaves = options.growth == "arrays"
    if by_leaves:
        cases = [(2000, 1), (2000, 2)] if options.quick else [(SIZE, count) for count in options.counts or COUNTS]
    else:
        cases = [(1000, 2), (2000, 2)] if options.quick else [(size, LEAVES) for size in SIZES]
    groups = [measured(entries, leaves, options) for entries, leaves in cases]
    print(markdown(HEADER, [row for points in groups for row in rows(points)]))
    if options.png:
        draw([point for points in groups for point in points], by_leaves, options.png)
        print(f"\nDrawn into {options.png}.")
    return 0
