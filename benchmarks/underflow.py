"""What watching for underflow costs: bytes in the state, bytes read in a step, and time.

python benchmarks/underflow.py

On the arrays of a BERT with 12 layers written one by one (`--arrays` of them, `--entries` in all), on whatever device JAX finds.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_fp16 as fp16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", type=int, default=24)
    parser.add_argument("--entries", type=int, default=24_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    size = args.entries // args.arrays
    grads = {f"w{i}": jnp.asarray(rng.normal(size=size), jnp.float32) for i in range(args.arrays)}
    print(f"{args.arrays} fp32 arrays, {size * args.arrays:,} entries, {jax.devices()[0].device_kind}\n")
    print("| `underflow=` | state, bytes | accessed, bytes per entry | ms per step (median) | compile, s |")
    print("|---|---|---|---|---|")
    modes = (None, "total", "per_leaf")
    programs = {mode: prepared(mode, grads) for mode in modes}
    times: dict[Any, list[float]] = {mode: [] for mode in modes}
    for _ in range(args.repeats):  # taking turns, so that a busy machine is as busy for all
        for mode in modes:
            times[mode].append(timed(*programs[mode][:2], grads))
    for mode in modes:
        compiled, state, seconds = programs[mode]
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        accessed = compiled.cost_analysis()["bytes accessed"] / (size * args.arrays)
        print(f"| `{mode!r}` | {held} | {accessed:.1f} | {1e3 * np.median(times[mode]):.0f} | {seconds:.1f} |")


def prepared(mode: str | None, grads: Any) -> tuple[Any, Any, float]:
    """(the compiled link, its state, seconds of compiling)."""
    tx = fp16.dynamic_loss_scale(underflow=mode)
    state = tx.init(grads)
    start = time.process_time()
    compiled = jax.jit(tx.update).lower(grads, state).compile()
    return compiled, state, time.process_time() - start


def timed(compiled: Any, state: Any, grads: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(grads, state))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
