"""The examples' shared machinery, piece by piece: arguments, metrics, schedule, step, loop, display, picture."""

import io
import math
import os
import resource
import signal
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import optax_fp16 as fp16
from training import arguments, metrics, plot
from training.errors import InputError, exit_status
from training.folders import make_writable, run_folder
from training.interrupts import stop_requested
from training.loop import State, train
from training.optimizer import decayed, optimizer, warmup_then_linear
from training.progress import Progress
from training.recorder import Recorder
from training.step import AXIS, on_every_device, split, sums_of, train_step

# Arguments and errors


def parser():
    made = arguments.OneLineParser("A program.")
    arguments.add_training_arguments(
        made, steps=10, batch_size=8, length=16, learning_rate=0.1, growth_interval=2, checkpoint_every=5
    )
    return made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], r"--steps: '0' is not a whole number of at least 1"),
        (["--steps", "many"], r"--steps: 'many' is not a whole number"),
        (["--learning-rate", "0"], r"--learning-rate: '0' is not a number above 0"),
        (["--learning-rate", "nan"], r"--learning-rate: 'nan' is not a number above 0"),
        (["--warmup", "2"], r"--warmup: '2' is not a number of at least 0 and at most 1"),
        (["--loss-scale", "-1"], r"--loss-scale"),
        (["--loss-scale", "inf"], r"--loss-scale: 'inf' is not a number above 0"),
        (["--precision", "fp8"], r"--precision.*invalid choice: 'fp8'"),
        (["--resume", "soon"], r"--resume: 'soon' is not a whole number"),
        (["--stpes", "3"], r"unrecognized arguments: --stpes"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(argv, message):
    with pytest.raises(InputError, match=message) as error:
        parser().parse_args(argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "scale"),
    [([], "dynamic"), (["--precision", "bf16"], 1.0), (["--loss-scale", "128"], 128.0)],
)
def test_the_loss_scale_follows_the_precision_unless_it_is_given(argv, scale):
    args = parser().parse_args(argv)
    arguments.fill_in(args)
    assert args.loss_scale == scale


def test_a_batch_that_devices_and_micro_batches_do_not_divide_is_refused_with_the_nearest_that_do():
    arguments.check_divisible(16, 4, 2)
    with pytest.raises(InputError, match=r"batch of 12 can't be cut into 4 device\(s\) x 2.*--batch-size 8 or 16"):
        arguments.check_divisible(12, 4, 2)
    with pytest.raises(InputError, match=r"write --batch-size 8$"):
        arguments.check_divisible(3, 8, 1)


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ([], ""),
        (["--steps", "9"], "--steps 9 "),
        (["--resume", "200", "--steps", "9"], "--steps 9 "),
        (["--run-dir", "old", "--resume"], ""),
        (["--run-dir=old", "--text", "a b.txt", "c.txt"], "--text 'a b.txt' c.txt "),
        (["--resume=200", "--seed", "1"], "--seed 1 "),
    ],
)
def test_the_command_to_go_on_keeps_every_other_option(argv, kept, tmp_path):
    command = arguments.resume_command("x.py", argv, tmp_path)
    assert command == f"python x.py {kept}--run-dir {tmp_path} --resume"


def test_bad_input_ends_with_status_2_and_one_line(capsys):
    def main(argv):
        raise InputError("the text is empty; give another")

    assert exit_status(main, []) == 2
    assert capsys.readouterr().err == "error: the text is empty; give another\n"


def test_a_failing_disk_ends_with_status_1_and_one_line(capsys):
    def main(argv):
        raise OSError(28, "No space left on device", "runs/run.png")

    assert exit_status(main, []) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'runs/run.png'\n"


def test_ctrl_c_before_the_first_step_ends_with_status_130_and_one_line(capsys):
    def main(argv):
        raise KeyboardInterrupt

    assert exit_status(main, []) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_are_numbered_and_resume_takes_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new, again = (SimpleNamespace(run_dir=None, resume=resume) for resume in (None, "latest"))
    assert str(run_folder(new, "task")) == str(run_folder(again, "task")) == "runs/task-1"
    for number in (2, 10):
        (tmp_path / f"runs/task-{number}").mkdir(parents=True)
    assert str(run_folder(new, "task")) == "runs/task-11"
    assert str(run_folder(again, "task")) == "runs/task-10"


def test_a_folder_that_cannot_be_written_to_is_refused_with_its_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to the folder .*file/run .*--run-dir"):
        make_writable(tmp_path / "file" / "run", "--run-dir")


# Metrics


def row(step, **changes):
    return {"step": step, "loss": 1.5, "skipped_total": 0} | changes


def metrics_file(path, step=0):
    return metrics.MetricsFile(path, ("step", "loss", "skipped_total"), step)


def test_metrics_come_back_as_they_were_written_inf_and_nan_included(tmp_path):
    path = tmp_path / "metrics.csv"
    losses = [float(np.float32(1 / 3)), math.inf, math.nan]
    file = metrics_file(path)
    for step, loss in enumerate(losses, 1):
        file.append(row(step, loss=loss))
    file.close()
    read = metrics.read(path)
    assert read["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(read["loss"].astype(np.float32), np.float32(losses))


def test_going_on_drops_later_lines_and_the_one_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.csv"
    file = metrics_file(path)
    for step in range(1, 6):
        file.append(row(step))
    file.close()
    path.write_text(path.read_text() + "6,1.")
    file = metrics_file(path, step=3)
    file.append(row(4, loss=9.0))
    file.close()
    assert metrics.read(path)["step"].tolist() == [1, 2, 3, 4]
    assert metrics.read(path)["loss"][-1] == 9


def test_a_full_disk_costs_the_metrics_one_warning_and_no_line_once_there_is_room(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    file = metrics_file(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))  # a write past it fails
    try:
        for step in (1, 2, 3):
            file.append(row(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()
    assert capsys.readouterr().err.count("warning: cannot write") == 1
    assert metrics.read(path)["step"].tolist() == [1, 2, 3]


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
    args = parser().parse_args(["--warmup", "0.5", "--init-scale", "4", "--max-grad-norm", "0"])
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


# What a person sees


def metric_row(step, **changes):
    base = {"step": step, "loss": 2.0, "accuracy": 0.25, "loss_scale": 32768.0, "grad_norm": 0.5, "skipped_total": 3}
    return base | changes


def test_a_log_gets_a_line_now_and_then_with_all_there_is_to_see():
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Progress(40, 0, "accuracy", console) as progress:
        for step in range(1, 41):
            progress.update(step, metric_row(step, loss=math.nan if step == 1 else 2.0), 4.0)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[1] == "step 4/40  loss 2.000  acc 25.0%  scale 2^15  |g| 0.5  skipped 3  4.00 steps/s  9 s left"


def test_a_terminal_gets_a_bar_with_all_there_is_to_see():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Progress(40, 0, "accuracy", console) as progress:
        progress.update(10, metric_row(10), 4.0)
    shown = console.file.getvalue()
    for part in ("10/40", "loss 2.000", "acc 25.0%", "scale 2^15", "|g| 0.5", "skipped 3", "4.00 steps/s"):
        assert part in shown


def test_the_recorder_is_one_step_late_and_flushes_what_waits(tmp_path):
    shown = []
    progress = SimpleNamespace(update=lambda step, row, speed: shown.append((step, row["loss"])))
    recorder = Recorder(tmp_path / "metrics.csv", ("loss",), progress, 0)
    scalars = {"loss_scale": jnp.float32(2), "grad_norm": jnp.float32(1), "skipped_total": jnp.int32(0)}
    for step in (1, 2):
        recorder.add(step, {"loss": jnp.float32(step), "unused": jnp.zeros(3), **scalars})
    assert shown == [(1, 1.0)]
    recorder.close()
    assert shown == [(1, 1.0), (2, 2.0)]
    assert metrics.read(tmp_path / "metrics.csv")["loss"].tolist() == [1, 2]
    assert recorder.steps_per_second > 0


def test_skipped_steps_are_those_where_the_count_goes_up():
    columns = {"step": np.arange(1, 6), "skipped_total": np.array([1, 1, 2, 3, 3])}
    assert plot.skipped_steps(columns).tolist() == [1, 3, 4]


def test_smoothing_is_the_mean_of_the_last_finite_values():
    smooth = plot.smoothed(np.array([np.nan, 1.0, 3.0, np.inf, 5.0]), 2)
    np.testing.assert_array_equal(smooth, [np.nan, 1.0, 2.0, 3.0, 5.0])


def test_the_picture_is_a_png_even_of_a_run_of_skipped_steps(tmp_path):
    for norm, name in ((np.array([0.5, np.inf, 0.7]), "run"), (np.full(3, np.inf), "skipped")):
        columns = {
            "step": np.arange(1.0, 4.0),
            "loss": np.array([3.0, 2.0, 1.0]),
            "loss_scale": np.array([4.0, 2.0, 2.0]),
            "grad_norm": norm,
            "skipped_total": np.array([0.0, 1.0, 1.0]),
        }
        path = tmp_path / "made" / f"{name}.png"
        plot.draw(path, columns, title="A run", lines={"entropy": 2.5}, validation=1.2)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
