"""The distributed optimizer: the same step as without it, with 1/N of the state on each device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from bert import SIZES, BertConfig, BertForPreTraining
from optax_fp16 import _collectives
from optax_fp16._elementwise import whole_array_computations
from optax_fp16._layout import split_of
from tests.meshes import WAYS, mesh

# On four devices: along the first dimension, after each row was cut in two, padded along the second, padded, whole.
SHAPES = {"even": (8, 3), "cut": (6, 4), "odd": (5, 3), "bias": (3,), "scalar": ()}


def parameters(dtype=np.float32, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def recipe(**knobs):
    knobs = {"max_norm": 0.5, "loss_scale": fp16.dynamic_loss_scale(8.0, growth_interval=3), **knobs}
    return fp16.mixed_precision(optax.adamw(0.05, weight_decay=0.1), **knobs)


def trained(way, tx, params, devices, steps, grads_at):
    """Parameters after steps in which device i has the gradients `grads_at(params, i, step)`, as numpy, and the last state."""

    def run(params, index):
        def step(carry, number):
            params, state = carry
            own = jax.lax.pcast(params, "data", to="varying") if way == "typed" else params
            return fp16.apply_gradients(tx, grads_at(own, index[0], number), state, params), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))
        return params, fp16.metrics_of(state)

    index = jnp.arange(devices)
    if way == "pmap":
        spread = jax.pmap(run, "data", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:devices])
        return jax.tree.map(np.asarray, spread(params, index[:, None]))
    spread = jax.shard_map(run, mesh=mesh(devices), in_specs=(P(), P("data")), out_specs=P(), check_vma=way == "typed")
    return jax.tree.map(np.asarray, jax.jit(spread)(params, index))


def pull(params, index, step):
    """Gradients of a sum of squares around a target that differs between the devices."""
    away = (index + 1).astype(jnp.float32) * jnp.float32(0.3)
    return jax.tree.map(lambda leaf: 8 * (leaf.astype(jnp.float32) - away), params)


def alone(tx, params, devices, steps, grads_at):
    """The same on one device, from the mean gradients."""

    def step(carry, number):
        params, state = carry
        each = [grads_at(params, jnp.int32(index), number) for index in range(devices)]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / jnp.float32(devices), *each)
        return fp16.apply_gradients(tx, mean, state, params), None

    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0])
    params, state = run(params)
    return jax.tree.map(np.asarray, (params, fp16.metrics_of(state)))


@pytest.mark.parametrize(
    ("shape", "count", "split"),
    [
        ((8, 3), 4, (0, 8, 2, 1)),
        ((30522, 768), 4, (0, 61044, 15261, 2)),  # BERT's words don't divide; in halves they do
        ((2, 6), 4, (0, 4, 1, 2)),
        ((6, 5, 8), 4, (2, 8, 2, 1)),
        ((5, 16, 2), 4, (0, 40, 10, 8)),  # cut in 4, 20 rows would give each device 5, as many as there were
        ((5, 12), 4, (1, 12, 3, 1)),
        ((5, 3), 4, (1, 3, 1, 1)),  # 5 entries a device; padding the first dimension would make it 6
        ((3,), 4, (0, 3, 1, 1)),
        ((2, 3), 8, (1, 3, 1, 1)),
        ((), 4, (None, 0, 0, 1)),
        ((1, 1), 4, (None, 0, 0, 1)),
        ((0, 4), 4, (None, 0, 0, 1)),
        ((2, 0), 4, (None, 0, 0, 1)),
        ((8, 3), 1, (None, 0, 0, 1)),
        ((8, 4), 1, (None, 0, 0, 1)),
    ],
)
def test_an_array_is_split_where_least_is_left_on_a_device(shape, count, split):
    assert split_of(shape, count) == split


def test_a_split_in_place_leaves_whole_what_does_not_divide():
    assert split_of((5, 3), 4, in_place=True) == (None, 0, 0, 1)
    assert split_of((6, 8), 4, in_place=True) == (1, 8, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_are_those_of_one_device(way):
    tx = fp16.distributed(recipe(), "data")
    params, metrics = trained(way, tx, parameters(), 4, 50, pull)
    right, right_metrics = alone(recipe(), parameters(), 4, 50, pull)
    for name in right:
        np.testing.assert_allclose(params[name], right[name], rtol=1e-6, atol=1e-6)
    for name in right_metrics:
        np.testing.assert_allclose(metrics[name], right_metrics[name], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_links_in_the_right_order_inside_take_the_steps_of_one_device(way):
    # Clip and skip see the mean gradients, wherever their parts are, and needn't be told.
    links = optax.chain(
        fp16.dynamic_loss_scale(8.0, growth_interval=3),
        fp16.skip_if_nonfinite(optax.chain(fp16.clip_by_global_norm_fp32(0.5), optax.adam(0.05))),
    )
    params, metrics = trained(way, fp16.distributed(links, "data"), parameters(), 4, 5, pull)
    right, right_metrics = alone(links, parameters(), 4, 5, pull)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), params, right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), metrics, right_metrics)
    assert metrics["grad_norm"] > 0.5  # so the clip had work to do


REPLICATED = P()


def stepper(tx, params, grid, specs=REPLICATED, check_vma=True):
    """`step(params, state, grads) -> (params, state)`, where every device of "data" has its own gradients along a first axis."""
    state_specs = tx.state_specs(params, grid)
    own = jax.tree.map(lambda spec: P("data", *spec), specs, is_leaf=lambda node: isinstance(node, P))

    def step(params, state, grads):
        return tx.apply(jax.tree.map(lambda leaf: leaf[0], grads), state, params)

    spread = jax.shard_map(
        step, mesh=grid, in_specs=(specs, state_specs, own), out_specs=(specs, state_specs), check_vma=check_vma
    )
    return jax.jit(spread)


def drawn(devices, shapes=SHAPES, seed=1):
    """Gradients that are whole numbers, so that their sums are exact in any order and in half precision."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-8, 9, size=(devices, *shape)).astype(np.float32) for name, shape in shapes.items()}


def mean(grads):
    return {name: leaf.mean(axis=0) for name, leaf in grads.items()}


def test_half_parameters_with_masters_take_the_same_steps_to_the_last_bit():
    params, grads = parameters(jnp.float16), drawn(4)
    plain = recipe(half_params=True)
    tx = fp16.distributed(plain, "data", transport=jnp.float16)
    state = tx.split_state(tx.init(params), params, mesh(4))
    step = stepper(tx, params, mesh(4))
    new, right, right_state = params, params, plain.init(params)
    for _ in range(3):
        new, state = step(new, state, grads)
        right, right_state = jax.jit(plain.apply)(mean(grads), right_state, right)
    whole = tx.whole_state(state, params, mesh(4))
    jax.tree.map(np.testing.assert_array_equal, new, right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, right_state)


def test_update_gives_the_updates_that_apply_applies():
    params, grads = parameters(jnp.float16), drawn(4)
    params["bias"] = params["bias"].astype(jnp.float32)
    tx = fp16.distributed(recipe(half_params=True), "data")
    state = tx.split_state(tx.init(params), params, mesh(4))
    specs = tx.state_specs(params, mesh(4))

    def both(params, state, grads):
        own = jax.tree.map(lambda leaf: leaf[0], grads)
        updates, updated = tx.update(own, state, params)
        applied, _ = tx.apply(own, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), applied, updates, updated

    spread = jax.shard_map(both, mesh=mesh(4), in_specs=(P(), specs, P("data")), out_specs=(P(), P(), P(), specs))
    updated, applied, updates, new_state = jax.jit(spread)(params, state, grads)
    jax.tree.map(np.testing.assert_array_equal, updated, applied)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {np.dtype(np.float32)}
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(new_state)] == [x.dtype for x in jax.tree.leaves(state)]


def test_updates_of_fp32_parameters_beside_masters_are_exact_and_those_of_halves_travel_as_halves():
    shapes = {"half": (8, 3), "full": (4, 2)}
    params, grads = parameters(shapes=shapes), drawn(4, shapes)
    params["half"] = params["half"].astype(jnp.float16)
    plain = fp16.master_weights(optax.sgd(0.1, momentum=0.9))
    tx = fp16.distributed(plain, "data")

    def step(params, grads):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), tx.init(params), params)[0]

    spread = jax.jit(jax.shard_map(step, mesh=mesh(4), in_specs=(P(), P("data")), out_specs=P()))
    right, _ = jax.jit(plain.update)(mean(grads), plain.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, spread(params, grads), right)
    program = str(jax.make_jaxpr(spread)(params, grads))
    # Before JAX 0.10 a sum gathers.
    travelling = re.findall(r":(f\d+)\[[^ ]*\] = (?:all_gather|psum)[a-z_]*\[", program)
    assert sorted(travelling) == ["f16", "f32"]


def test_leaves_that_are_no_gradients_come_back_untouched():
    params = {"w": jnp.ones(8), "n": jnp.arange(4), "key": jax.random.key(0)}
    tx = fp16.distributed(optax.masked(optax.sgd(0.5), {"w": True, "n": False, "key": False}), "data")

    def step(params):
        return tx.update(params, tx.init(params), params)[0]

    updates = jax.jit(jax.shard_map(step, mesh=mesh(4), in_specs=P(), out_specs=P()))(params)
    np.testing.assert_array_equal(updates["w"], np.full(8, -0.5))
    np.testing.assert_array_equal(updates["n"], params["n"])
    assert updates["key"] == params["key"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_inf_on_one_device_keeps_every_bit_on_all(check_vma):
    params, grads = parameters(), drawn(4)
    tx = fp16.distributed(recipe(axis_name="data"), "data")  # naming the axis inside too changes nothing
    state = tx.split_state(tx.init(params), params, mesh(4))
    step = stepper(tx, params, mesh(4), check_vma=check_vma)
    params, state = step(params, state, grads)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(mean(grads)))) / 8
    np.testing.assert_allclose(fp16.metrics_of(state)["grad_norm"], norm, rtol=1e-6)
    grads["bias"][2, 1] = np.inf
    stayed, skipped = step(params, state, grads)
    jax.tree.map(np.testing.assert_array_equal, stayed, params)
    jax.tree.map(np.testing.assert_array_equal, skipped.guard_state.inner_state, state.guard_state.inner_state)
    assert (int(skipped.guard_state.skipped_total), float(fp16.loss_scale_of(skipped))) == (1, 4.0)


def test_decay_masks_by_path_and_by_rank_go_on_working():
    params, grads = parameters(), drawn(4)
    by_path = optax.add_decayed_weights(0.5, mask={name: name == "bias" for name in SHAPES})
    by_rank = optax.add_decayed_weights(0.25, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    inner = optax.chain(by_path, by_rank, optax.sgd(0.1))
    tx = fp16.distributed(inner, "data")
    new, _ = stepper(tx, params, mesh(4))(params, tx.split_state(tx.init(params), params, mesh(4)), grads)
    for name, param in params.items():
        decay = 0.5 if name == "bias" else 0.25 if param.ndim > 1 else 0.0
        np.testing.assert_allclose(new[name], param - 0.1 * (mean(grads)[name] + decay * param), rtol=1e-6, atol=1e-7)


TP_SHAPES = {
    "columns": (4, 8),
    "cut": (3, 8),
    "deep": (6, 8, 3),
    "rows": (8, 3),
    "cut rows": (6, 8),
    "uneven": (6,),
    "norm": (4,),
}
TP_SPECS = {
    "columns": P(None, "model"),
    "cut": P(None, "model"),
    "deep": P(None, "model"),
    "rows": P("model"),
    "cut rows": P("model"),
    "uneven": P("model"),
    "norm": P(),
}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_it_goes_on_top_of_tensor_parallelism(check_vma):
    grid, params, grads = mesh(2, 2), parameters(shapes=TP_SHAPES), drawn(2, TP_SHAPES)
    plain = recipe()
    tx = fp16.distributed(plain, "data", param_specs=TP_SPECS)
    whole = tx.init(params)
    state = tx.split_state(whole, params, grid)
    jax.tree.map(np.testing.assert_array_equal, tx.whole_state(state, params, grid), whole)
    moments = optax.tree.get(state, "mu")
    assert {name: leaf.sharding.spec for name, leaf in moments.items()} == {
        "columns": P("data", "model"),
        "cut": P("data", "model"),
        "deep": P("data", "model"),
        "rows": P(("model", "data")),
        "cut rows": P(("model", "data")),
        "uneven": P(("model", "data")),
        "norm": P("data"),
    }
    step = stepper(tx, params, grid, TP_SPECS, check_vma)
    new, right, right_state = params, params, plain.init(params)
    for _ in range(2):
        new, state = step(new, state, grads)
        right, right_state = jax.jit(plain.apply)(mean(grads), right_state, right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), new, right)
    whole = tx.whole_state(state, params, grid)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), whole, right_state)


@pytest.mark.slow
def test_a_checkpoint_of_four_devices_goes_on_on_two_three_and_one(tmp_path):
    params, grads = parameters(), {name: leaf + 20 for name, leaf in drawn(12).items()}
    tx = fp16.distributed(fp16.skip_if_nonfinite(optax.adam(0.1)), "data")

    def run(params, whole, devices):
        """Two steps, each device with the mean of its share of the gradients."""
        own = {name: leaf.reshape(devices, -1, *leaf.shape[1:]).mean(axis=1) for name, leaf in grads.items()}
        step, state = stepper(tx, params, mesh(devices)), tx.split_state(whole, params, mesh(devices))
        for _ in range(2):
            params, state = step(params, state, own)
        return params, tx.whole_state(state, params, mesh(devices))

    middle = run(params, tx.init(params), 4)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "four", middle)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: (params, tx.init(params)))
        restored = checkpointer.restore(
            tmp_path / "four", jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        )
    jax.tree.map(np.testing.assert_array_equal, restored, middle)
    right = run(*middle, 4)
    for devices in (2, 3, 1):
        end = run(*jax.tree.map(jnp.asarray, restored), devices)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), end, right)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_the_state_of_bert_base_is_within_three_percent_of_its_share(devices):
    config = BertConfig(vocab_size=30522, **SIZES["base"])
    ids, positions = np.zeros((1, 128), np.int32), np.zeros((1, 20), np.int32)
    params = jax.eval_shape(BertForPreTraining(config).init, jax.random.key(0), ids, ids, ids, positions)["params"]
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float16), params)
    tx = fp16.distributed(recipe(half_params=True), "data")
    cost = tx.state_bytes(half, mesh(devices))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert abs(cost.whole - 12 * parameters) < 200  # two moments and a master, and some scalars
    assert cost.whole / devices <= cost.per_device <= 1.03 * cost.whole / devices
    assert cost.replicated < 200
    assert cost.per_device == tx.state_bytes(half, devices).per_device


def test_the_state_s_cost_is_the_arithmetic_on_its_shapes():
    tx = fp16.distributed(optax.adam(0.1), "data")
    # Entries on each of four devices: 6 + 6 + 5 + 1 and the scalar; of "odd" 5 and of "bias" 1 are padding.
    assert tx.state_bytes(parameters(), 4) == (2 * 4 * 67 + 4, 2 * 4 * 19 + 4, 2 * 4 * 6, 2 * 4 + 4)
    tx = fp16.distributed(optax.adam(0.1), "data", param_specs=TP_SPECS)
    # On each of two by two: 8 + 6 + 36 + 6 + 12 + 2 + 2; "uneven" is padded in both of its blocks.
    cost = tx.state_bytes(parameters(shapes=TP_SHAPES), mesh(2, 2))
    assert cost == (2 * 4 * 282 + 4, 2 * 4 * 72 + 4, 2 * 4 * 2, 4)


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: dict(enumerate(pair))])
def test_specs_in_a_pair_are_each_one_s_own(kind):
    params, specs = kind([jnp.ones((4, 8)), jnp.ones((8, 3))]), kind([P(None, "model"), P("model")])
    tx = fp16.distributed(optax.sgd(0.1, momentum=0.9), "data", param_specs=specs)
    trace = tx.state_specs(params, mesh(2, 2))[0].trace
    assert jax.tree.leaves(trace, is_leaf=lambda leaf: isinstance(leaf, P)) == [
        P("data", "model"),
        P(("model", "data")),
    ]


def numbered(tree):
    """The tree with every entry another number."""
    return jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), tree)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_state_comes_back_whole_from_a_mesh_of_either_kind(kind, devices):
    params, grid = parameters(shapes={**SHAPES, **TP_SHAPES}), mesh(devices, 2, kind=kind)
    tx = fp16.distributed(optax.adam(0.1), "data", param_specs={**dict.fromkeys(SHAPES, P()), **TP_SPECS})
    whole = numbered(tx.init(params))
    state = tx.split_state(whole, params, grid)
    back = tx.whole_state(state, params, grid)
    jax.tree.map(np.testing.assert_array_equal, back, whole)
    assert back[0].mu["even"] is state[0].mu["even"]  # it stays where it is
    again = tx.split_state(tx.whole_state(state, params, grid), params, grid)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(lambda state: tx.whole_state(state, params, grid))(state), whole
    )


def test_pmap_s_stacked_state_is_divided_and_put_together():
    params = parameters()
    tx = fp16.distributed(optax.adam(0.1), "data")
    whole = numbered(tx.init(params))
    moments = optax.tree.get(tx.split_state(whole, params, 4), "mu")
    shapes = {"even": (4, 2, 3), "cut": (4, 3, 2), "odd": (4, 5, 1), "bias": (4, 1), "scalar": (4,)}
    assert {name: leaf.shape for name, leaf in moments.items()} == shapes
    for devices in (1, 4):
        together = tx.whole_state(tx.split_state(whole, params, devices), params, devices)
        jax.tree.map(np.testing.assert_array_equal, together, whole)
    with pytest.raises(ValueError, match="devices must be a whole number of 1 or more"):
        tx.split_state(whole, params, 0)


def test_the_whole_state_is_that_of_the_inner_optimizer():
    params = parameters(jnp.float16)
    inner = recipe(half_params=True)
    tx = fp16.distributed(inner, "data")
    assert jax.tree.structure(tx.init(params)) == jax.tree.structure(inner.init(params))
    parts = optax.tree.map_params(tx, lambda leaf: 1, tx.init(params), transform_non_params=lambda leaf: 0)
    assert sum(jax.tree.leaves(parts)) == 3 * len(params)  # two moments and the masters


REDUCING = {
    "lamb": optax.lamb(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "behind our own": fp16.mixed_precision(optax.lamb(0.1)),
    "adafactor": optax.adafactor(0.1),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 5),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "agc": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", REDUCING)
def test_what_computes_over_whole_arrays_is_refused(name):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    tx = fp16.distributed(REDUCING[name], "data")
    with pytest.raises(ValueError, match=r"computes over whole arrays \((reduce_|random_bits|.*norm).*\)"):
        tx.init(params)


def circling(g):
    """A loop whose carry has a sum over the array only after its second round."""

    def body(_, carry):
        shown, _ = carry
        return carry[1], jnp.sum(g) * jnp.ones_like(shown)

    return jax.lax.fori_loop(0, 3, body, (jnp.zeros_like(g), jnp.zeros_like(g)))[0]


@jax.jit
def with_norm(g):
    return 2 * g, jnp.sum(g * g)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("cumsum", lambda g: jnp.cumsum(g, 0)),
        ("argmax", lambda g: g * jnp.argmax(g).astype(jnp.float32)),
        ("sort", lambda g: jnp.sort(g, 0)),
        ("dot_general", lambda g: g @ g),
        ("fft", lambda g: jnp.real(jnp.fft.fft(g))),
        ("cholesky", jnp.linalg.cholesky),
        ("random_bits", lambda g: g + jax.random.normal(jax.random.key(0), g.shape)),
        ("reduce_sum", circling),
        ("reduce_sum", lambda g: jax.lax.cond(jnp.float32(1) > 0, lambda: g, lambda: g / jnp.sum(g))),
        ("reduce_sum", lambda g: g * with_norm(g)[1]),
        ("reduce_max", lambda g: g / jnp.max(g)),
    ],
)
def test_whatever_mixes_entries_is_refused_by_its_name(name, function):
    inner = optax.stateless(lambda updates, params: jax.tree.map(function, updates))
    with pytest.raises(ValueError, match=rf"computes over whole arrays \(.*{name}.*\)"):
        fp16.distributed(inner, "data").init(jnp.eye(4))


def test_a_sum_over_devices_counts_where_it_goes_over_all_of_the_axes():
    def update(g, axis):
        return g * jax.lax.psum(jnp.sum(g), axis)

    def found(axis):
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        env = [("data", 2), ("model", 2)]
        return whole_array_computations(lambda g: update(g, axis), ("data",), shape, axis_env=env)

    assert found("model") == ["reduce_sum"]
    assert found("data") == found(("model", "data")) == []


def test_a_sum_that_no_update_depends_on_is_not_refused():
    inner = optax.stateless(lambda updates, params: with_norm(updates)[0])
    fp16.distributed(inner, "data").init(jnp.eye(4))


def test_what_works_entry_by_entry_is_not_refused():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    schedule = optax.piecewise_interpolate_schedule("linear", 1.0, {2: 0.5, 4: 0.5})
    for inner in (
        optax.adamw(schedule),
        optax.lion(0.1),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.chain(
            fp16.dynamic_loss_scale(), fp16.clip_by_global_norm_fp32(1.0), fp16.skip_if_nonfinite(optax.adam(0.1))
        ),
        optax.inject_hyperparams(optax.sgd)(schedule, momentum=0.9),
        recipe(half_params=True),
    ):
        inner = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
        fp16.distributed(inner, "data").init(params)


def test_a_wrong_optimizer_is_refused_in_the_step_too():
    params = {"w": jnp.ones(4)}
    tx = fp16.distributed(optax.with_extra_args_support(optax.lamb(0.1)), "data")
    spread = jax.shard_map(
        lambda params: tx.update(params, optax.lamb(0.1).init({"w": params["w"][:1]}), params)[0],
        mesh=mesh(4),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="computes over whole arrays"):
        jax.eval_shape(spread, params)


def test_an_older_jax_gathers_the_same_by_a_sum(monkeypatch):
    shapes = SHAPES | {"heads": (2, 6, 3)}  # rows of several dimensions, cut in two
    tx, grads, params = fp16.distributed(optax.sgd(1.0), "data"), drawn(4, shapes), parameters(shapes=shapes)

    def run():
        step, args = stepper(tx, params, mesh(4)), (params, tx.init(params), grads)
        return step(*args)[0], "all_gather" in str(jax.make_jaxpr(step)(*args))

    right, gathers = run()
    assert gathers == (jax.__version_info__ >= (0, 10))
    monkeypatch.setattr(_collectives, "_GATHERS_INVARIANT", False)
    summed, gathers = run()
    assert not gathers
    jax.tree.map(np.testing.assert_array_equal, summed, right)
    for name, away in mean(grads).items():
        np.testing.assert_array_equal(right[name], params[name] - away)


def test_gradients_that_their_types_say_are_the_same_everywhere_are_not_sent():
    tx, params = fp16.distributed(optax.sgd(1.0), "data"), {"w": jnp.arange(8.0)}

    def step(params, own):
        grads = {"w": own if own.shape == (8,) else own[0]}
        return tx.update(grads, tx.init(params), params)[0]

    def program(own, spec):
        return jax.make_jaxpr(jax.shard_map(step, mesh=mesh(4), in_specs=(P(), spec), out_specs=P()))(params, own)

    assert "reduce_scatter" not in str(program(jnp.ones(8), P()))
    assert "reduce_scatter" in str(program(jnp.ones((4, 8)), P("data")))


def test_the_inner_optimizer_is_looked_at_once_for_the_same_kind_of_parameters():
    traces = []
    counted = optax.stateless(lambda updates, params: (traces.append(None), updates)[1])
    tx, params = fp16.distributed(optax.chain(counted, optax.scale(-1.0)), "data"), {"w": jnp.ones(8)}

    def step(params):
        return tx.update(params, tx.init(params), params)[0]

    tx.init(params)
    assert len(traces) == 1
    jax.eval_shape(jax.shard_map(step, mesh=mesh(4), in_specs=P(), out_specs=P()), params)
    assert len(traces) == 2  # for the step itself
    tx.init({"w": jnp.ones((8, 8))})
    assert len(traces) == 3


def test_within_one_of_its_two_axes_init_gives_the_whole_state_and_the_step_says_which_is_missing():
    params = {"w": jnp.ones(8)}
    tx = fp16.distributed(optax.sgd(0.1, momentum=0.9), ("data", "more"))

    def mapped(function):
        return jax.shard_map(function, mesh=mesh(4), in_specs=P(), out_specs=P())

    assert jax.eval_shape(mapped(tx.init), params)[0].trace["w"].shape == (8,)
    with pytest.raises(ValueError, match="axis_name='more' isn't an axis"):
        jax.eval_shape(mapped(lambda params: tx.update(params, tx.init(params), params)[0]), params)


def test_a_whole_state_in_the_step_is_refused():
    params = {"w": jnp.ones(8)}
    tx = fp16.distributed(optax.adam(0.1), "data")
    state = tx.init(params)
    spread = jax.shard_map(lambda params: tx.apply(params, state, params)[0], mesh=mesh(4), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"mu\['w'\] has shape \(8,\); this device's part has \(2,\).*split_state"):
        jax.eval_shape(spread, params)
    with pytest.raises(ValueError, match="isn't an axis of the pmap or shard_map"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(8,\); in the whole state .* \(4,\)"):
        tx.split_state(state, {"w": jnp.ones(4)}, mesh(4))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: fp16.distributed(optax.sgd(1.0), None), ValueError, "axis_name must name"),
        (lambda: fp16.distributed(optax.adam, "data"), TypeError, "Call it first"),
        (
            lambda: fp16.distributed(optax.sgd(1.0), "data", transport=jnp.int8),
            TypeError,
            "transport must be a floating",
        ),
        (
            lambda: fp16.distributed(optax.sgd(1.0), "rows").state_specs({"w": jnp.ones(4)}, mesh(4)),
            ValueError,
            "'rows'",
        ),
        (lambda: specs_of(P("pipe")), ValueError, r"param_specs\['w'\] names the axis 'pipe'"),
        (lambda: specs_of(P(None, "model")), ValueError, r"param_specs\['w'\] splits 3 entries over the 2 devices"),
        (lambda: fp16.zero_shardings(jnp.ones(4), mesh(4), "rows"), ValueError, "one of 'data', not 'rows'"),
        (lambda: fp16.zero_shardings(jnp.ones(4), 4, "data"), TypeError, "mesh must be"),
    ],
)
def test_wrong_arguments_are_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def specs_of(spec):
    tx = fp16.distributed(optax.sgd(1.0), "data", param_specs={"w": spec})
    return tx.state_specs({"w": jnp.ones((4, 3))}, mesh(2, 2))


PLACED = {"inner": (8, 4), "outer": (4, 8), "bias": (3,), "scale": (4,)}


def test_every_leaf_is_placed_along_the_first_dimension_that_divides():
    shapes = {"a": jnp.ones((8, 3)), "b": jnp.ones((3, 8), jnp.float16), "c": jnp.ones(3), "d": 1, "e": None}
    placed = fp16.zero_shardings(shapes, mesh(4), "data")
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    assert specs == {"a": P("data"), "b": P(None, "data"), "c": P(), "d": P(), "e": None}


def test_placing_adds_to_tensor_parallel_shardings_and_leaves_its_own_alone():
    grid = mesh(2, 2)
    specs = {"inner": P(None, "model"), "outer": P("model"), "bias": P(), "scale": P("model")}
    params = {
        name: jax.device_put(leaf, NamedSharding(grid, specs[name])) for name, leaf in parameters(shapes=PLACED).items()
    }
    alone = jax.device_put(jnp.ones((2, 6)), NamedSharding(grid, P("model")))  # each device has one row of it already
    assert fp16.zero_shardings(alone, grid, "data").spec == P("model", "data")
    placed = fp16.zero_shardings(params, grid, "data")
    right = {"inner": P("data", "model"), "outer": P(("model", "data")), "bias": P(), "scale": P(("model", "data"))}
    assert {name: sharding.spec for name, sharding in placed.items()} == right
    again = fp16.zero_shardings(jax.device_put(params, placed), grid, "data")
    assert {name: sharding.spec for name, sharding in again.items()} == right
    tx = recipe(
        half_params=True
    )  # fp32 parameters are their own masters: as in optax.masked, nothing is in their place
    state = optax.tree.map_params(
        tx,
        lambda leaf, sharding: leaf if isinstance(leaf, optax.MaskedNode) else sharding,
        jax.eval_shape(tx.init, params),
        placed,
        transform_non_params=lambda leaf: NamedSharding(grid, P()),
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    moments = optax.tree.get(jax.jit(tx.init, out_shardings=state)(params), "nu")
    assert {name: leaf.sharding.spec for name, leaf in moments.items()} == right
    with pytest.raises(ValueError, match=r"leaf\['inner'\] lies on another mesh"):
        fp16.zero_shardings(params, mesh(4), "data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lamb_under_sharded_jit_takes_the_steps_of_one_device(kind):
    grid, shapes = mesh(4, kind=kind), {"inner": (8, 4), "bias": (3,)}
    tx = fp16.mixed_precision(optax.lamb(0.1), max_norm=1.0, loss_scale=8.0)
    whole, batch = parameters(shapes=shapes), np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)
    everywhere = NamedSharding(grid, P())
    params = jax.device_put(jax.tree.map(np.asarray, whole), everywhere)  # a copy, since it is donated
    parts = fp16.zero_shardings(params, grid, "data")
    state_parts = fp16.zero_shardings(jax.eval_shape(tx.init, params), grid, "data")
    place = jax.lax.with_sharding_constraint if kind == AxisType.Auto else jax.reshard

    def loss(params, x):
        hidden = jnp.tanh(x @ params["inner"])
        return jnp.mean(jnp.square(hidden[:, :3] + params["bias"][None]))

    def step(params, state, x, place=lambda tree, where: tree):
        _, grads = fp16.value_and_grad(loss, state)(params, x)
        params, state = fp16.apply_gradients(tx, place(grads, parts), state, params)
        return place(params, jax.tree.map(lambda _: everywhere, params)), place(state, state_parts)

    state = jax.jit(tx.init, out_shardings=state_parts)(params)
    x = jax.device_put(batch, NamedSharding(grid, P("data")))
    distributed = jax.jit(lambda *args: step(*args, place=place), donate_argnums=(0, 1))
    plain, right_state = jax.jit(step), tx.init(whole)
    for _ in range(5):
        params, state = distributed(params, state, x)
        whole, right_state = plain(whole, right_state, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (params, state), (whole, right_state)
    )
    moment = optax.tree.get(state, "mu")["inner"]
    assert moment.addressable_shards[0].data.shape == (2, 4)
