"""The smallest whole training run: fp32, fp16 by hand, and fp16 with optax_fp16, side by side.

python examples/quickstart.py
python examples/quickstart.py --picture quickstart.png      (needs matplotlib)
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16


def init(key):
    shapes = {"hidden": (16, 128), "out": (128, 1)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def loss_fn(params, x, y, dtype):
    """The mean squared error, in fp32, of a network that computes in dtype; y is small, and so are the gradients."""
    hidden = jnp.tanh(x.astype(dtype) @ params["hidden"].astype(dtype))
    prediction = (hidden @ params["out"].astype(dtype)).astype(jnp.float32)
    return jnp.mean((1e-3 * prediction - y) ** 2)


def train(tx, dtype, steps):
    """The losses of a run. Only `tx` and `dtype` differ from run to run."""

    @jax.jit
    def step(params, opt_state, key):
        x = jax.random.normal(key, (512, 16))
        y = 1e-3 * jnp.sin(x[:, :1] + x[:, 1:2])
        loss, grads = fp16.value_and_grad(loss_fn, opt_state)(params, x, y, dtype)
        params, opt_state = fp16.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    params, losses = init(jax.random.key(0)), []
    opt_state = tx.init(params)
    for key in jax.random.split(jax.random.key(1), steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(loss)
    return jax.device_get(losses), fp16.metrics_of(opt_state)


def fail(words):
    print(f"error: {words}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = fail
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", metavar="FILE", help="draw the losses into this file")
    args = parser.parse_args()
    if args.steps < 1:
        fail(f"--steps is {args.steps}; give 1 or more")
    try:
        draw(args.picture, compare(args.steps))
    except (ImportError, OSError) as error:
        fail(f"can't draw {args.picture}: {error}; install matplotlib and give a path that can be written")


def compare(steps):
    """{name: losses} of the three runs."""
    runs = {
        "fp32": (jnp.float32, 1.0),
        "fp16, no loss scale": (jnp.float16, 1.0),
        "fp16, optax_fp16": (jnp.float16, fp16.dynamic_loss_scale(growth_interval=100)),
    }
    losses = {}
    for name, (dtype, loss_scale) in runs.items():
        tx = fp16.mixed_precision(optax.adam(3e-3), max_norm=1.0, loss_scale=loss_scale)
        losses[name], metrics = train(tx, dtype, steps)
        mean = sum(losses[name][-20:]) / len(losses[name][-20:])
        print(f"{name:20} loss {mean:.2e}, loss scale {metrics['loss_scale']:.0f}, {metrics['skipped_total']} skipped")
    return losses


def draw(path, losses):
    if path is None:
        return
    from matplotlib.figure import Figure

    ax = Figure(figsize=(8, 4), layout="constrained").subplots()
    for (name, line), width, color in zip(losses.items(), (5, 1, 1), ("lightgray", "tab:red", "tab:blue"), strict=True):
        ax.plot(line, label=name, linewidth=width, color=color)
    ax.set(yscale="log", xlabel="step", ylabel="loss", title="The same network in fp32 and in fp16")
    ax.legend()
    ax.figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
