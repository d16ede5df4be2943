"""The examples' training step, schedule and loop."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16 as fp16
from training import arguments
from training.interrupts import stop_requested
from training.loop import State, train
from training.optimizer import decayed, optimizer, warmup_then_linear
from training.session import Outcome
from training.step import AXIS, on_every_device, split, sums_of, train_step

# Schedule and decay


def test_the_learning_rate_rises_from_its_first_step_and_falls_to_zero():
    schedule = warmup_then_linear(1.0, 4, 10)
    rates = [float(schedule(jnp.int32(count))) for count in range(11)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(rates[4:], [(10 - count) / 6 for count in range(4, 11)], rtol=1e-6)


def test_no_decay_on_biases_and_layer_norm():
    params = {
        "dense": {"kernel": 1, "bias": 1},
        "norm": {"scale": 1, "bias": 1},
        "word": {"embedding": 1},
        "mlm_bias": 1,
    }
    assert decayed(params) == {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "word": {"embedding": True},
        "mlm_bias": False,
    }


def test_a_skipped_step_does_not_move_the_schedule():
    parser = arguments.OneLineParser("A program.")
    arguments.add_training_arguments(parser, steps=10, learning_rate=0.1, growth_interval=2)
    args = parser.parse_args(["--warmup", "0.5", "--init-scale", "4", "--max-grad-norm", "0"])
    arguments.fill_in(args)
    tx = optimizer(args, None)
    step = jax.jit(lambda grads, state, params: fp16.apply_gradients(tx, grads, state, params))

    def after(*steps):
        params = {"kernel": jnp.ones(2)}
        state = tx.init(params)
        for kind in steps:
            scale = fp16.loss_scale_of(state)
            grads = {"kernel": scale * jnp.array([1.0, jnp.inf if kind == "skipped" else 2.0])}
            params, state = step(grads, state, params)
        return params["kernel"].tolist()

    assert after("applied", "skipped", "skipped", "applied") == after("applied", "applied")
    assert after("applied", "applied") != after("applied")


# The step, against plain Optax on one device


def quadratic(params, batch, key):
    """Mean squares of a linear model; the weights of a whole batch add up to 1."""
    error = batch["x"] @ params["kernel"] - batch["y"]
    noise = 0.0 if key is None else jax.random.uniform(key)
    loss = jnp.sum(error**2 * batch["weights"])
    return loss, {"loss": loss, "noise": jnp.float32(noise)}


def toy_batch(size=16):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(size, 3)).astype(np.float32), rng.normal(size=size).astype(np.float32)
    return {"x": x, "y": y, "weights": np.full(size, 1 / size, np.float32)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_over_devices_and_micro_batches_is_that_of_the_whole_batch(accumulate):
    tx = fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0, loss_scale=8.0, axis_name=AXIS)
    params = {"kernel": jnp.array([1.0, -2.0, 0.5])}
    batch = toy_batch()
    step = train_step(quadratic, tx, seed=0, accumulate=accumulate)
    state = on_every_device((params, tx.init(params)))
    new, _, told = step(*state, split(batch, accumulate), np.int32(0))

    kernel = np.array([1.0, -2.0, 0.5])
    error = batch["x"].astype(np.float64) @ kernel - batch["y"]
    grad = 2 * batch["x"].T.astype(np.float64) @ (error / len(error))
    norm = np.linalg.norm(grad)
    np.testing.assert_allclose(told["loss"], np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(told["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(new["kernel"], kernel - 0.1 * grad / max(1, norm), rtol=1e-5)


def test_dropout_differs_between_steps_and_seeds_and_not_between_runs():
    tx = fp16.mixed_precision(optax.sgd(0.1), loss_scale=1.0, axis_name=AXIS)
    params = {"kernel": jnp.zeros(3)}
    noises = []
    for seed in (0, 1):
        step = train_step(quadratic, tx, seed=seed, accumulate=1)
        for number in (0, 0, 1):
            state = on_every_device((params, tx.init(params)))
            noises.append(float(step(*state, split(toy_batch(), 1), np.int32(number))[2]["noise"]))
    assert noises[0] == noises[1]
    assert len(set(noises)) == 4


def test_evaluation_adds_up_over_the_devices_without_dropout():
    batch = toy_batch()
    sums = sums_of(quadratic)({"kernel": jnp.zeros(3)}, batch)
    assert sums["loss"] == pytest.approx(np.mean(batch["y"].astype(np.float64) ** 2), rel=1e-5)
    assert sums["noise"] == 0


# The loop


class Told:
    def __init__(self):
        self.steps, self.flushed = [], 0

    def add(self, step, metrics):
        self.steps.append(step)

    def flush(self):
        self.flushed += 1


def run_loop(state, stop=None, stop_at=None):
    stop = stop or threading.Event()
    told, saved = Told(), []

    def step(params, opt_state, batch, number):
        if number + 1 == stop_at:
            stop.set()
        return params + batch, opt_state, {}

    end = train(step, state, lambda number: number, steps=10, recorder=told, save=saved.append, save_every=4, stop=stop)
    return end, told.steps, [state.step for state in saved]


def test_the_loop_saves_every_so_many_steps_and_at_the_end():
    end, steps, saved = run_loop(State(0, None, 0))
    assert end == State(45, None, 10)
    assert steps == list(range(1, 11))
    assert saved == [4, 8, 10]


def test_the_loop_goes_on_with_the_batch_after_the_last_one():
    assert run_loop(State(sum(range(6)), None, 6))[0] == State(45, None, 10)
    assert run_loop(State(45, None, 10)) == (State(45, None, 10), [], [])


def test_the_loop_saves_when_it_is_asked_to_stop():
    end, steps, saved = run_loop(State(0, None, 0), stop_at=3)
    assert end == State(3, None, 3)
    assert steps == [1, 2, 3]
    assert saved == [3]


def test_the_first_ctrl_c_asks_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with stop_requested() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("steps_per_second", "words"), [(0.0, "no step timed"), (5.746, "5.75")])
def test_a_run_that_had_ended_already_shows_no_speed(steps_per_second, words):
    assert Outcome(None, steps_per_second, interrupted=False).speed == words
