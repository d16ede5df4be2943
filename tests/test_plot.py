"""The histogram of gradient exponents: the bars are numpy's counts, and the colours say what fp16 does to them."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import optax_fp16
from optax_fp16.plot import exponent_counts, exponent_histogram


def _bars(ax, words):
    """{exponent: height} of the bars whose label begins with these words."""
    (bars,) = (bars for bars in ax.containers if bars.get_label().startswith(words))
    return {round(bar.get_x()): bar.get_height() for bar in bars}


def test_the_counts_are_numpys_exponents():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 1e-4
    counts = exponent_counts({"a": jnp.asarray(values), "zeros": jnp.zeros(3), "bad": jnp.array([jnp.inf, jnp.nan])})
    expected = np.bincount(np.floor(np.log2(np.abs(values))).astype(int) + 127, minlength=256)
    expected[0], expected[255] = 3, 2
    np.testing.assert_array_equal(counts, expected)


def test_each_gradient_is_drawn_by_what_fp16_makes_of_it_at_the_scale():
    true = np.array([2.0**-41, 2.0**-40 * 1.5, 2.0**-30, 2.0**-29, 1.0, 2.0**1, 0.0])
    ax = exponent_histogram(jnp.asarray(true, jnp.float32), 2.0**15, scaled=False)
    seventh = pytest.approx(1 / 7)
    assert _bars(ax, "rounds to zero") == {-41: seventh}
    assert _bars(ax, "subnormal") == {-40: seventh, -30: seventh}
    assert _bars(ax, "normal") == {-29: seventh, 0: seventh}
    assert _bars(ax, "overflows") == {1: seventh}
    assert "7 gradient entries and float16; 14.29 % are zero" in ax.get_title()
    with np.errstate(over="ignore"):
        in_fp16 = np.asarray(true * 2.0**15, np.float16)
    assert in_fp16[0] == 0
    assert 0 < in_fp16[1] < in_fp16[2] < 2.0**-14 <= in_fp16[3]
    assert np.isinf(in_fp16[5])


def test_gradients_of_the_scaled_loss_are_drawn_as_true_ones():
    state = optax_fp16.static_loss_scale(1024.0).init(None)
    scaled = {"w": jnp.array([1.0, 4.0], jnp.float16), "step": jnp.array(3)}
    ax = exponent_histogram(scaled, optax_fp16.loss_scale_of(state))
    assert _bars(ax, "normal") == {-10: 0.5, -8: 0.5}


def test_the_ranges_of_fp16_are_drawn_with_and_without_the_scale():
    ax = exponent_histogram(jnp.array([1.0, 4.0]), 2.0**15)
    spans = {patch.get_label(): patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches}
    ranges = {label: (round(box.x0), round(box.x1)) for label, box in spans.items() if "range" in label}
    assert ranges == {
        "normal range at a loss scale of $2^{15}$": (-29, 1),
        "normal range without a loss scale": (-14, 16),
    }
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "share of the entries")
    assert ax.get_ylim()[1] > 0.5  # above the higher bar, with room for the words
    assert ax.xaxis.get_major_formatter()(-14) == "$2^{-14}$"
    assert {text.get_text() for text in ax.get_legend().get_texts()} >= set(ranges)
    assert {bar.get_width() for bars in ax.containers for bar in bars} == {1.0}
    assert _bars(exponent_histogram(jnp.ones(2)), "normal") == {0: 1.0}
    plain = exponent_histogram(jnp.array([1.0, 4.0]), 1.0)
    assert [patch.get_label() for patch in plain.patches if "range" in patch.get_label()] == [
        "normal range at a loss scale of $2^{0}$"
    ]
    odd = exponent_histogram(jnp.array([1.0, 4.0]), 12.0)
    assert any("a loss scale of 12" in patch.get_label() for patch in odd.patches)


def test_it_draws_on_the_axes_it_is_given():
    ax = Figure().subplots()
    assert exponent_histogram(jnp.ones(2), ax=ax) is ax


def test_an_inf_is_counted_in_the_title():
    ax = exponent_histogram(jnp.array([jnp.inf, 1.0, 1.0, 0.0]))
    assert ax.get_title().endswith("25 % are zero, 25 % Inf or NaN")


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'optax_fp16\[plot\]'"):
        exponent_histogram(jnp.ones(2))


@pytest.mark.parametrize(
    ("grads", "knobs", "error", "words"),
    [
        ({}, {}, ValueError, "grads holds no gradient"),
        (jnp.ones(1), {"loss_scale": 0.0}, ValueError, "loss_scale must be a number from 2"),
        (jnp.ones(1), {"dtype": jnp.int32}, TypeError, "dtype must be a floating dtype"),
    ],
)
def test_wrong_arguments_are_refused_by_name(grads, knobs, error, words):
    with pytest.raises(error, match=words):
        exponent_histogram(grads, **knobs)
