"""A few random training programs against the float64 model of the whole step; `make soak` runs 2,000."""

import dataclasses

import pytest

from tests.fuzzing import comparing
from tests.fuzzing.reference import unambiguous

PROGRAMS, TESTS = 24, 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(TESTS))
def test_a_random_program_gives_what_the_float64_model_says(first):
    for seed in range(first, PROGRAMS, TESTS):
        comparing.replay(seed)


def test_a_difference_in_the_last_step_is_found_and_says_how_to_see_it_again(monkeypatch):
    program, expected = unambiguous(2)
    off = [value + slack * 1.1 + 1e-30 for value, slack in zip(expected[-1].masters, expected[-1].slack, strict=True)]
    wrong = [*expected[:-1], dataclasses.replace(expected[-1], masters=off)]
    monkeypatch.setattr(comparing, "unambiguous", lambda seed: (program, wrong))
    with pytest.raises(AssertionError, match=r"(?s)replay\(2\).*leaf 0 after step"):
        comparing.replay(2)
