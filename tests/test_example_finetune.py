"""The fine-tuning example from end to end, on a BERT of one layer; the real weights are for `make finetune`."""

import re

import jax
import numpy as np
import pytest

import finetune_bert
from finetuning import compare as comparison
from tests.small_checkpoint import sentences, write_checkpoint, write_table
from training.errors import exit_status
from training.metrics import read

pytestmark = pytest.mark.usefixtures("loose")  # Flax's DynamicScale counts on JAX's own promotion


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A checkpoint and labelled sentences of at most 8 tokens, so that one shape is compiled; run in a folder apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_checkpoint(tmp_path / "weights")
    short = [(label, text) for label, text in sentences(900) if len(text.split()) < 7]
    write_table(tmp_path / "data.tsv", short)
    return ["--weights", "weights", "--data", "data.tsv", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def quickly_compiled():
    """Compilation is most of what these runs cost."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def main(*argv):
    return exit_status(finetune_bert.main, list(argv))


@pytest.mark.slow
def test_it_learns_and_resumes_bit_for_bit(given, tmp_path, capsys):
    run = [
        *given,
        "--steps",
        "40",
        "--learning-rate",
        "1e-2",
        "--checkpoint-every",
        "20",
        "--keep",
        "2",
        "--run-dir",
        "r",
    ]
    assert main(*run) == 0
    out = capsys.readouterr().out
    accuracy = float(re.search(r"^validation accuracy ([\d.]+) on \d+ texts$", out.strip().splitlines()[-1])[1])
    assert accuracy >= 0.9
    assert "in fp16 with fp32 masters" in out
    assert "epoch 1: validation accuracy" in out
    for picture in ("run.png", "confusion.png"):
        assert (tmp_path / "r" / picture).read_bytes().startswith(b"\x89PNG")
    straight = read(tmp_path / "r" / "metrics.csv")
    assert main(*run, "--resume", "20") == 0
    again = capsys.readouterr().out
    assert "going on at step 20" in again
    assert again.strip().splitlines()[-1] == out.strip().splitlines()[-1]
    resumed = read(tmp_path / "r" / "metrics.csv")
    for column in ("step", "loss", "accuracy", "loss_scale", "grad_norm", "skipped_total"):
        np.testing.assert_array_equal(resumed[column], straight[column])


@pytest.mark.slow
def test_the_comparison_shows_that_its_ways_end_alike(given, monkeypatch, capsys):
    """Of the five only three are compiled: fp32, fp16 with masters, Flax's DynamicScale."""
    results, compare = [], comparison.compare
    ways = [way for way in comparison.WAYS if way.name == "fp32" or way.half_params or way.flax]
    monkeypatch.setattr(comparison, "WAYS", ways)
    monkeypatch.setattr(finetune_bert, "compare", lambda setting: results.extend(compare(setting)))
    assert main(*given, "--compare", "--steps", "6", "--seeds", "2", "--learning-rate", "1e-3", "--dropout", "0") == 0
    out = capsys.readouterr().out
    fp32, masters, flax = results
    assert len(fp32.losses) == len(fp32.accuracies) == 2
    assert fp32.losses[0] != fp32.losses[1]
    for half in (masters, flax):
        np.testing.assert_allclose(half.losses, fp32.losses, rtol=0.005)
    # fp16 parameters, fp32 masters and two moments: 14 bytes for each that is halved, where fp32 has 12.
    assert fp32.argument_bytes < masters.argument_bytes < 14.1 / 12 * fp32.argument_bytes
    assert [way.name in out for way in ways] == [True] * 3
    assert "fp16 with fp32 masters, seed 1: " in out, "a line for every run as it ends"
    assert "noise of the seeds in fp32" in out
    assert "these speeds say nothing about GPUs" in out


def unlabelled(rows):
    return [*rows, ("", "no label")]


def one_class(rows):
    return [row for row in rows if row[0] == "good"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--weights", "nowhere"], "nowhere has no config.json"),
        (["--data", "nowhere.tsv"], "cannot read nowhere.tsv"),
        (["--half-params", "--precision", "fp32"], "--half-params needs a half precision"),
        (["--length", "128"], "--length 128 is too long; weights has 64 positions"),
        (["--batch-size", "12"], "a batch of 12 can't be cut"),
        (["--compare", "--accumulate", "2"], "write --compare without --accumulate"),
        (["--precision", "fp8"], "invalid choice"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(given, capsys, options, text):
    assert main(*given, *options) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("damaged", "text"),
    [(unlabelled, "has no label"), (one_class, "the only label is 'good'"), (lambda rows: [], "there are no rows")],
)
def test_labels_that_will_not_do_are_one_line_and_status_2(given, tmp_path, capsys, damaged, text):
    write_table(tmp_path / "data.tsv", damaged(sentences(20)))
    assert main(*given) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
