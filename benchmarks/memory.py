#!/usr/bin/env python3
"""Bytes per parameter of every way to keep parameters and masters, as XLA accounts for them in the optimizer's step on BERT-base.

    pip install --no-deps jax-cuda12-pjrt==<the version of jaxlib>
    python benchmarks/memory.py

Each step (scale, norm, clip, AdamW, skip) is compiled for an H100 on a machine without one, with parameters and state donated.
"In all" is what the device holds at once: arguments, results that don't take an argument's place, and temporary arrays. Rows
of several GPUs are of one of them.
"""

import argparse
import math
import os
import sys
from typing import Any, NamedTuple

# CUDA must not be named here: with the compiler alone its plugin would look for a driver.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import optax
from bench.compiled import Unavailable, gpu_mesh
from bench.gpu_cases import BASE_23, LAYER_16, Program, distributed_step, whole
from bench.shapes import Shapes, entries_of, tree_of
from bench.tables import markdown
from jax.sharding import Mesh

import optax_fp16 as fp16

FULL, HALF, BRAIN = jnp.float32, jnp.float16, jnp.bfloat16
SMALL = 100_000  # entries: BERT-base's biases and LayerNorms have fewer, its matrices more


class Way(NamedTuple):
    name: str
    dtype: Any  # of parameters and gradients
    masters: str = "none"  # or "whole", "remainders"
    mu_dtype: Any = None
    small: Any = None  # the dtype of small arrays, if it is another
    devices: int = 1

    def optimizer(self) -> Any:
        adam = optax.adamw(1e-4, mu_dtype=self.mu_dtype)
        if self.masters == "remainders":
            adam = fp16.master_weights(adam, remainder=True)
        scale = 1.0 if self.dtype == BRAIN else None
        return fp16.mixed_precision(adam, max_norm=1.0, loss_scale=scale, half_params=self.masters == "whole")


WAYS = [
    Way("fp32", FULL),
    Way("fp32, mu in bf16", FULL, mu_dtype=BRAIN),
    Way("fp16, masters", HALF, "whole"),
    Way("fp16, masters; small arrays fp32", HALF, "whole", small=FULL),
    Way("fp16, masters, mu in bf16", HALF, "whole", mu_dtype=BRAIN),
    Way("bf16, masters", BRAIN, "whole"),
    Way("bf16, remainders", BRAIN, "remainders"),
    Way("bf16, remainders, mu in bf16", BRAIN, "remainders", mu_dtype=BRAIN),
    Way("fp32, distributed", FULL, devices=4),
    Way("fp16, masters, distributed", HALF, "whole", devices=4),
]
HEADER = ("way", "GPUs", "parameters", "gradients", "state", "arguments", "in place", "results", "temporary", "in all")


def step_of(way: Way, mesh: Mesh, shapes: Shapes) -> Program:
    """The optimizer's step on one device."""
    tx, sharding = way.optimizer(), whole(mesh)

    def leaf(_: int, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        dtype = way.small if way.small and math.prod(shape) < SMALL else way.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        return fp16.apply_gradients(tx, grads, state, params)

    params = tree_of(shapes, leaf)
    state = jax.tree.map(lambda leaf: leaf.update(sharding=sharding), jax.eval_shape(tx.init, params))
    return Program(step, (params, state, params), donate=(0, 1))


def bytes_on_a_device(tree: Any) -> int:
    leaves = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in leaves)


def row(way: Way, shapes: Shapes) -> tuple[str, ...]:
    mesh = gpu_mesh("h100", way.devices)
    program = (
        distributed_step(mesh, shapes, way.optimizer(), way.dtype) if way.devices > 1 else step_of(way, mesh, shapes)
    )
    # A whole training step reads the parameters, which this part of it needn't: they are counted all the same.
    step = jax.jit(program.function, donate_argnums=program.donate, keep_unused=True)
    memory = step.lower(*program.args).compile().memory_analysis()
    params, state, grads = map(bytes_on_a_device, program.args)
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    in_all = arguments + results - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    counts = params, grads, state, arguments, memory.alias_size_in_bytes, results, memory.temp_size_in_bytes, in_all
    return way.name, str(way.devices), *(f"{count / entries_of(shapes):.2f}" for count in counts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer in place of BERT-base")
    parser.add_argument("--only", default="", metavar="TEXT", help="only ways with TEXT in their names")
    options = parser.parse_args(argv)
    rows = []
    for way in (way for way in WAYS if options.only in way.name):
        try:
            rows.append(row(way, LAYER_16 if options.quick else BASE_23))
        except Unavailable as error:
            print(f"memory.py: {error}", file=sys.stderr)
            return 2
        print(f"{way.name}: {rows[-1][-1]} bytes per parameter", file=sys.stderr, flush=True)
    print(markdown(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
