"""Which gradients are not finite, or about to vanish: parameter by parameter."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._messages import floating_dtype, is_traced, shown
from ._tree import in_one_pass, is_gradient, path_words, widened

_COUNTED = ("entries", "Inf", "NaN", "zero", "subnormal")


class LeafReport(NamedTuple):
    """What one leaf of a tree of gradients is made of."""

    path: str  # as in "layer_3/attention/query"
    dtype: str
    entries: int
    infs: int
    nans: int
    zeros: int
    subnormals: int  # neither zero nor a normal number of the report's dtype
    largest: float  # of the finite magnitudes; 0.0 if there are none
    smallest: float  # of the finite magnitudes above zero; 0.0 if there are none

    @property
    def finite(self) -> bool:
        return self.infs == self.nans == 0


class NonfiniteReport(NamedTuple):
    """What `nonfinite_report` found; `print` shows it as a table."""

    leaves: tuple[LeafReport, ...]  # in the order of the tree
    dtype: str  # whose subnormals were counted

    @property
    def finite(self) -> bool:
        """Whether no gradient is Inf or NaN."""
        return all(leaf.finite for leaf in self.leaves)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per leaf, for a dataframe or a CSV writer."""
        return [leaf._asdict() for leaf in self.leaves]

    def short(self) -> str:
        """A line for each leaf that isn't finite, as in "layer_3/attention/query: 12 Inf, 3 NaN"."""
        lines = [f"{leaf.path}: {_found(leaf)}" for leaf in self.leaves if not leaf.finite]
        return "\n".join(lines) or f"all {len(self.leaves)} leaves are finite"

    def __str__(self) -> str:
        head = ("parameter", "dtype", *_COUNTED, "largest", "smallest")
        body = [
            (*map(str, leaf[:2]), *(f"{count:,}" for count in leaf[2:7]), *(f"{value:.3g}" for value in leaf[7:]))
            for leaf in self.leaves
        ]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(map(_placed, range(len(head)), row, widths)) for row in (head, *body)]
        total = sum(not leaf.finite for leaf in self.leaves)
        return "\n".join(
            [*lines, f"{total} of {len(self.leaves)} leaves are not finite; subnormal is meant in {self.dtype}"]
        )


def nonfinite_report(grads: Any, dtype: Any = jnp.float16) -> NonfiniteReport:
    """Counts what each gradient is made of, by path, in one compiled pass over all of them.

    ::

        for each leaf:  #Inf, #NaN, #(x = 0), #(0 < |x| < smallest normal number of dtype),  max |x|, min |x| > 0

    For the moment when something has gone wrong: it waits for the device. Give it the gradients as they came, of the scaled
    loss, to see what the half-precision backward pass saw.

    Args:
      grads: any tree of arrays; leaves that are no gradients (None, integers, float0, typed keys) are left out. The two parts
        of a complex number count as two entries.
      dtype: the one computed in, whose subnormals are counted: numbers that it holds with fewer bits, or not at all.

    Returns:
      A `NonfiniteReport`: a table when printed, `.rows()` for a dataframe, `.short()` for a log, `.finite`, and `.leaves`.

    Raises:
      TypeError: inside `jit`, where there are no values to look at, or for a dtype that isn't a floating one.

    >>> import jax.numpy as jnp
    >>> grads = {"layer_3": {"bias": jnp.array([0.0, 1e-6]), "query": jnp.array([jnp.inf, jnp.nan, 2.0])}, "step": 3}
    >>> report = nonfinite_report(grads)
    >>> print(report.short())
    layer_3/query: 1 Inf, 1 NaN
    >>> print(report)
    parameter      dtype    entries  Inf  NaN  zero  subnormal  largest  smallest
    layer_3/bias   float32        2    0    0     1          1    1e-06     1e-06
    layer_3/query  float32        3    1    1     0          0        2         2
    1 of 2 leaves are not finite; subnormal is meant in float16

    References:
      torch's `detect_anomaly`, which stops at the first NaN of a backward pass, and says where.
    """
    computed_in = floating_dtype("dtype", dtype)
    found = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if is_gradient(leaf)]
    for path, leaf in found:
        if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"nonfinite_report needs values, and {path_words(path)} is {shown(leaf)}: return the gradients from the "
                "compiled step and call it outside, when metrics_of(opt_state)['grads_finite'] is False."
            )
    tiny = float(jnp.finfo(computed_in).smallest_normal)
    counts, magnitudes = jax.device_get(_looked_at([leaf for _, leaf in found], tiny))
    leaves = [
        LeafReport(path_words(path), str(jnp.result_type(leaf)), *map(int, count), *map(float, magnitude))
        for (path, leaf), count, magnitude in zip(found, counts, magnitudes, strict=True)
    ]
    return NonfiniteReport(tuple(leaves), str(np.dtype(computed_in)))


def _found(leaf: LeafReport) -> str:
    counts = ((leaf.infs, "Inf"), (leaf.nans, "NaN"))
    return ", ".join(f"{count:,} {word}" for count, word in counts if count)


def _placed(column: int, text: str, width: int) -> str:
    return text.ljust(width) if column < 2 else text.rjust(width)


@partial(jax.jit, static_argnums=1)
def _looked_at(leaves: list[Any], tiny: float) -> tuple[list[jax.Array], list[jax.Array]]:
    """For each leaf: u32[5] counts (entries, Inf, NaN, zero, subnormal), and the largest and smallest finite magnitude."""
    found = [_leaf(_parts(widened(leaf)), tiny) for leaf in leaves]
    return [counts for counts, _ in found], [magnitudes for _, magnitudes in found]


def _parts(wide: jax.Array) -> jax.Array:
    return jnp.stack([wide.real, wide.imag]) if jnp.iscomplexobj(wide) else wide


def _bits(wide: jax.Array) -> jax.Array:
    """|x| as an integer, in the order of the magnitudes: floating comparisons may take subnormal numbers for zero."""
    kind = jnp.uint64 if wide.dtype.itemsize == 8 else jnp.uint32
    without_sign = kind((1 << (8 * wide.dtype.itemsize - 1)) - 1)
    return jax.lax.bitcast_convert_type(wide, kind) & without_sign


def _as_bits(number: float, like: jax.Array) -> Any:
    return np.asarray(number, like.dtype).view(f"u{like.dtype.itemsize}")[()]


def _leaf(wide: jax.Array, tiny: float) -> tuple[jax.Array, jax.Array]:
    bits, infinity = _bits(wide), _as_bits(np.inf, wide)
    zero = infinity - infinity
    kinds = (bits == infinity, bits > infinity, bits == 0, (bits > 0) & (bits < _as_bits(tiny, wide)))
    *counts, largest, smallest = in_one_pass(
        *((kind.astype(jnp.uint32), jnp.add, jnp.uint32(0)) for kind in kinds),
        (jnp.where(bits < infinity, bits, zero), jnp.maximum, zero),
        (jnp.where(bits > 0, bits, infinity), jnp.minimum, infinity),
    )
    magnitudes = jnp.stack([largest, jnp.where(smallest == infinity, zero, smallest)])
    return jnp.stack([jnp.uint32(wide.size), *counts]), jax.lax.bitcast_convert_type(magnitudes, wide.dtype)
