"""An overflow provoked and survived, printed step by step.

python examples/overflow.py
python examples/overflow.py --picture overflow.png      (needs matplotlib)

The loss scale starts far too high, so the first steps overflow until it fits. Then the batch of one step has values that fp16
can't multiply. Both times nothing moves but the scale and the counters.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import optax_fp16 as fp16

STEPS, POISONED = 30, 18


def loss_fn(params, x, y):
    prediction = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16)) @ params["v"].astype(jnp.float16)
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


tx = fp16.mixed_precision(
    optax.adam(0.03), max_norm=1.0, loss_scale=fp16.dynamic_loss_scale(2.0**24, growth_interval=8)
)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = fp16.value_and_grad(loss_fn, opt_state)(params, x, y)
    new_params, opt_state = fp16.apply_gradients(tx, grads, opt_state, params)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, new_params, params))
    return new_params, opt_state, loss, moved, grads


def train():
    """The rows of the table: (step, loss, scale, norm, moved, skipped)."""
    params = {"w": 0.1 * jax.random.normal(jax.random.key(0), (8, 32)), "v": 0.1 * jnp.ones((32, 1))}
    opt_state = tx.init(params)
    rows = []
    for number, key in enumerate(jax.random.split(jax.random.key(1), STEPS), start=1):
        x = jax.random.normal(key, (256, 8))
        y = jnp.tanh(x[:, :1] + x[:, 1:2])
        x = x.at[7, 3].set(1e6) if number == POISONED else x
        scale = float(fp16.loss_scale_of(opt_state))
        params, opt_state, loss, moved, grads = step(params, opt_state, x, y)
        metrics = fp16.metrics_of(opt_state)
        rows.append(
            (number, float(loss), scale, float(metrics["grad_norm"]), float(moved), int(metrics["skipped_total"]))
        )
        say(rows[-1], bool(metrics["grads_finite"]))
        if number == POISONED:
            print("      the batch of this step holds 1e6, which is Inf in fp16:")
            print("      " + fp16.nonfinite_report(grads).short().replace("\n", "\n      "))
    return rows


def say(row, finite):
    number, loss, scale, norm, moved, skipped = row
    what = "applied" if finite else f"SKIPPED, {skipped} in all"
    print(f"{number:4}  loss {loss:6.4f}  scale {scale:10.0f}  norm {norm:6.4f}  params moved by {moved:6.4f}  {what}")


def draw(path, rows):
    from matplotlib.figure import Figure

    numbers, losses, scales, norms, _, _ = zip(*rows, strict=True)
    upper, lower = Figure(figsize=(6.5, 4.2), layout="constrained").subplots(2, 1, sharex=True)
    upper.plot(numbers, losses, marker=".")
    upper.set(ylabel="loss", title="Overflows: the scale falls until it fits, then one poisoned batch")
    lower.step(numbers, scales, where="mid", color="tab:green")
    lower.set_yscale("log", base=2)
    lower.set(ylabel="loss scale", xlabel="step (red: skipped)")
    for number, norm in zip(numbers, norms, strict=True):
        for ax in (upper, lower) if norm == float("inf") else ():
            ax.axvline(number, color="tab:red", alpha=0.5)
    upper.figure.savefig(path, dpi=150, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--picture", metavar="FILE", help="draw loss and loss scale into this file")
    args = parser.parse_args()
    rows = train()
    try:
        if args.picture:
            draw(args.picture, rows)
    except (ImportError, OSError) as error:
        parser.error(f"can't draw {args.picture}: {error}; install matplotlib and give a path that can be written")


if __name__ == "__main__":
    main()
