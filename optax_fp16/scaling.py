"""The forward side of loss scaling: the loss times the scale, and gradients of it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._messages import boolean, shown
from ._tree import is_gradient, widened
from .reading import loss_scale_of


def scale_loss(loss: jax.Array | float, opt_state: Any) -> jax.Array:
    """The loss times the current loss scale, in fp32: what to differentiate.

    ``fp32(loss) · S``. The multiplication is in fp32, but the gradient of an fp16 loss passes through fp16 on its way back:
    cast the loss to fp32 in the model, or keep S at 2**15 or below.

    Args:
      loss: a real floating number, any dtype.
      opt_state: any optimizer state with a loss scale in it (`loss_scale_of`).

    Returns:
      The scaled loss, f32 (f64 for an f64 loss).

    Raises:
      TypeError: for a loss that isn't a real floating number.
      ValueError: when the state holds no loss scale, or two that differ.

    >>> import jax.numpy as jnp
    >>> state = optax_fp16.static_loss_scale(2.0**16).init(None)
    >>> print(scale_loss(jnp.float16(4.0), state))
    262144.0
    """
    if not is_gradient(loss) or jnp.iscomplexobj(loss):
        raise TypeError(f"loss must be a real floating number (an array or a float), not {shown(loss)}.")
    wide = widened(loss)
    return wide * loss_scale_of(opt_state).astype(wide.dtype)


def value_and_grad(
    fun: Callable[..., Any], opt_state: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad`, with the true value of `fun` and the gradients of the scaled one.

    ::

        value, scaled_grads = fun(x), ∇(fp32(fun(x)) · S)

    Args:
      fun: gives a scalar loss, or (loss, aux) with `has_aux`.
      opt_state: any optimizer state with a loss scale in it.
      argnums: which arguments to differentiate by.
      has_aux: as for `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that gives (value, grads), or ((value, aux), grads). Hand the gradients to the
      optimizer as they are: its loss-scale link divides them.

    Raises:
      TypeError: for a wrong argument, which the message names.
      TypeError, ValueError: as `scale_loss`, when the function is called.

    >>> import jax.numpy as jnp
    >>> state = optax_fp16.static_loss_scale(8.0).init(None)
    >>> value, grads = value_and_grad(lambda w: w**2, state)(jnp.float32(3.0))
    >>> print(value, grads)
    9.0 48.0
    """

    if not callable(fun):
        raise TypeError(f"fun must be a function that gives a loss, not {shown(fun)}.")
    boolean("has_aux", has_aux)
    _check_argnums(argnums)

    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        value, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
        if isinstance(value, tuple):
            raise TypeError(
                f"loss must be a number, not {shown(value)}; has_aux=True is for a fun that gives (loss, aux)."
            )
        return scale_loss(value, opt_state), (value, aux)

    differentiated = jax.value_and_grad(scaled, argnums=argnums, has_aux=True)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        (_, (value, aux)), grads = differentiated(*args, **kwargs)
        return ((value, aux) if has_aux else value), grads

    return call


def _check_argnums(argnums: Any) -> None:
    numbers = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not numbers or not all(map(_is_position, numbers)):
        raise TypeError(f"argnums must be the position of an argument, or a tuple of them, not {shown(argnums)}.")


def _is_position(number: Any) -> bool:
    try:
        return not isinstance(number, bool) and operator.index(number) is not None
    except Exception:  # whatever a stranger's __index__ raises
        return False
