"""The examples' command line: wrong options, the command to go on, folders and exit statuses."""

from types import SimpleNamespace

import pytest

from training import arguments
from training.errors import InputError, exit_status
from training.folders import make_writable, run_folder


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
