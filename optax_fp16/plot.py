"""The picture that explains loss scaling: where gradients lie in half precision's range. Needs matplotlib."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._messages import floating_dtype
from ._tree import gradient_leaves, widened
from .loss_scale import checked_scale

_ZERO = -127  # the biased exponent 0 of fp32: zeros, and what is smaller than any normal number


def exponent_histogram(
    grads: Any, loss_scale: Any = 1.0, *, scaled: bool = True, dtype: Any = jnp.float16, ax: Any = None
) -> Any:
    """Draws how many gradient entries there are of each power of two, and which of them `dtype` can hold at the loss scale.

    ::

        count[e] = #(2^e <= |g| < 2^(e+1));   at scale S a g of that size is normal, subnormal, zero or Inf in dtype as S·2^e is

    Args:
      grads: any tree of gradients, with values (not inside `jit`).
      loss_scale: the scale S: a number or `loss_scale_of(opt_state)`.
      scaled: whether the gradients are those of the scaled loss, as `value_and_grad` gives them; they are drawn as true ones,
        divided by S. Gradients computed in fp32 show what `dtype` would lose; those computed in it show what it has lost.
      dtype: the one computed in, whose range is drawn.
      ax: matplotlib axes to draw on; None: on a new figure.

    Returns:
      The matplotlib axes; `.figure.savefig("gradients.png")` writes the picture.

    Raises:
      ImportError: without matplotlib, saying how to get it.
      ValueError, TypeError: for what can't be a loss scale, a dtype that isn't a floating one, or no gradients.

    >>> import jax.numpy as jnp
    >>> from optax_fp16.plot import exponent_histogram
    >>> ax = exponent_histogram({"w": jnp.array([1e-8, 2e-8, 0.5])}, 2.0**15, scaled=False)
    >>> print(ax.get_xlabel())
    magnitude of the true gradient

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    ax = _new_axes() if ax is None else ax
    held = jnp.finfo(floating_dtype("dtype", dtype))
    scale = checked_scale("loss_scale", np.max(jax.device_get(loss_scale)))
    shares = exponent_counts(grads)
    total = shares.sum()
    shares = shares / total
    shift = np.log2(scale)
    scaled_exponents = np.arange(1, 255) + _ZERO + (0.0 if scaled else shift)
    for words, color, first, last in _fates(held):
        own = (scaled_exponents >= first) & (scaled_exponents < last) & (shares[1:-1] > 0)
        if not own.any():
            continue
        heights = shares[1:-1][own]
        label = f"{words}: {_percent(heights.sum())}"
        ax.bar(
            scaled_exponents[own] - shift, heights, width=1.0, align="edge", color=color, edgecolor="white", label=label
        )
    normal = np.log2([float(held.smallest_normal), float(held.max)])
    ax.axvspan(
        *normal - shift,
        color="tab:green",
        alpha=0.1,
        zorder=0,
        label=f"normal range at a loss scale of {_power(scale)}",
    )
    if scale != 1:
        ax.axvspan(*normal, color="black", alpha=0.1, zorder=0, label="normal range without a loss scale")
    ax.set_yscale("log")
    ax.set_ylim(top=60 * shares[1:-1].max(initial=0.1))
    ax.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:.0f}}}$")
    ax.set(xlabel="magnitude of the true gradient", ylabel="share of the entries")
    rest = f"{_percent(shares[0])} are zero" + (f", {_percent(shares[-1])} Inf or NaN" if shares[-1] else "")
    ax.set_title(f"{total:,} gradient entries and {held.dtype}; {rest}", fontsize="medium")
    ax.legend(loc="upper left", fontsize="small", ncols=2)
    return ax


def _fates(held: Any) -> list[tuple[str, str, float, float]]:
    """What becomes of a scaled gradient with an exponent in [first, last): (words, color, first, last)."""
    # Half the smallest number still rounds up to it (but for the tie itself).
    lost, subnormal = np.log2(float(held.smallest_subnormal)) - 1, np.log2(float(held.smallest_normal))
    top = float(held.maxexp)
    return [
        ("rounds to zero", "tab:red", -np.inf, lost),
        ("subnormal, loses bits", "tab:orange", lost, subnormal),
        ("normal", "tab:green", subnormal, top),
        ("overflows", "tab:purple", top, np.inf),
    ]


def exponent_counts(grads: Any) -> np.ndarray:
    """i64[256]: how many entries have each fp32 exponent: [0] zeros, [1..254] 2^-126 .. 2^127, [255] Inf and NaN."""
    leaves = gradient_leaves(grads)
    if not any(np.size(leaf) for leaf in leaves):
        raise ValueError(
            "grads holds no gradient: give it the tree that jax.grad or optax_fp16.value_and_grad returned."
        )
    counts = jax.device_get([_counted(jnp.asarray(leaf)) for leaf in leaves])
    return np.asarray(counts).sum(axis=0, dtype=np.int64)


@jax.jit
def _counted(leaf: jax.Array) -> jax.Array:
    wide = widened(leaf)
    parts = jnp.stack([wide.real, wide.imag]) if jnp.iscomplexobj(wide) else wide
    bits = jax.lax.bitcast_convert_type(parts.astype(jnp.float32), jnp.int32)
    return jnp.bincount(((bits >> 23) & 0xFF).reshape(-1), length=256)


def _new_axes() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "optax_fp16.plot draws with matplotlib, which isn't installed: pip install 'optax_fp16[plot]', or matplotlib."
        ) from error
    return Figure(figsize=(9, 4.5), layout="constrained").subplots()


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _power(scale: float) -> str:
    exponent = np.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent == int(exponent) else f"{scale:g}"
