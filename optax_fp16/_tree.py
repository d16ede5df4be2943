"""Which leaves of a tree are gradients, and what the package does to all of them alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_WIDE = frozenset(map(jnp.dtype, (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128)))


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf is real or complex data: not an integer, a bool, a float0, a typed key or somebody's object."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and hasattr(leaf, "shape") and jnp.issubdtype(dtype, jnp.inexact)


def gradient_leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def path_words(path: Any) -> str:
    """A leaf's path as people write it: layer_3/attention/query."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the gradient"


def in_one_pass(*reductions: tuple[jax.Array, Callable[..., Any], Any]) -> list[jax.Array]:
    """Several reductions of arrays of one shape to scalars, each (array, function, initial value), as one operation.

    Written one by one they are compiled one by one, which takes longer, and on a CPU each goes over the memory again.
    """
    arrays, functions, initial = zip(*reductions, strict=True)

    def together(a: Any, b: Any) -> Any:
        return tuple(function(*pair) for function, *pair in zip(functions, a, b, strict=True))

    return list(jax.lax.reduce(arrays, initial, together, tuple(range(arrays[0].ndim))))


def map_gradients(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` over the leaves that are gradients; the others come back as they are."""
    return jax.tree.map(lambda leaf, *others: function(leaf, *others) if is_gradient(leaf) else leaf, tree, *rest)


def wide_dtype(dtype: Any) -> Any:
    """The dtype that arithmetic on a leaf is done in: float32 or wider, complex stays complex."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def widened(leaf: Any) -> Any:
    """A leaf in its wide dtype; a leaf that stands for an array (`jax.eval_shape`) stays one."""
    if isinstance(leaf, jax.Array) and leaf.dtype in _WIDE and not jax.typeof(leaf).weak_type:
        return leaf  # most are, and a trace of thousands of leaves takes long enough
    dtype = wide_dtype(jnp.result_type(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    return jnp.asarray(leaf, dtype)


def times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """A leaf in its wide dtype times an fp32 scalar."""
    return jax.lax.mul(leaf, jax.lax.convert_element_type(factor, leaf.dtype))


def to_fp32(tree: Any) -> Any:
    return map_gradients(widened, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """The tree with each leaf's dtype as in `like`, leaves that aren't gradients untouched."""
    return map_gradients(lambda leaf, other: jnp.asarray(leaf).astype(jnp.result_type(other)), tree, like)


def select(flag: jax.Array, on_true: Any, on_false: Any) -> Any:
    """`on_true` where the scalar flag holds, else `on_false`: two trees alike in structure, shapes and dtypes."""

    def choose(a: Any, b: Any) -> Any:
        if getattr(a, "dtype", None) == jax.dtypes.float0 or not hasattr(a, "dtype"):
            return a
        if jax.typeof(a) == jax.typeof(b):
            return jax.lax.select_n(flag, b, a)  # what `where` comes to, in a third of the time to trace it
        return jnp.where(flag, a, b)

    return jax.tree.map(choose, on_true, on_false)
