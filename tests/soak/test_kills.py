"""The pre-training example killed 30 times, inside checkpoint writes too, and never a bit lost."""

import random
import signal

import pytest

from tests.pretraining_runs import (
    arguments,
    compiled_programs_in,
    final_state,
    in_this_process,
    killed,
    metrics_without_times,
    small_text,
)

KILLS = 30


@pytest.fixture
def cache(tmp_path):
    with compiled_programs_in(tmp_path / "compiled") as folder:
        yield folder


@pytest.mark.soak
def test_30_kills_at_random_moments_cost_no_bit(cache, tmp_path):
    text, straight = small_text(tmp_path), tmp_path / "straight"
    status, _, err = in_this_process(*arguments(text, straight))
    assert status == 0, err
    rng = random.Random(2024)
    deaths = while_writing = runs = 0
    while deaths < KILLS:
        run_dir = tmp_path / f"run{runs}"
        status, writing = killed(text, run_dir, cache, rng)
        deaths += status == -signal.SIGKILL
        while_writing += writing
        if status == 0 or deaths == KILLS:
            status, _, err = in_this_process(*arguments(text, run_dir, "--resume"))
            assert status == 0, err
            assert final_state(run_dir) == final_state(straight)
            assert metrics_without_times(run_dir) == metrics_without_times(straight)
            runs += 1
    print(f"{deaths} kills in {runs} runs, {while_writing} of them inside the writing of a checkpoint")
    assert while_writing > 0
