"""Several processes as one run, for real: two of them on this machine, over the loopback."""

import json
import shlex

import jax
import numpy as np
import optax
import pytest

import optax_fp16 as fp16
from parallel.processes import launch
from tests import process_worker


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_next_goes_on_and_skips_where_one_has_an_inf(
    tmp_path, monkeypatch, capfd
):
    jax.devices()  # this process has its devices before the environment of the others is set
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("PYTHONPATH", ".:examples")
    folder = str(tmp_path)
    assert launch(process_worker.__file__, [folder, "--die"], 2) == 1
    message = capfd.readouterr().err
    assert "process 1 was killed by SIGKILL, so the run has ended" in message
    assert shlex.join(["python", process_worker.__file__, folder, "--die", "--resume"]) in message
    assert not list(tmp_path.glob("result-*"))

    assert launch(process_worker.__file__, [folder, "--resume"], 2) == 0
    results = [json.loads((tmp_path / f"result-{number}.json").read_text()) for number in range(2)]
    assert results[0] == results[1]
    assert results[0]["first"] == 3
    third, fourth = results[0]["seen"]
    assert (third["skipped_total"], third["loss_scale"], third["applied_total"]) == (0, 8, 3)
    assert (fourth["skipped_total"], fourth["loss_scale"], fourth["applied_total"]) == (1, 4, 3)

    # One process on its own, from the mean of their gradients: 8 and 16 of a loss scaled by 8.
    tx = fp16.mixed_precision(optax.adam(0.1), max_norm=1.0, loss_scale=8.0)
    params = jax.tree.map(np.asarray, process_worker.PARAMS)
    state = tx.init(params)
    for _ in range(3):
        params, state = tx.apply(jax.tree.map(lambda leaf: np.full_like(leaf, 12), params), state, params)
    np.testing.assert_allclose(results[0]["w"], params["w"], rtol=1e-6)
