"""`nonfinite_report` against numpy, and what it looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16
from optax_fp16 import nonfinite_report

# The kinds of numbers that are awkward in fp16, exactly representable in fp32 as well.
AWKWARD = [0.0, -0.0, 2.0**-24, -(2.0**-15), 2.0**-14, -1.5, 65504.0, np.inf, -np.inf, np.nan]


def test_counts_and_magnitudes_are_numpys():
    rng = np.random.default_rng(0)
    values = rng.choice(np.array(AWKWARD), size=(7, 30))
    (leaf,) = nonfinite_report(jnp.asarray(values, jnp.float16)).leaves
    magnitude = np.abs(values[np.isfinite(values)])
    assert leaf.entries == 210
    assert leaf.infs == np.isinf(values).sum()
    assert leaf.nans == np.isnan(values).sum()
    assert leaf.zeros == (values == 0).sum()
    assert leaf.subnormals == ((magnitude > 0) & (magnitude < 2.0**-14)).sum()
    assert (leaf.largest, leaf.smallest) == (magnitude.max(), magnitude[magnitude > 0].min())


@pytest.mark.parametrize(
    ("dtype", "subnormal", "normal"),
    [("float16", 2.0**-15, 2.0**-14), ("bfloat16", 2.0**-130, 2.0**-126), ("float32", 2.0**-149, 2.0**-126)],
)
def test_subnormals_are_those_of_the_dtype_computed_in(dtype, subnormal, normal):
    # In bits, since a CPU's arithmetic takes fp32's own subnormals for zero.
    grads = jnp.asarray(np.array([subnormal, normal, 0.0], np.float32))
    (leaf,) = nonfinite_report(grads, jnp.dtype(dtype)).leaves
    assert (leaf.zeros, leaf.subnormals) == (1, 1)
    assert leaf.smallest == subnormal


def test_leaves_that_are_no_gradients_are_left_out():
    grads = {
        "none": None,
        "masked": optax.MaskedNode(),
        "count": jnp.arange(3),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "w": jnp.ones((2, 2), jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
    }
    report = nonfinite_report(grads)
    assert [(leaf.path, leaf.dtype, leaf.entries) for leaf in report.leaves] == [
        ("empty", "float32", 0),
        ("w", "bfloat16", 4),
    ]
    assert report.leaves[0].largest == report.leaves[0].smallest == 0.0


def test_an_empty_tree_has_an_empty_report():
    report = nonfinite_report({})
    assert (report.finite, report.rows(), report.short()) == (True, [], "all 0 leaves are finite")
    assert "0 of 0 leaves are not finite" in str(report)


def test_the_short_form_names_only_what_is_not_finite():
    grads = {
        "layer_3": {"attention": {"query": jnp.array([jnp.inf] * 12 + [jnp.nan] * 3), "key": jnp.ones(2)}},
        "layer_4": [jnp.array([-jnp.inf]), jnp.zeros(1)],
    }
    report = nonfinite_report(grads)
    assert report.short() == "layer_3/attention/query: 12 Inf, 3 NaN\nlayer_4/0: 1 Inf"
    assert not report.finite
    assert nonfinite_report(jnp.ones(2)).short() == "all 1 leaves are finite"


def test_the_two_parts_of_a_complex_number_count_as_two_entries():
    (leaf,) = nonfinite_report(jnp.array([1e-6 + 2j, complex(np.nan, np.inf)], jnp.complex64)).leaves
    assert (leaf.entries, leaf.infs, leaf.nans, leaf.subnormals, leaf.largest) == (4, 1, 1, 1, 2.0)


def test_python_numbers_and_float64_are_gradients_too():
    with jax.enable_x64(True):
        report = nonfinite_report([2.5, jnp.array([1e-300, 1e300], jnp.float64)])
    assert [leaf.largest for leaf in report.leaves] == [2.5, 1e300]
    assert report.leaves[1].subnormals == 1


def test_rows_make_a_dataframe_and_the_table_has_a_line_for_each_leaf():
    report = nonfinite_report({"a": jnp.array([1e-7], jnp.float32), "b": jnp.zeros((1000, 2))})
    assert report.rows()[0]["path"] == "a"
    assert report.rows()[1]["zeros"] == 2000
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert "2,000" in lines[2]
    assert lines[-1].startswith("0 of 2 leaves are not finite")
    assert len({len(line) for line in lines[:3]}) == 1


def test_gradients_spread_over_devices_are_counted_whole():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.device_put(
        jnp.arange(16.0).at[3].set(jnp.nan), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    )
    (leaf,) = nonfinite_report(spread).leaves
    assert (leaf.entries, leaf.nans, leaf.zeros, leaf.largest) == (16, 1, 1, 15.0)


def test_the_same_shapes_are_compiled_once():
    from optax_fp16.report import _looked_at

    nonfinite_report([jnp.ones((3, 5)), jnp.ones(7)])
    compiled = _looked_at._cache_size()
    nonfinite_report({"another": jnp.zeros((3, 5)), "tree": jnp.zeros(7)})
    assert _looked_at._cache_size() == compiled


def test_inside_jit_it_says_where_to_call_it():
    with pytest.raises(TypeError, match=r"w is .*call it outside"):
        jax.jit(lambda grads: len(nonfinite_report(grads).leaves))({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="call it outside"):
        nonfinite_report(jax.eval_shape(lambda: jnp.ones(2)))


def test_a_dtype_that_has_no_subnormals_is_refused():
    with pytest.raises(TypeError, match="dtype must be a floating dtype"):
        optax_fp16.nonfinite_report(jnp.ones(2), jnp.int32)
