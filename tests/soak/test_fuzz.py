"""2,000 random training programs against the float64 model of the whole step."""

import jax
import pytest

from tests.fuzzing.comparing import replay

PROGRAMS, TESTS = 2000, 40


@pytest.fixture(autouse=True)
def forgotten():
    """What was compiled for a test's programs goes with it: 2,000 of them would fill the memory."""
    yield
    jax.clear_caches()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(TESTS))
def test_every_random_program_gives_what_the_float64_model_says(first):
    for seed in range(first, PROGRAMS, TESTS):
        replay(seed)
