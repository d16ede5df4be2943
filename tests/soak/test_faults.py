"""20,000 guarded steps with faults in the gradients, and the same again from the same seeds."""

import jax
import numpy as np
import pytest

from tests import fault_runs

STEPS = {"pmap": 10000, "shard_map": 10000}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "seed"), [("pmap", 11), ("shard_map", 12)])
def test_every_promise_holds_at_each_step_and_the_same_seed_gives_the_same_bits(layout, seed):
    params, record, faults = fault_runs.run(seed, STEPS[layout], layout)
    fault_runs.check(record, faults)
    fault_runs.check_that_it_happened(record, faults)
    again_params, again, _ = fault_runs.run(seed, STEPS[layout], layout)
    jax.tree.map(np.testing.assert_array_equal, (params, record), (again_params, again))
