"""The smallest whole training run: fp32, fp16 without a loss scale, and fp16 with one, side by side.

python examples/quickstart.py
python examples/quickstart.py --picture quickstart.png      (needs matplotlib)
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16

RUNS = {
    "fp32": (jnp.float32, 1.0),
    "fp16, no loss scale": (jnp.float16, 1.0),
    "fp16, optax_fp16": (jnp.float16, fp16.dynamic_loss_scale(growth_interval=100)),
}


def loss_fn(params, x, y, dtype):
    """The mean squared error, in fp32, of a network that computes in dtype; y is small, and so are the gradients."""
    hidden = jnp.tanh(x.astype(dtype) @ params["hidden"].astype(dtype))
    prediction = (hidden @ params["out"].astype(dtype)).astype(jnp.float32)
    return jnp.mean((1e-3 * prediction - y) ** 2)


def train(dtype, loss_scale, steps):
    """The losses of a run, and its metrics. Only `dtype` and `loss_scale` differ from run to run."""
    tx = fp16.mixed_precision(optax.adam(3e-3), max_norm=1.0, loss_scale=loss_scale)

    @jax.jit
    def step(params, opt_state, key):
        x = jax.random.normal(key, (512, 16))
        y = 1e-3 * jnp.sin(x[:, :1] + x[:, 1:2])
        loss, grads = fp16.value_and_grad(loss_fn, opt_state)(params, x, y, dtype)
        params, opt_state = fp16.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    hidden, out, batches = jax.random.split(jax.random.key(0), 3)
    params = {"hidden": jax.random.normal(hidden, (16, 128)) / 4, "out": jax.random.normal(out, (128, 1)) / 11}
    opt_state, losses = tx.init(params), []
    for key in jax.random.split(batches, steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(loss)
    return jax.device_get(losses), fp16.metrics_of(opt_state)


def draw(path, losses):
    from matplotlib.figure import Figure

    ax = Figure(figsize=(6.5, 3.5), layout="constrained").subplots()
    for (name, line), width, color in zip(losses.items(), (5, 1, 1), ("lightgray", "tab:red", "tab:blue"), strict=True):
        ax.plot(line, label=name, linewidth=width, color=color)
    ax.set(yscale="log", xlabel="step", ylabel="loss", title="The same network in fp32 and in fp16")
    ax.legend()
    ax.figure.savefig(path, dpi=150, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", metavar="FILE", help="draw the losses into this file")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; give 1 or more")
    losses = {}
    for name, (dtype, loss_scale) in RUNS.items():
        losses[name], metrics = train(dtype, loss_scale, args.steps)
        last = losses[name][-20:]
        mean, scale, skipped = sum(last) / len(last), metrics["loss_scale"], metrics["skipped_total"]
        print(f"{name:20} loss {mean:.2e}, loss scale {scale:.0f}, {skipped} skipped")
    try:
        if args.picture:
            draw(args.picture, losses)
    except (ImportError, OSError) as error:
        parser.error(f"can't draw {args.picture}: {error}; install matplotlib and give a path that can be written")


if __name__ == "__main__":
    main()
