"""Several processes as one run, for real: on this machine, over the loopback."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import optax_fp16 as fp16
import parallel_bert
from parallel.checkpoints import Checkpoints
from parallel.layout import Layout
from parallel.processes import launch
from tests import process_worker


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the processes, of one device each, write what they saw."""
    jax.devices()  # this process has its devices before the environment of the others is set
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("PYTHONPATH", ".:examples")
    return tmp_path


def results_of(folder, processes):
    """What the first process saw, after a look whether all saw the same."""
    results = [json.loads((folder / f"result-{number}.json").read_text()) for number in range(processes)]
    assert all(each == results[0] for each in results)
    return results[0]


def after_steps(count, gradient):
    """The parameters that one process on its own comes to, from the mean of the gradients of a loss scaled by 8."""
    tx = fp16.mixed_precision(optax.adam(0.1), max_norm=1.0, loss_scale=8.0)
    params = jax.tree.map(np.asarray, process_worker.PARAMS)
    state = tx.init(params)
    for _ in range(count):
        params, state = tx.apply(jax.tree.map(lambda leaf: np.full_like(leaf, gradient), params), state, params)
    return params


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_next_goes_on_and_skips_where_one_has_an_inf(folder, capfd):
    assert launch(process_worker.__file__, [str(folder), "--die"], 2) == 1
    message = capfd.readouterr().err
    assert "process 1 was killed by SIGKILL, so the run has ended" in message
    assert shlex.join(["python", process_worker.__file__, str(folder), "--die", "--resume"]) in message
    assert not list(folder.glob("result-*"))

    assert launch(process_worker.__file__, [str(folder), "--resume"], 2) == 0
    result = results_of(folder, 2)
    assert result["first"] == 3
    third, fourth = result["seen"]
    assert (third["skipped_total"], third["loss_scale"], third["applied_total"]) == (0, 8, 3)
    assert (fourth["skipped_total"], fourth["loss_scale"], fourth["applied_total"]) == (1, 4, 3)
    assert third["mean"] == 12  # of 8 and 16
    np.testing.assert_allclose(result["w"], after_steps(3, 12)["w"], rtol=1e-6)
    _what_two_processes_wrote_is_whole_for_one(folder)


def _what_two_processes_wrote_is_whole_for_one(folder):
    alone = process_worker.plan_for(Layout(1, 1, 1))
    checkpoints = Checkpoints(folder / "checkpoints", {})
    params, state = checkpoints.restore(checkpoints.latest(), alone, process_worker.PARAMS)
    checkpoints.close()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), params, after_steps(2, 12))
    assert fp16.metrics_of(state)["applied_total"] == 2


@pytest.mark.slow
def test_four_processes_run_the_same_program(folder):
    assert launch(process_worker.__file__, [str(folder), "--processes", "4"], 4) == 0
    result = results_of(folder, 4)
    assert [each["mean"] for each in result["seen"]] == [20, 20, 20, np.inf]  # of 8, 16, 24 and 32
    assert [each["skipped_total"] for each in result["seen"]] == [0, 0, 0, 1]
    np.testing.assert_allclose(result["w"], after_steps(3, 20)["w"], rtol=1e-6)


@pytest.mark.slow
def test_a_process_that_loses_the_others_ends_with_a_line_under_a_launcher_of_one_s_own(folder):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, process_worker.__file__, str(folder), "--die", "--coordinator", address, "--process-id"]
    with (folder / "errors").open("w") as errors:
        first, second = (subprocess.Popen([*command, str(number)], stderr=errors) for number in (0, 1))
        assert first.wait(timeout=300) == 1
        assert second.wait(timeout=10) == -signal.SIGKILL
    message = (folder / "errors").read_text()
    assert "error: process 0 lost the others (" in message
    assert "start again with --resume" in message


@pytest.mark.slow
def test_the_example_trains_bert_in_two_processes(folder, monkeypatch, capfd):
    # What the machine code is worth is for others to measure; this is half of the time.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    small = "--length 8 --batch-size 4 --micro-batches 1 --vocab-size 300 --steps 2 --poison 2"
    assert parallel_bert.main([*f"--processes 2 --dp 2 --zero {small} --run-dir".split(), str(folder)]) == 0
    printed = capfd.readouterr().out
    assert re.search(r"step 1/2  loss \d+\.\d+  scale 2\^15  \|g\| \d", printed)
    assert re.search(r"step 2/2  loss inf  scale 2\^14  \|g\| inf  skipped", printed)
    assert re.search(r"parameters (\d+) \(by arithmetic \1\)", printed)
