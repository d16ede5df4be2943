"""Validation of arguments, and the words of every refusal."""

import math
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer


def shown(value: Any) -> str:
    """A value as an error message shows it: on one line and short."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr that fails must not hide what the message is about
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


def _as_float(value: Any) -> float:
    """float(), without the strings, bools, complex numbers and arrays of one entry that it takes too."""
    if isinstance(value, (bool, str, bytes, bytearray)) or np.ndim(value) or np.iscomplexobj(value):
        raise TypeError("not a real scalar")
    if getattr(value, "dtype", None) == np.bool_:
        raise TypeError("a bool")
    return float(value)


def number(
    name: str,
    value: Any,
    allowed: str,
    *,
    low: float,
    high: float = math.inf,
    below: float | None = None,
) -> float:
    """The argument as a Python float with low <= value <= high and value < below, or an error that names it."""
    if is_traced(value):
        raise TypeError(f"{name} must be {allowed}, known before the step is traced, not {shown(value)}.")
    try:
        result = _as_float(value)
    except Exception as error:  # whatever a stranger's __float__ raises
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}.") from error
    # NaN fails every comparison, so it is refused here too.
    if not (low <= result <= high and (below is None or result < below)):
        raise ValueError(f"{name} must be {allowed}, not {shown(value)}.")
    return result


def integer(name: str, value: Any, *, low: int, high: int = 2**31 - 1) -> int:
    """The argument as a Python int within [low, high], or an error that names it."""
    allowed = f"a whole number of {low} or more" if high == 2**31 - 1 else f"a whole number from {low} to {high}"
    result = number(name, value, allowed, low=low, high=high)
    if result != int(result):
        raise ValueError(f"{name} must be {allowed}, not {shown(value)}.")
    return int(result)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {shown(value)}.")
    return bool(value)


def transformation(name: str, value: Any) -> Any:
    """The argument, if it is an Optax transformation; else an error that shows how one is made."""
    if not isinstance(value, optax.GradientTransformation):
        hint = " Call it first: it is a function that makes one." if callable(value) else ""
        raise TypeError(f"{name} must be an Optax transformation such as optax.adamw(1e-4), not {shown(value)}.{hint}")
    return value


def state_with(field: str, state: Any) -> Any:
    """The state, if it has the field; else an error about the order in which things are handed over."""
    if not hasattr(state, field):
        raise TypeError(
            f"opt_state must be what tx.init(params) returned, not {shown(state)}. The order is apply_gradients(tx, grads, "
            "opt_state, params), and tx.update(grads, opt_state, params)."
        )
    return state


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    try:
        known = value in allowed
    except Exception:  # an array or an object whose == doesn't give a bool
        known = False
    if not known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}.")
    return value


def floating_dtype(name: str, value: Any) -> Any:
    """The argument as a numpy dtype of real floating kind, or an error that names it."""
    try:
        dtype = jax.dtypes.canonicalize_dtype(value)
    except Exception as error:  # whatever a stranger's object raises when it is asked for its dtype
        raise TypeError(f"{name} must be a floating dtype such as jnp.float16, not {shown(value)}.") from error
    if value is None or not jax.numpy.issubdtype(dtype, np.floating):
        raise TypeError(f"{name} must be a floating dtype such as jnp.float16, not {shown(value)}.")
    return dtype
