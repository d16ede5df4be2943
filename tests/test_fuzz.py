"""A few random training programs against the float64 model of the whole step; `make soak` runs 2,000."""

import pytest

from tests.fuzzing.comparing import replay

PROGRAMS, TESTS = 24, 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(TESTS))
def test_a_random_program_gives_what_the_float64_model_says(first):
    for seed in range(first, PROGRAMS, TESTS):
        replay(seed)
