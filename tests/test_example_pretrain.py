"""The pre-training example: what it makes, what it refuses, and that it goes on bit for bit."""

import os
import random
import re
import shlex
import shutil
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import pretrain_bert
from tests.pretraining_runs import (
    STEPS,
    arguments,
    compiled_programs_in,
    final_state,
    in_this_process,
    killed,
    metrics_without_times,
    small_text,
)
from text.batches import Batches
from training import metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder of compiled programs that the runs of this module share, those in other processes too."""
    with compiled_programs_in(tmp_path_factory.mktemp("compiled")) as folder:
        yield folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(cache, text, tmp_path_factory):
    """A run from its start to its end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    status, out, err = in_this_process(*arguments(text, folder))
    assert status == 0, err
    return SimpleNamespace(folder=folder, out=out)


def test_a_run_ends_with_a_table_of_what_it_reached(straight):
    table = dict(re.findall(r"│ (.+?) +│ (.+?) +│", straight.out))
    assert float(table["validation loss"]) < 8
    assert 5 < float(table["unigram entropy of the text"]) < 6
    assert int(table["steps skipped"]) >= 2
    assert re.fullmatch(r"2 / \d times", table["loss scale grew / backed off"])
    assert float(table["steps per second"]) > 0
    assert set(table) >= {"training loss, mean of the last 8 steps", "loss scale at the end"}
    assert len(re.findall(rf"^step \d/{STEPS}  loss ", straight.out, re.MULTILINE)) == STEPS


def test_a_run_leaves_metrics_a_picture_its_vocabulary_and_checkpoints(straight):
    columns = metrics.read(straight.folder / "metrics.csv")
    assert columns["step"].tolist() == list(range(1, STEPS + 1))
    skipped = np.diff(columns["skipped_total"], prepend=0) > 0
    assert np.isinf(columns["grad_norm"][skipped]).all()
    assert np.isfinite(columns["grad_norm"][~skipped]).all()
    assert np.isfinite(columns["loss"]).all()
    assert (straight.folder / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert (straight.folder / "tokenizer.json").stat().st_size > 1000
    assert len(list((straight.folder / "checkpoints").glob("step_*"))) == STEPS // 2


def test_ctrl_c_saves_and_the_command_it_prints_ends_where_the_straight_run_ends(straight, text, tmp_path, monkeypatch):
    batch = Batches.batch

    def batch_with_ctrl_c(self, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", batch_with_ctrl_c)
    status, out, _ = in_this_process(*arguments(text, tmp_path / "run"))
    assert status == 130
    assert "stopped after step 5, which is saved" in out
    monkeypatch.undo()
    command = shlex.split(out.splitlines()[-1])
    assert command[0] == "python"
    status, out, _ = in_this_process(*command[2:])
    assert status == 0
    assert "going on at step 5" in out
    assert final_state(tmp_path / "run") == final_state(straight.folder)
    assert metrics_without_times(tmp_path / "run") == metrics_without_times(straight.folder)


@pytest.fixture(scope="module")
def killed_run(straight, text, cache, tmp_path_factory):
    """The folder of a run that was killed three times and went on twice."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    rng = random.Random(0)
    statuses = [killed(text, folder, cache, rng)[0] for _ in range(3)]
    assert -signal.SIGKILL in statuses
    return folder


def test_a_run_killed_at_random_moments_ends_with_the_bits_of_the_straight_run(straight, killed_run, text):
    status, _, err = in_this_process(*arguments(text, killed_run, "--resume"))
    assert status == 0, err
    assert final_state(killed_run) == final_state(straight.folder)
    assert metrics_without_times(killed_run) == metrics_without_times(straight.folder)
    assert not list((killed_run / "checkpoints").glob("writing-*"))


@pytest.fixture
def copied(straight, tmp_path, monkeypatch):
    """A copy of the straight run, for programs that end before they need parameters."""
    monkeypatch.setattr(pretrain_bert, "init_params", lambda *args: {"kernel": jnp.zeros(2)})
    return shutil.copytree(straight.folder, tmp_path / "run")


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_offered(copied, text):
    (copied / "checkpoints" / f"step_{STEPS:08d}" / "facts.json").write_text("{}")
    status, _, err = in_this_process(*arguments(text, copied, "--resume"))
    assert status == 2
    assert err.count("\n") == 1
    assert "facts.json has changed" in err
    assert err.endswith(f"write --resume {STEPS - 2}\n")


def test_a_checkpoint_of_another_size_is_refused(copied, text):
    status, _, err = in_this_process(*arguments(text, copied, "--resume", "--size", "mini"))
    assert status == 2
    assert re.fullmatch(r"error: the checkpoint .* with --size tiny, not mini; write --size tiny, .*\n", err)


REFUSALS = {
    "missing text": ("--text {folder}/none.txt", "cannot read the text file"),
    "empty text": ("--text {folder}/empty.txt", "is empty"),
    "text smaller than a batch": ("--batch-size 8000", "too small: .*--batch-size"),
    "indivisible batch": ("--batch-size 12", r"batch of 12 can't be cut into 8 device.*--batch-size 8 or 16"),
    "unwritable folder": ("--run-dir {folder}/file/run", "cannot write to the folder .*--run-dir"),
    "unwritable checkpoints": ("--checkpoint-dir {folder}/file/run", "cannot write .*--checkpoint-dir"),
    "unwritable picture": ("--picture {folder}/file/run.png", "cannot write .*--picture"),
    "another run's folder": ("--checkpoint-dir {folder}/old", "step 3; add --resume"),
    "no such size": ("--size huge", "--size: invalid choice: 'huge'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_one_line_and_status_2(name, text, tmp_path):
    (tmp_path / "old" / "step_00000003").mkdir(parents=True)
    for name_of_file in ("file", "empty.txt"):
        (tmp_path / name_of_file).touch()
    options, message = REFUSALS[name]
    status, _, err = in_this_process(*arguments(text, tmp_path / "new", *options.format(folder=tmp_path).split()))
    assert status == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", err), err


def test_the_loss_is_the_mean_cross_entropy_over_masked_words_plus_that_of_pairs():
    rng = np.random.default_rng(0)
    words, pairs = rng.normal(size=(2, 3, 7)).astype(np.float32), rng.normal(size=(2, 2)).astype(np.float32)
    model = SimpleNamespace(apply=lambda *args, **kwargs: (jnp.asarray(words), jnp.asarray(pairs)))
    batch = dict.fromkeys(("token_ids", "attention_mask", "token_types", "masked_positions")) | {
        "masked_labels": np.array([[1, 2, 0], [6, 0, 0]]),
        "masked_weights": np.array([[1, 1, 0], [1, 0, 0]], np.float32),
        "is_next": np.array([1, 0]),
        "pair_weights": np.ones(2, np.float32),
    }
    loss, told = pretrain_bert.pretraining_loss(model)(None, pretrain_bert.mean_weights(batch), None)

    def cross_entropy(logits, label):
        return np.log(np.exp(logits.astype(np.float64)).sum()) - logits[label]

    word = np.mean([cross_entropy(words[0, 0], 1), cross_entropy(words[0, 1], 2), cross_entropy(words[1, 0], 6)])
    pair = np.mean([cross_entropy(pairs[0], 1), cross_entropy(pairs[1], 0)])
    assert float(loss) == pytest.approx(word + pair, rel=1e-5)
    assert float(told["loss"]) == pytest.approx(word, rel=1e-5)
    right = [words[0, 0].argmax() == 1, words[0, 1].argmax() == 2, words[1, 0].argmax() == 6]
    assert float(told["masked_accuracy"]) == pytest.approx(np.mean(right))
