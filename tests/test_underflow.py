"""Underflow against what numpy's float16 does, and that it costs nothing when it is off."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from optax_fp16.loss_scale import DynamicLossScaleState, StaticLossScaleState

SCALE = 2.0**10


def _gradients(seed=0, exponent=-24):
    """True gradients of two leaves, spread far over the powers of two, some of them zero."""
    rng = np.random.default_rng(seed)
    spread = [rng.normal(size=shape) * np.exp2(rng.integers(-30, 20, shape) + exponent) for shape in ((40,), (8, 12))]
    spread[0][:5] = 0.0
    return [np.float32(leaf) for leaf in spread]


def _reference(true, scale):
    """(share of zero or subnormal, share of zero) of the gradients in numpy's fp16 at this scale."""
    in_fp16 = np.abs(np.float64(true) * scale).astype(np.float16)
    return np.mean(in_fp16 < 2.0**-14), np.mean(in_fp16 == 0)


def _free_scale(true, scale):
    """By trying: the first scale, of all powers of two times this one, at which no non-zero gradient underflows."""
    candidates = scale * np.exp2(np.arange(-160.0, 160.0))
    smallest = np.min(np.abs(np.float64(true[true != 0])))
    return candidates[np.argmax(candidates * smallest >= 2.0**-14)]


@pytest.mark.parametrize("make", [fp16.dynamic_loss_scale, fp16.static_loss_scale])
def test_the_shares_are_what_numpy_makes_of_the_gradients(make):
    true = _gradients()
    grads = {"a": jnp.asarray(true[0] * SCALE), "b": jnp.asarray(true[1] * SCALE)}
    tx = make(SCALE, underflow="per_leaf")
    _, state = tx.update(grads, tx.init(grads))
    metrics = fp16.metrics_of(state)
    together = np.concatenate([leaf.reshape(-1) for leaf in true])
    # Just below 2^-14 rounding to fp16 gives 2^-14 itself; no entry here is so near.
    low, zero = _reference(together, SCALE)
    np.testing.assert_allclose([metrics["underflow_share"], metrics["underflow_zero_share"]], [low, zero], rtol=1e-6)
    assert 0 < zero < low < 1
    assert metrics["underflow_free_scale"] == _free_scale(together, SCALE)
    by_leaf = fp16.underflow_by_leaf(state, grads)
    for name, leaf in zip(("a", "b"), true, strict=True):
        np.testing.assert_allclose(by_leaf[name]["share"], _reference(leaf, SCALE)[0], rtol=1e-6)
        assert by_leaf[name]["free_scale"] == _free_scale(leaf, SCALE)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_boundaries_are_fp16s_own_for_gradients_of_any_dtype(dtype):
    edge = jnp.array([2.0**-14, 2.0**-15, 2.0**-24, 0.0], dtype)
    tx = fp16.static_loss_scale(4.0, underflow="total")
    metrics = fp16.metrics_of(tx.update(edge, tx.init(None))[1])
    assert (metrics["underflow_share"], metrics["underflow_zero_share"]) == (0.75, 0.25)
    assert metrics["underflow_free_scale"] == 4.0 * 2.0**10


def test_what_rounds_to_zero_in_fp16_counts_as_zero():
    tx = fp16.static_loss_scale(1.0, underflow="total")
    grads = jnp.array([2.0**-25, np.nextafter(np.float32(2.0**-25), np.float32(1)), 1.0, 1.0], jnp.float32)
    metrics = fp16.metrics_of(tx.update(grads, tx.init(None))[1])
    assert (metrics["underflow_share"], metrics["underflow_zero_share"]) == (0.5, 0.25)


def test_at_the_scale_it_names_nothing_underflows_and_below_it_something_does():
    true = _gradients(exponent=-10)[1]
    tx = fp16.static_loss_scale(1.0, underflow="total")
    free = float(fp16.metrics_of(tx.update(jnp.asarray(true), tx.init(None))[1])["underflow_free_scale"])
    for scale, some in ((free, False), (free / 2, True)):
        tx = fp16.static_loss_scale(scale, underflow="total")
        metrics = fp16.metrics_of(tx.update(jnp.asarray(true * np.float32(scale)), tx.init(None))[1])
        assert bool(metrics["underflow_share"] > 0) == some


def test_off_by_default_with_a_state_that_has_no_leaf_more():
    for tx, leaves in ((fp16.dynamic_loss_scale(), 6), (fp16.static_loss_scale(8.0), 1)):
        state = tx.init({"w": jnp.ones(3)})
        assert state.underflow is None
        assert len(jax.tree.leaves(state)) == leaves
        new = tx.update({"w": jnp.ones(3)}, state)[1]
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert not [name for name in fp16.metrics_of(new) if "underflow" in name]


@pytest.mark.parametrize("mode", ["total", "per_leaf"])
def test_the_updates_and_the_scale_are_the_same_with_it(mode):
    grads = [{"w": jnp.array([1.0, value], jnp.float16)} for value in (2.0, jnp.inf, 2.0, 2.0)]
    plain = fp16.dynamic_loss_scale(8.0, growth_interval=2)
    watching = fp16.dynamic_loss_scale(8.0, growth_interval=2, underflow=mode)
    states = [tx.init(grads[0]) for tx in (plain, watching)]
    for each in grads:
        (ours, states[1]), (theirs, states[0]) = watching.update(each, states[1]), plain.update(each, states[0])
        np.testing.assert_array_equal(ours["w"], theirs["w"])
        assert states[1]._replace(underflow=None) == states[0]


@pytest.mark.parametrize("mode", ["total", "per_leaf"])
def test_the_state_is_a_scan_carry_through_the_recipe_and_survives_a_skipped_step(mode):
    tx = fp16.mixed_precision(optax.sgd(0.1), loss_scale=fp16.dynamic_loss_scale(8.0, underflow=mode))
    params = {"w": jnp.ones(4), "n": None, "count": jnp.array(3)}
    values = jnp.array([[1.0, 0.0, 2.0**-15, 1.0], [1.0, jnp.inf, 1.0, 1.0], [1.0, 2.0**-20, 1.0, jnp.nan]])

    def step(carry, value):
        params, state = tx.apply({"w": value, "n": None, "count": carry[0]["count"]}, carry[1], carry[0])
        metrics = fp16.metrics_of(state)
        return (params, state), (metrics["underflow_share"], metrics["skipped_total"])

    (_, state), (shares, skipped) = jax.jit(lambda *carry: jax.lax.scan(step, carry, values))(params, tx.init(params))
    np.testing.assert_array_equal(shares, [0.5, 0.0, 0.25])
    np.testing.assert_array_equal(skipped, [0, 1, 2])
    if mode == "per_leaf":
        assert fp16.underflow_by_leaf(state, params) == {"w": {"share": 0.25, "free_scale": 4.0 * 2**6}}


def test_a_tree_of_zeros_asks_for_no_scale_and_an_empty_one_keeps_what_it_had():
    tx = fp16.static_loss_scale(8.0, underflow="total")
    _, state = tx.update({"w": jnp.zeros(3)}, tx.init(None))
    metrics = fp16.metrics_of(state)
    assert (metrics["underflow_share"], metrics["underflow_free_scale"]) == (1.0, 0.0)
    assert tx.update({}, state)[1] == state


def test_entries_that_no_scale_within_fp32_could_save_name_the_largest_one():
    tx = fp16.static_loss_scale(2.0**100, underflow="total")
    metrics = fp16.metrics_of(tx.update(jnp.array([1e-30]), tx.init(None))[1])
    assert metrics["underflow_free_scale"] == jnp.finfo(jnp.float32).max


def _replicated_and_sharded(step, devices):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=({"s": P("data"), "r": P()},), out_specs=P()))


@pytest.mark.parametrize("mode", ["total", "per_leaf"])
def test_shards_are_counted_over_all_devices_and_replicated_leaves_once(mode):
    true = _gradients()[1].reshape(-1)
    grads = {"s": jnp.asarray(true * np.float32(SCALE)), "r": jnp.array([1.0, 1e-7, 0.0])}
    tx = fp16.static_loss_scale(SCALE, underflow=mode, axis_name="data", sharded={"s": True, "r": False})
    spread = _replicated_and_sharded(lambda grads: tx.update(grads, tx.init(grads))[1], 4)(grads)
    alone = fp16.static_loss_scale(SCALE, underflow=mode)
    expected = alone.update(grads, alone.init(grads))[1]
    for ours, theirs in zip(jax.tree.leaves(spread), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_inside_the_distributed_optimizer_every_devices_part_counts():
    scale = fp16.dynamic_loss_scale(8.0, underflow="per_leaf")
    tx = fp16.distributed(fp16.mixed_precision(optax.sgd(0.1), loss_scale=scale), "data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jnp.ones(4)}
    specs = tx.state_specs(params, mesh)
    state = tx.split_state(tx.init(params), params, mesh)
    step = jax.shard_map(tx.apply, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
    grads = {"w": jnp.tile(jnp.array([1.0, 2.0**-20, 0.0, 1.0]), 2)}
    _, state = jax.jit(step)(grads, state, params)
    assert fp16.underflow_by_leaf(state, params) == {"w": {"share": 0.5, "free_scale": 8.0 * 2**6}}


def test_a_state_stacked_by_pmap_is_read_by_leaf():
    params = {"w": jnp.ones(2)}
    tx = fp16.static_loss_scale(1.0, underflow="per_leaf", axis_name="data")
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
    state = jax.pmap(lambda grads: tx.update(grads, tx.init(grads))[1], axis_name="data")(stacked)
    assert fp16.underflow_by_leaf(state, params) == {"w": {"share": 0.0, "free_scale": 2.0**-14}}


def test_the_states_stay_within_reach_of_map_params():
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    tx = optax.chain(fp16.dynamic_loss_scale(underflow="per_leaf"), optax.adam(0.1))
    state = tx.init(params)
    marked = optax.tree.map_params(tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other")
    assert jax.tree.leaves(marked).count("param") == 4
    assert jax.tree.structure(marked) == jax.tree.structure(state)


def test_mistakes_are_refused_in_words():
    with pytest.raises(ValueError, match=r"underflow must be one of None, 'total', 'per_leaf', not True"):
        fp16.dynamic_loss_scale(underflow=True)
    per_leaf = fp16.dynamic_loss_scale(underflow="per_leaf")
    with pytest.raises(ValueError, match=r"call tx.init\(params\)"):
        per_leaf.init(None)
    with pytest.raises(ValueError, match="began with 1 leaves and is given gradients of 2"):
        per_leaf.update([jnp.ones(1)] * 2, per_leaf.init([jnp.ones(1)]))
    with pytest.raises(ValueError, match="params has 2 leaves with gradients, and the state was made for 1"):
        fp16.underflow_by_leaf(per_leaf.init([jnp.ones(1)]), [jnp.ones(1)] * 2)
    for state in (fp16.dynamic_loss_scale(underflow="total").init(None), optax.sgd(1.0).init(None)):
        with pytest.raises(ValueError, match="keeps no underflow by leaf"):
            fp16.underflow_by_leaf(state, [])


def test_states_made_before_the_option_existed_can_be_made_from_their_fields():
    zero = jnp.zeros((), jnp.int32)
    assert DynamicLossScaleState(jnp.float32(8), *[zero] * 5).underflow is None
    assert StaticLossScaleState(jnp.float32(8)).underflow is None


def test_before_the_first_step_nothing_has_been_seen():
    params = [jnp.ones(2), jnp.ones(3)]
    state = fp16.dynamic_loss_scale(underflow="per_leaf").init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.underflow)] == [(), (), (), (2, 2)]
    for leaf in jax.tree.leaves(state.underflow):
        np.testing.assert_array_equal(leaf, 0.0)


def test_the_share_of_a_single_entry_is_all_or_nothing():
    tx = fp16.static_loss_scale(1.0, underflow="per_leaf")
    for value, share in ((2.0**-20, 1.0), (1.0, 0.0)):
        grads = [jnp.array([value])]
        _, state = tx.update(grads, tx.init(grads))
        assert (state.underflow.underflow_share, state.underflow.underflow_by_leaf[0, 0]) == (share, share)
