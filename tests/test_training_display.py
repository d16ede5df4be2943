"""What a run of the examples shows and leaves: the metrics file, the progress display, the picture."""

import io
import math
import resource
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from training import metrics, plot
from training.progress import Progress
from training.recorder import Recorder

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


def test_a_narrow_terminal_shows_all_of_it_without_the_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with Progress(1000, 0, "accuracy", console) as progress:
        progress.update(450, metric_row(450), 4.0)
    shown = console.file.getvalue().split("\r")[-1]
    assert " 450/1000 loss 2.000 acc 25.0% scale 2^15 |g| 0.5 skipped 3 4.00 steps/s -:--:--" in shown


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
