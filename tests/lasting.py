"""A state of every kind with known numbers in it, as the files in tests/fixtures hold it.

`python -m tests.lasting` writes the files that are missing. It never writes over one: they stand for checkpoints out there,
which must load for ever.
"""

import pathlib
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_fp16 as fp16

FOLDER = pathlib.Path(__file__).parent / "fixtures"
VERSION = "0.1.0"
PARAMS = {"half": jnp.ones(3, jnp.float16), "brain": jnp.ones((2, 1), jnp.bfloat16), "full": jnp.ones(2)}


def transforms():
    adam = optax.adamw(0.1)
    masters = fp16.master_weights(adam, remainder=True)
    return {
        "recipe": fp16.mixed_precision(adam, max_norm=1.0, half_params=True),
        "links": optax.chain(
            fp16.dynamic_loss_scale(underflow="per_leaf"),
            fp16.clip_by_global_norm_fp32(1.0),
            fp16.skip_if_nonfinite(masters),
        ),
        "static": optax.chain(fp16.static_loss_scale(8.0, underflow="total"), fp16.skip_if_nonfinite(optax.sgd(0.1))),
    }


def blank():
    return {name: tx.init(PARAMS) for name, tx in transforms().items()}


def known():
    """The blank state with leaf i holding i, i + 1, ..., so that no two leaves are alike."""
    leaves, structure = jax.tree.flatten(blank())
    numbers = [np.arange(leaf.size).reshape(leaf.shape) + index for index, leaf in enumerate(leaves)]
    return jax.tree.unflatten(
        structure, [jnp.asarray(number.astype(leaf.dtype)) for number, leaf in zip(numbers, leaves, strict=True)]
    )


def only_ours(node):
    """The state with other packages' NamedTuples as dicts: where those live is not ours to keep."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields = {name: only_ours(value) for name, value in node._asdict().items()}
        return type(node)(**fields) if type(node).__module__.startswith("optax_fp16.") else fields
    if isinstance(node, dict):
        return {name: only_ours(value) for name, value in node.items()}
    return tuple(map(only_ours, node)) if isinstance(node, tuple) else node


def _orbax(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


WRITERS = {
    "msgpack": lambda path, state: path.write_bytes(flax.serialization.to_bytes(state)),
    "pickle": lambda path, state: path.write_bytes(pickle.dumps(only_ours(jax.device_get(state)), protocol=4)),
    "orbax": _orbax,
}


def path_of(kind):
    return FOLDER / f"state-{VERSION}.{kind}"


def main():
    for kind, write in WRITERS.items():
        if not path_of(kind).exists():
            write(path_of(kind), known())
            print(f"wrote {path_of(kind)}")
    # It names the folder it was written in, and only object stores need it.
    (path_of("orbax") / "commit_success.txt").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
