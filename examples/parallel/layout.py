"""How a BERT is spread over devices: the mesh, and the part of every parameter that a device has."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bert import BertConfig
from training.errors import InputError

DATA, PIPE, MODEL = AXES = ("data", "pipe", "model")

# Megatron's split inside a layer. A stage of the pipeline has some of the layers, which are every array's first axis; query,
# key, value and the first feed-forward product are split by columns, so that each device has whole heads; the products that
# come back to the residual stream by rows, and their results are summed.
_COLUMNS = {"kernel": P(PIPE, None, MODEL), "bias": P(PIPE, MODEL)}
_ROWS = {"kernel": P(PIPE, MODEL), "bias": P(PIPE)}
_LAYER = {
    "attention": {"query": _COLUMNS, "key": _COLUMNS, "value": _COLUMNS, "output": _ROWS},
    "attention_norm": P(PIPE),
    "intermediate": _COLUMNS,
    "output": _ROWS,
    "output_norm": P(PIPE),
}


class Layout(NamedTuple):
    """Devices along each axis."""

    dp: int
    tp: int
    pp: int

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp


def mesh_of(layout: Layout) -> Mesh:
    """The mesh, over the first devices there are; tensor parallelism, which talks most, between neighbours."""
    found = jax.devices()
    if len(found) < layout.devices:
        raise InputError(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} needs {layout.devices} devices and there are {len(found)} "
            f"({found[0].device_kind}); write smaller numbers, or JAX_PLATFORMS=cpu before the command to simulate them"
        )
    grid = np.array(found[: layout.devices]).reshape(layout.dp, layout.pp, layout.tp)
    return Mesh(grid, AXES)


def specs_of(params: Any) -> Any:
    """The PartitionSpec of every parameter of a `BertForPreTraining`."""
    prefix = {name: P() for name in params} | {
        "mlm_bias": P(MODEL),
        "bert": {
            "embeddings": {"word": P(MODEL), "position": P(), "token_type": P(), "norm": P()},
            "layers": _LAYER,
        },
    }
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, params, is_leaf=lambda node: isinstance(node, P)
    )


def check(layout: Layout, config: BertConfig, batch_size: int, micro_batches: int) -> None:
    """Refuse what doesn't divide, with numbers that do."""
    _divides("--tp", layout.tp, f"the model's {config.num_heads} heads", config.num_heads)
    _divides("--pp", layout.pp, f"the model's {config.num_layers} layers", config.num_layers)
    if batch_size % (layout.dp * micro_batches):
        step = layout.dp * micro_batches
        raise InputError(
            f"a batch of {batch_size} can't be cut into {layout.dp} x {micro_batches} micro-batches; write --batch-size "
            f"{-(-batch_size // step) * step}"
        )


def _divides(option: str, parts: int, what: str, whole: int) -> None:
    if whole % parts:
        allowed = ", ".join(str(each) for each in range(1, whole + 1) if whole % each == 0)
        raise InputError(f"{option} {parts} doesn't divide {what}; write one of {allowed}")


def local_entries(params: Any, specs: Any, layout: Layout) -> int:
    """Parameters on a device, by arithmetic."""
    sizes = {DATA: layout.dp, PIPE: layout.pp, MODEL: layout.tp}

    def entries(leaf: Any, spec: Sequence[Any]) -> int:
        return leaf.size // int(np.prod([sizes[name] for name in spec if name is not None], dtype=int))

    return sum(jax.tree.leaves(jax.tree.map(entries, params, specs)))
