"""What is done to every leaf: widened, multiplied, chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_fp16._tree import select, widened


@pytest.mark.parametrize("leaf", [jnp.asarray(2.0), jnp.float32(2.0), np.float16(2.0), jnp.bfloat16(2.0), 2.0, 2])
def test_a_widened_leaf_is_strongly_typed_fp32(leaf):
    wide = widened(leaf)
    assert (wide, wide.dtype, wide.weak_type) == (2.0, jnp.float32, False)


def test_a_widened_shape_is_the_shape_of_what_is_widened():
    for dtype, wide in ((jnp.float16, jnp.float32), (jnp.float32, jnp.float32), (jnp.complex64, jnp.complex64)):
        shape = widened(jax.ShapeDtypeStruct((3,), dtype, weak_type=True))
        assert (shape.shape, shape.dtype, shape.weak_type) == ((3,), wide, False)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("flag", [True, False])
def test_one_of_two_trees_is_chosen_leaf_by_leaf_and_what_is_no_array_stays(flag, jitted):
    def tree(number):
        return {
            "x": jnp.full(2, number),
            "key": jax.random.key(number),
            "none": np.zeros(3, jax.dtypes.float0),
            "word": "a",
        }

    def choose(flag):
        chosen = select(flag, tree(1), tree(2))
        kept.append((chosen.pop("none"), chosen.pop("word")))
        return chosen

    kept = []
    chosen = (jax.jit(choose) if jitted else choose)(jnp.array(flag))
    number = 1 if flag else 2
    np.testing.assert_array_equal(chosen["x"], number)
    assert chosen["key"] == jax.random.key(number)
    ((none, word),) = kept
    assert (none.dtype, word) == (jax.dtypes.float0, "a")


@pytest.mark.parametrize("flag", [True, False])
def test_a_strongly_and_a_weakly_typed_number_can_be_chosen_between(flag):
    assert select(jnp.array(flag), jnp.float32(1.0), jnp.asarray(2.0)) == (1.0 if flag else 2.0)
