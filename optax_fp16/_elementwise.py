"""Whether an optimizer may run on parts of arrays: it must not compute anything over a whole array."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:  # `jax.extend` brings Pallas along, which takes longer to import than this package
    from jax.extend.core import Jaxpr

# What a value in the traced update is.
_CLEAN = 0  # the same whatever part a device has: step counts, schedules, sums that went over the devices
_PART = 1  # elementwise from the device's parts
_PARTIAL = 2  # from a computation over a part that should have been over the whole array

# Primitives whose results depend on more than the same entries of their operands, besides those named reduce_*.
_OVER_ARRAYS = frozenset(
    {"argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce", "sort", "top_k"}
    | {"conv_general_dilated", "dot_general", "fft"}
    | {"cholesky", "eigh", "lu", "qr", "svd"}
    | {"random_bits"}  # every device would draw the same numbers for its part
)

REFUSAL = """distributed gives each device a part of every array, and inner computes over whole arrays ({what}), which would
be computed over the parts. Write optax_fp16.clip_by_global_norm_fp32 for optax.clip_by_global_norm and
optax_fp16.skip_if_nonfinite for optax.apply_if_finite: inside distributed their norm is the global one. An optimizer with norms
or factors per layer (optax.lamb, lars, adafactor) is right under sharded jit with optax_fp16.zero_shardings."""


class WholeArrayError(ValueError):
    """An optimizer that can't be split."""


def whole_array_computations(update: Any, names: Sequence[str], *args: Any, axis_env: Any = None) -> list[str]:
    """The primitives by which results of `update(*args)` depend on reductions over arrays that aren't summed over devices.

    Args:
      update: what to trace.
      names: the axes that a sum has to go over.
      *args: arrays or shapes.
      axis_env: (name, size) of each axis, outside of `pmap` and `shard_map`.
    """
    closed = jax.make_jaxpr(update, axis_env=axis_env)(*args)
    inputs = [_PART if _is_array(variable) else _CLEAN for variable in closed.jaxpr.invars]
    culprits: list[str] = []
    outputs = _followed(closed.jaxpr, inputs, frozenset(names), culprits)
    return list(dict.fromkeys(culprits)) if _PARTIAL in outputs else []


def _is_array(variable: Any) -> bool:
    return len(getattr(variable.aval, "shape", ())) > 0


def _followed(jaxpr: "Jaxpr", inputs: Sequence[int], names: frozenset[str], culprits: list[str]) -> list[int]:
    """What each output of a jaxpr is, from what its inputs are."""
    from jax.extend.core import Literal

    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> int:
        return _CLEAN if isinstance(variable, Literal) else known.get(variable, _CLEAN)

    for equation in jaxpr.eqns:
        given = [of(variable) for variable in equation.invars]
        bodies = list(_inside(equation.params))
        if bodies and equation.primitive.name != "reduce":  # its body says how two entries become one
            outputs = _through(equation, bodies, given, names, culprits)
        else:
            outputs = [_one(equation, given, names, culprits)] * len(equation.outvars)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _through(
    equation: Any, bodies: "list[Jaxpr]", given: list[int], names: frozenset[str], culprits: list[str]
) -> list[int]:
    """Through a call or the branches of a condition, argument by argument; through a loop, whatever may come round."""
    count = len(equation.outvars)
    loop = equation.primitive.name in ("scan", "while")
    if not loop and all(len(body.invars) <= len(given) and len(body.outvars) == count for body in bodies):
        results = [_followed(body, given[len(given) - len(body.invars) :], names, culprits) for body in bodies]
        return [max(each) for each in zip(*results, strict=True)]
    most = max(given, default=_CLEAN)
    for _ in range(2):  # what comes out of a loop's body goes in again
        results = [_followed(body, [most] * len(body.invars), names, culprits) for body in bodies]
        most = max([most, *(each for result in results for each in result)])
    return [most] * count


def _one(equation: Any, given: list[int], names: frozenset[str], culprits: list[str]) -> int:
    primitive = equation.primitive.name
    most = max(given, default=_CLEAN)
    if primitive.startswith(("psum", "pmin", "pmax")) and names <= set(equation.params.get("axes", ())):
        return _CLEAN if most == _PARTIAL else most
    over_arrays = primitive in _OVER_ARRAYS or (primitive.startswith("reduce_") and primitive != "reduce_precision")
    noise = primitive == "random_bits" and _is_array(equation.outvars[0])
    if over_arrays and (most == _PART or noise):
        culprits.append(primitive)
        return _PARTIAL
    return most


def _inside(params: dict[str, Any]) -> "Iterator[Jaxpr]":
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each
