"""An Adam under loss scaling, clipping and skipping."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16
from training.arguments import DYNAMIC


def warmup_then_linear(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Rises linearly to `peak` in `warmup_steps`, the first step not being 0, and falls to 0 at `total_steps`."""

    def schedule(count: jax.Array) -> jax.Array:
        done = jnp.asarray(count, jnp.float32)
        rising = (done + 1) / max(1, warmup_steps)
        falling = (total_steps - done) / max(1, total_steps - warmup_steps)
        return jnp.float32(peak) * jnp.clip(jnp.minimum(rising, falling), 0, 1)

    return schedule


def schedule_of(args: argparse.Namespace) -> optax.Schedule:
    return warmup_then_linear(args.learning_rate, round(args.warmup * args.steps), args.steps)


def decayed(params: Any) -> Any:
    """True for the leaves that weight decay is for: neither a bias nor a LayerNorm's scale."""

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        name = str(getattr(path[-1], "key", path[-1]))
        return not name.endswith("bias") and name != "scale"

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def optimizer(
    args: argparse.Namespace,
    axis_name: str,
    *,
    adam: Callable[..., optax.GradientTransformation] = optax.adamw,
    half_params: bool = False,
) -> optax.GradientTransformation:
    """What `args` asks for, around an `adam`. A skipped step doesn't move the schedule: it counts inside the guard."""
    if args.loss_scale == DYNAMIC:
        scale = fp16.dynamic_loss_scale(args.init_scale, growth_interval=args.growth_interval, axis_name=axis_name)
    else:
        scale = fp16.static_loss_scale(args.loss_scale, axis_name=axis_name)
    return fp16.mixed_precision(
        adam(schedule_of(args), eps=1e-6, weight_decay=args.weight_decay, mask=decayed),
        max_norm=args.max_grad_norm or None,
        loss_scale=scale,
        half_params=half_params,
        axis_name=axis_name,
    )
