"""The table of transforms: one row for each that is public, and for each way of putting them together."""

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16
from optax_fp16.optimizers import bert_adam


def scale():
    return fp16.dynamic_loss_scale(8.0, growth_interval=2)


def adam():
    return optax.adamw(0.1, weight_decay=0.1)


TRANSFORMS = {
    "static_loss_scale": fp16.static_loss_scale(8.0),
    "dynamic_loss_scale": scale(),
    "dynamic_loss_scale with underflow": fp16.dynamic_loss_scale(8.0, growth_interval=2, underflow="per_leaf"),
    "clip_by_global_norm_fp32": fp16.clip_by_global_norm_fp32(1.0),
    "skip_if_nonfinite": fp16.skip_if_nonfinite(adam()),
    "master_weights": fp16.master_weights(adam()),
    "master_weights with remainders": fp16.master_weights(adam(), remainder=True),
    "mixed_precision": fp16.mixed_precision(adam(), max_norm=1.0, loss_scale=scale()),
    "mixed_precision with half_params": fp16.mixed_precision(adam(), loss_scale=scale(), half_params=True),
    "links": optax.chain(scale(), fp16.clip_by_global_norm_fp32(1.0), fp16.skip_if_nonfinite(adam())),
    "nested": optax.chain(scale(), fp16.skip_if_nonfinite(optax.chain(fp16.clip_by_global_norm_fp32(1.0), adam()))),
    "bert_adam": bert_adam(0.1),
}

# Those that never let a gradient that isn't finite through to the parameters.
GUARDED = ("skip_if_nonfinite", "mixed_precision", "mixed_precision with half_params", "links", "nested")

PARAMS = {
    "half": jnp.array([0.5, -1.0, 2.0], jnp.float16),
    "brain": jnp.array([0.25, 3.0, -1.5], jnp.bfloat16),
    "full": jnp.array([1.0, 0.1, -0.3], jnp.float32),
}


def gradients(seed=0, dtype=None):
    """Gradients for PARAMS in their own dtypes, or all in one."""
    keys = dict(zip(PARAMS, jax.random.split(jax.random.key(seed), len(PARAMS)), strict=True))
    return {
        name: jax.random.normal(keys[name], (3,), jnp.float32).astype(dtype or p.dtype) for name, p in PARAMS.items()
    }


def with_an_inf(grads, bad=jnp.inf):
    return grads | {"half": grads["half"].at[1].set(bad)}


def kinds(tree):
    """Structure, and each leaf's shape, dtype and weakness of type."""
    return jax.tree.structure(tree), [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)]


def bits(tree):
    """The leaves as bytes: NaN equals NaN, and 0 differs from -0."""

    def raw(leaf):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.asarray(leaf)
        return str(leaf.dtype), jax.device_get(leaf).tobytes()

    return [raw(leaf) for leaf in jax.tree.leaves(tree)]
