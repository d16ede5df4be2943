"""How fast the norm of a tree of gradients is read, ours against Optax's."""

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16

from .shapes import Shapes, entries_of
from .tables import markdown
from .timing import gradients, interleaved, spread

DTYPES = ("float32", "bfloat16", "float16")
NORMS = {"optax.tree.norm": optax.tree.norm, "grad_global_norm": fp16.grad_global_norm}
HEADER = ("gradients", "norm", "ms", "low", "high", "GB/s", "at best")


def table(shapes: Shapes, rounds: int) -> str:
    """Milliseconds of the norm alone in each dtype, and the gradients' bytes divided by them."""
    rows = []
    for dtype in DTYPES:
        grads = gradients(shapes, jnp.dtype(dtype))
        size = entries_of(shapes) * jnp.dtype(dtype).itemsize
        compiled = {name: jax.jit(norm) for name, norm in NORMS.items()}
        runs = {name: lambda norm=norm, grads=grads: norm(grads) for name, norm in compiled.items()}
        for name, times in interleaved(runs, rounds).items():
            time = spread(times)
            rates = (size / 1e6 / milliseconds for milliseconds in (time.median, time.low))
            rows.append((dtype, name, *(f"{value:.1f}" for value in time), *(f"{rate:.1f}" for rate in rates)))
    return markdown(HEADER, rows)
