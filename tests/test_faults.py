"""Infs, NaNs, extremes and subnormals in the gradients of one device: the run survives, and every device agrees."""

import pytest

from tests import fault_runs


@pytest.mark.slow
def test_every_promise_holds_at_each_of_500_steps_with_faults():
    _, record, faults = fault_runs.run(seed=1, steps=500, layout="shard_map")
    fault_runs.check(record, faults)
    fault_runs.check_that_it_happened(record, faults)
