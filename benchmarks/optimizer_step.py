#!/usr/bin/env python3
"""Milliseconds of one optimizer step, ours and the peers', and what it takes to compile it.

    python benchmarks/optimizer_step.py --quick             # 1 M parameters: under a minute
    python benchmarks/optimizer_step.py                     # BERT-base
    python benchmarks/optimizer_step.py --norm              # the norm alone, in fp32, bf16 and fp16
    python benchmarks/optimizer_step.py --growth arrays --png growth.png

All steps run in turn, round after round, in one process, with parameters and state donated; a ratio compares medians. The first
row moves as many bytes as AdamW must at least. On a machine with a GPU that JAX sees, the steps run there.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from bench import growth, norms, steps
from bench.shapes import BASE, Shapes, bert_shapes, entries_of, even_shapes
from bench.tables import markdown
from bench.timing import Compiled, compiled, copier, gradients, interleaved, spread, stepper
from bench.torch_step import torch_step

BARE = "adamw alone"
COPY = "the same bytes moved"
OURS = {
    "recipe, apply_gradients": lambda: steps.guarded(steps.recipe()),
    "recipe, update": lambda: steps.applied(steps.recipe()),
    "nested": lambda: steps.applied(steps.nested()),
    "links": lambda: steps.applied(steps.links()),
}
PEERS = {
    "optax.apply_if_finite": steps.apply_if_finite,
    "Flax DynamicScale": steps.dynamic_scale,
    "jmp.DynamicLossScale": steps.jmp_scale,
}
TORCH = "PyTorch GradScaler"
HEADER = ("step", "ms", "low", "high", "× adamw", "× moved", "trace s", "lower s", "compile s", "in all × adamw")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 M parameters in 24 arrays instead of BERT-base's 199")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each step runs (default: 9)")
    parser.add_argument("--grads", choices=("float32", "float16"), default="float32", help="the gradients' dtype")
    parser.add_argument(
        "--growth", choices=("parameters", "arrays"), help="how the cost grows with the parameters, or with the arrays"
    )
    parser.add_argument("--counts", type=int, nargs="+", metavar="N", help="with --growth arrays: how many arrays")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --growth: only steps with TEXT in their names")
    parser.add_argument("--trace-only", action="store_true", help="with --growth: trace and lower, without compiling")
    parser.add_argument("--norm", action="store_true", help="the norm of the gradients alone, in three dtypes")
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --growth: draw it into this file")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    if not options.growth and (options.png or options.counts or options.only or options.trace_only):
        parser.error("--png, --counts, --only and --trace-only need --growth")
    return options


def compare(shapes: Shapes, grads: str, rounds: int) -> list[tuple[str, ...]]:
    """One row for each way of taking a step."""
    made = {BARE: steps.bare, **OURS, **PEERS}
    programs: dict[str, Compiled] = {}
    given = gradients(shapes, jnp.dtype(grads))
    runs = {COPY: copier(shapes)}
    for name, make in made.items():
        step = make()
        programs[name] = compiled(step, shapes, jnp.dtype(grads))
        runs[name] = stepper(programs[name], step, shapes, given)
        print(f"{name}: compiled in {programs[name].seconds:.1f} s", file=sys.stderr, flush=True)
    if by_torch := torch_step(shapes):
        runs[TORCH] = by_torch
    times = {name: spread(values) for name, values in interleaved(runs, rounds).items()}
    base, copy, compiling = times[BARE].median, times[COPY].median, programs[BARE].seconds
    rows = []
    for name, time in times.items():
        row = [name, *(f"{value:.1f}" for value in time), f"{time.median / base:.2f}", f"{time.median / copy:.2f}"]
        if program := programs.get(name):
            stages = (program.trace, program.lower, program.compile)
            row += [*(f"{seconds:.2f}" for seconds in stages), f"{program.seconds / compiling:.2f}"]
        rows.append(tuple(row + [""] * (len(HEADER) - len(row))))
    return rows


def ahead(rows: list[tuple[str, ...]]) -> list[str]:
    """In which of our ways of taking a step a peer is faster, in words."""
    median = {row[0]: float(row[1]) for row in rows}
    pairs = [(ours, peer) for ours in OURS for peer in (*PEERS, TORCH) if peer in median]
    return [
        f"{peer} is ahead of {ours}: {median[peer]:.1f} ms against {median[ours]:.1f} ms."
        for ours, peer in pairs
        if median[peer] < median[ours]
    ]


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.growth:
        return growth.main(options)
    shapes = even_shapes(1_000_000, 24) if options.quick else bert_shapes(BASE)
    device = jax.devices()[0]
    kind = "" if options.norm else f", {options.grads} gradients"
    print(f"{entries_of(shapes) / 1e6:.1f} M parameters in {len(shapes)} arrays{kind};")
    print(f"{device.device_kind} ({device.platform}), JAX {jax.__version__}, {options.rounds} rounds.\n")
    if options.norm:
        print(norms.table(shapes, options.rounds))
        return 0
    rows = compare(shapes, options.grads, options.rounds)
    print(markdown(HEADER, rows))
    print("\n" + ("\n".join(ahead(rows)) or "No peer is ahead of any of ours."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
