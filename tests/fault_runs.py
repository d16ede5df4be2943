"""Training of a small fp16 model on four devices, into whose gradients faults are put at random places."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from tests.plain_rule import PlainRule

DEVICES, MICRO_BATCHES, FAULTS_A_STEP = 4, 2, 3
KINDS = {"none": 0.0, "inf": np.inf, "-inf": -np.inf, "nan": np.nan, "fp16 max": 65504.0, "subnormal": 2.0**-24}
VALUES = np.array(list(KINDS.values()), np.float32)
# Short intervals and near bounds, so that the scale goes all the way up and down many times.
RULE: dict[str, Any] = {
    "scale": 2.0**10, "growth_interval": 5, "tolerance": "0.05", "hysteresis": 2, "min_scale": 2.0**4, "max_scale": 2.0**14
}  # fmt: skip
SHAPES = {"dense": {"kernel": (6, 8), "bias": (8,)}, "gain": (8,), "head": (8, 2)}
SIZE = 48 + 8 + 8 + 16


class Faults(NamedTuple):
    """Where each step's faults are, every field i32[steps, FAULTS_A_STEP]."""

    kind: np.ndarray  # an index into KINDS
    entry: np.ndarray  # among all entries of all leaves
    device: np.ndarray
    micro_batch: np.ndarray


class Record(NamedTuple):
    """What a step did, as every device saw it: each field has the shape [devices, steps]."""

    came_finite: jax.Array  # whether every gradient of every device was finite, before anything was done to it
    params_finite: jax.Array
    state_finite: jax.Array  # masters and moments; the guard's grad_norm is Inf or NaN after a bad step, and says so
    devices_alike: jax.Array  # bit for bit, all of the parameters and of the optimizer's state
    untouched: jax.Array  # parameters, masters and moments are bit-identical to those before
    scale: Any  # DynamicLossScaleState
    skipped_total: jax.Array
    skipped_in_a_row: jax.Array
    applied_total: jax.Array
    grads_finite: jax.Array
    digest: jax.Array  # u32: of every bit of the parameters and the state


def random_faults(seed: int, steps: int) -> Faults:
    """Calm and storm in turns of 64 steps: in a storm two thirds of the steps have one to three faults, in a calm 2 %."""
    rng = np.random.default_rng(seed)
    size = (steps, FAULTS_A_STEP)
    storm = (np.arange(steps) // 64 % 2).astype(bool)
    chance = np.where(storm, 0.3, 0.007)[:, None]
    kind = np.where(rng.random(size) < chance, rng.integers(1, len(KINDS), size), 0)
    return Faults(
        *(a.astype(np.int32) for a in (kind, rng.integers(0, SIZE, size), rng.integers(0, DEVICES, size))),
        micro_batch=rng.integers(0, MICRO_BATCHES, size).astype(np.int32),
    )


def initial_params(seed: int) -> Any:
    """fp16 parameters, but for a gain in fp32."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda shape: rng.normal(0, 0.4, shape).astype(np.float16), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    return jax.tree.map(jnp.asarray, params | {"gain": np.ones(SHAPES["gain"], np.float32)})


def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["dense"]["kernel"] + params["dense"]["bias"][None])
    hidden = hidden * params["gain"].astype(jnp.float16)[None]
    return jnp.mean((hidden @ params["head"] - targets).astype(jnp.float32) ** 2)


def with_faults(grads: Any, faults: Faults) -> Any:
    """This device's gradients, each leaf stacked over the micro-batches, with this step's faults in them."""
    here = (faults.device == jax.lax.axis_index("data")) & (faults.kind > 0)
    nowhere = MICRO_BATCHES * SIZE
    where = jnp.where(here, faults.micro_batch * SIZE + faults.entry, nowhere)
    put = jnp.zeros(nowhere, jnp.float32).at[where].set(jnp.asarray(VALUES)[faults.kind], mode="drop")
    put = put.reshape(MICRO_BATCHES, SIZE)
    leaves, treedef = jax.tree.flatten(grads)
    offset, broken = 0, []
    for leaf in leaves:
        size = leaf.size // MICRO_BATCHES
        values = put[:, offset : offset + size].reshape(leaf.shape)
        broken.append(jnp.where(values == 0, leaf, values.astype(leaf.dtype)))
        offset += size
    return jax.tree.unflatten(treedef, broken)


def bits_of(tree: Any) -> jax.Array:
    """u32[n]: every bit of every leaf."""

    def words(leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        return jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32).ravel()

    return jnp.concatenate([words(leaf) for leaf in jax.tree.leaves(tree)])


def all_finite(tree: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def optimizer() -> Any:
    rule = PlainRule(**RULE)
    return fp16.mixed_precision(
        optax.adamw(optax.cosine_decay_schedule(3e-3, 20000), weight_decay=1e-3),
        max_norm=1.0,
        loss_scale=fp16.dynamic_loss_scale(rule.scale, **rule.knobs()),
        half_params=True,
        axis_name="data",
    )


def train_step(tx: Any, carry: Any, faults: Faults, key: jax.Array) -> tuple[Any, Record]:
    params, state = carry
    key = jax.random.fold_in(key, jax.lax.axis_index("data"))
    inputs = jax.random.normal(key, (MICRO_BATCHES, 3, 6), jnp.float16)
    targets = jnp.stack([jnp.sin(inputs.sum(-1)), jnp.cos(inputs.sum(-1))], -1)
    grads_of = jax.vmap(lambda x, y: fp16.value_and_grad(loss_of, state)(params, x, y)[1])
    grads = with_faults(grads_of(inputs, targets), faults)
    finite = all_finite(grads)
    # One vector travels: small collectives are what a step costs here.
    total, unravel = ravel_pytree(jax.tree.map(lambda g: g.astype(jnp.float32).mean(0), grads))
    new_params, new_state = fp16.apply_gradients(tx, unravel(fp16.pmean_gradients(total, "data")), state, params)
    guard = new_state.guard_state
    bits = bits_of((new_params, new_state))
    everywhere = jax.lax.all_gather(jnp.append(bits, finite.astype(jnp.uint32)), "data")
    kept = (params, state.guard_state.inner_state)
    record = Record(
        came_finite=(everywhere[:, -1] == 1).all(),
        params_finite=all_finite(new_params),
        state_finite=all_finite((guard.inner_state, new_state.scale_state)),
        devices_alike=(everywhere[:, :-1] == bits[None]).all(),
        untouched=(bits_of(kept) == bits_of((new_params, guard.inner_state))).all(),
        scale=new_state.scale_state,
        **{
            name: getattr(guard, name)
            for name in ("skipped_total", "skipped_in_a_row", "applied_total", "grads_finite")
        },
        digest=(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32),
    )
    return (new_params, new_state), record


def run(seed: int, steps: int, layout: str, chunk: int = 500) -> tuple[Any, Record, Faults]:
    """Trains; gives the parameters on each device, the record of every step, and the faults that were put in."""
    tx, faults, params = optimizer(), random_faults(seed, steps), initial_params(seed)
    keys = jax.random.split(jax.random.key(seed), steps)

    def scan_steps(carry: Any, faults: Faults, keys: jax.Array) -> tuple[Any, Record]:
        return jax.lax.scan(lambda carry, xs: train_step(tx, carry, *xs), carry, (faults, keys))

    def on_each_device(carry: Any, faults: Faults, keys: jax.Array) -> Any:
        out = scan_steps(jax.tree.map(lambda leaf: leaf[0], carry), faults, keys)
        return jax.tree.map(lambda leaf: leaf[None], out)

    if layout == "pmap":
        compiled = jax.pmap(scan_steps, "data", in_axes=(0, None, None), devices=jax.devices()[:DEVICES])
    else:
        mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))
        mapped = jax.shard_map(
            on_each_device, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False
        )
        compiled = jax.jit(mapped)
    carry = jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), (params, tx.init(params)))
    records = []
    for start in range(0, steps, chunk):
        part = slice(start, start + chunk)
        carry, record = compiled(carry, Faults(*(field[part] for field in faults)), keys[part])
        records.append(jax.device_get(record))
    return jax.device_get(carry[0]), jax.tree.map(lambda *parts: np.concatenate(parts, 1), *records), faults


def check(record: Record, faults: Faults) -> None:
    """Every promise about every step, against the faults and the rule in plain Python."""
    for field in ("params_finite", "state_finite", "devices_alike"):
        assert getattr(record, field).all(), f"{field} fails at step {np.argmin(getattr(record, field).all(0))}"
    jax.tree.map(lambda field: np.testing.assert_array_equal(field, np.broadcast_to(field[:1], field.shape)), record)
    once = jax.tree.map(lambda field: field[0], record)
    injected = ~np.isfinite(VALUES[faults.kind]).all(1)
    assert not (once.came_finite & injected).any()
    np.testing.assert_array_equal(once.grads_finite, once.came_finite)
    np.testing.assert_array_equal(once.untouched, ~once.came_finite)
    steps = np.arange(1, len(injected) + 1)
    np.testing.assert_array_equal(once.applied_total, np.cumsum(once.came_finite))
    np.testing.assert_array_equal(once.applied_total + once.skipped_total, steps)
    rule, in_a_row = PlainRule(**RULE), 0
    for step, finite in enumerate(once.came_finite):
        rule.step(bool(finite))
        in_a_row = 0 if finite else in_a_row + 1
        expected = rule.fields()
        moved = {name: getattr(once.scale, name)[step] for name in expected}
        assert moved == expected, f"after step {step}"
        assert once.skipped_in_a_row[step] == in_a_row
    assert (once.scale.loss_scale >= RULE["min_scale"]).all()
    assert (once.scale.loss_scale <= RULE["max_scale"]).all()


def check_that_it_happened(record: Record, faults: Faults) -> None:
    """The run went through everything that it is for, or its checks mean little."""
    scales = record.scale.loss_scale[0]
    assert scales.min() == RULE["min_scale"]
    assert scales.max() == RULE["max_scale"]
    assert record.scale.overflows_at_floor.max() > 0
    assert set(np.unique(faults.kind)) == set(range(len(KINDS)))
    harmless = np.isfinite(VALUES[faults.kind]).all(1) & (faults.kind > 0).any(1)
    assert record.came_finite[0][harmless].any()
    assert not record.came_finite[0].all()
